"""What `kdirect.store.contract` promises, of each store."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kdirect.store.contract import (
    Changed,
    Check,
    Children,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Reason,
    Replace,
    SessionState,
    Unknown,
)
from tests.store.conftest import Bench
from tests.store.model import PATHS, Model, as_pair, random_commit

CONNECTED, SUSPENDED, EXPIRED, CLOSED = SessionState


def test_a_node_is_created_replaced_and_deleted(bench: Bench) -> None:
    store = bench.open()
    assert store.read("/a") == Found((None,))
    assert store.commit(Create("/a", b"one")) == Committed((0,))
    (node,) = store.read("/a").nodes
    assert (node.value, node.version, node.owned) == (b"one", 0, False)
    assert store.commit(Replace("/a", b"two", 0)) == Committed((1,))
    assert store.commit(Replace("/a", b"three")) == Committed((2,))
    (after,) = store.read("/a").nodes
    assert (after.value, after.version, after.created) == (b"three", 2, node.created)
    assert store.commit(Delete("/a", 2)) == Committed((-1,))
    assert store.read("/a") == Found((None,))
    store.commit(Create("/a"))
    (again,) = store.read("/a").nodes
    assert (again.value, again.version) == (b"", 0)
    assert again.created > node.created


def test_children_are_named_in_order(bench: Bench) -> None:
    store = bench.open()
    store.commit(Create("/a"), Create("/a/z"), Create("/a/b"), Create("/a/b/c"))
    assert store.children("/a", "/a/b", "/a/z", "/none") == Children((("b", "z"), ("c",), (), None))


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (Create("/a"), Reason.EXISTS),
        (Create("/none/a"), Reason.MISSING),
        (Create("/mine/a"), Reason.EPHEMERAL_PARENT),
        (Replace("/a", b"", 7), Reason.VERSION),
        (Replace("/none", b""), Reason.MISSING),
        (Delete("/a", 7), Reason.VERSION),
        (Delete("/none"), Reason.MISSING),
        (Delete("/a"), Reason.NOT_EMPTY),
        (Check("/a", 7), Reason.VERSION),
        (Check("/none"), Reason.MISSING),
        (Create("/large", bytes(1_000_001)), Reason.REFUSED),
    ],
    ids=lambda x: x.name.lower() if isinstance(x, Reason) else type(x).__name__,
)
def test_a_commit_happens_whole_or_not_at_all(bench: Bench, operation, reason) -> None:
    store = bench.open()
    store.commit(Create("/a", b"one"), Create("/a/b"), Create("/mine", ephemeral=True))
    answer = store.commit(
        Replace("/a", b"two"), Create("/new"), Create("/new/child"), Delete("/a/b"), Create("/a/b"),
        operation,
    )  # fmt: skip
    assert isinstance(answer, Conflict)
    assert (answer.index, answer.reason) == (5, reason)
    found = store.read("/a", "/new", "/a/b").nodes
    assert (found[0].value, found[0].version, found[1], found[2].version) == (b"one", 0, None, 0)


def test_operations_of_one_commit_see_those_before(bench: Bench) -> None:
    store = bench.open()
    answer = store.commit(
        Create("/a"), Create("/a/b", b"1"), Replace("/a/b", b"2", 0), Check("/a/b", 1),
        Delete("/a/b", 1), Check("/a", 0),
    )  # fmt: skip
    assert answer == Committed((0, 0, 1, 1, -1, 0))
    assert store.children("/a") == Children(((),))


def test_one_of_two_who_replace_a_version_loses(shared_bench: Bench) -> None:
    one, two = shared_bench.open(), shared_bench.open()
    one.commit(Create("/a"))
    assert one.commit(Replace("/a", b"one", 0)) == Committed((1,))
    lost = two.commit(Replace("/a", b"two", 0))
    assert isinstance(lost, Conflict)
    assert lost.reason is Reason.VERSION
    # A session sees what it lost against, at the latest when it asks again after its own commit.
    two.commit(Create("/b"))
    assert two.read("/a").nodes[0].value == b"one"


def test_an_ephemeral_node_goes_with_its_session(shared_bench: Bench) -> None:
    one, two = shared_bench.open(), shared_bench.open()
    one.commit(Create("/ids"), Create("/ids/1", b"x", ephemeral=True))
    assert one.read("/ids/1").nodes[0].owned
    two.commit(Create("/seen"))
    assert not two.read("/ids/1").nodes[0].owned
    assert two.children("/ids", watch=True) == Children((("1",),))
    one.store.close()
    two.wait_for(lambda s: "/ids" in s.changed())
    assert two.children("/ids") == Children(((),))
    assert one.states == [CONNECTED, CLOSED]


def test_a_watch_tells_once_of_each_kind_of_change(shared_bench: Bench) -> None:
    one, two = shared_bench.open(), shared_bench.open()
    for operation in (Create("/w", b"1"), Replace("/w", b"2"), Delete("/w")):
        two.events.clear()
        two.read("/w", watch=True)
        one.commit(operation)
        two.wait_for(lambda s: s.changed())
        assert set(two.changed()) == {"/w"}
    one.commit(Create("/w"))
    two.commit(Create("/other"))
    assert len(two.changed()) == 1, "a watch that has told tells nothing more"


def test_a_watch_tells_of_what_its_own_session_changes(bench: Bench) -> None:
    session = bench.open()
    session.read("/w", watch=True)
    session.children("/w", watch=True)
    for operation in (Create("/w"), Create("/w/c"), Replace("/w", b"2"), Delete("/w/c")):
        session.events.clear()
        session.commit(operation)
        assert set(session.changed()) == {"/w"}, operation
        session.read("/w", watch=True)
        session.children("/w", watch=True)
    session.events.clear()
    session.commit(Create("/v"))
    assert session.changed() == []


def test_children_are_watched_also_before_their_parent_is_there(shared_bench: Bench) -> None:
    one, two = shared_bench.open(), shared_bench.open()
    assert two.children("/p", watch=True) == Children((None,))
    one.commit(Create("/p"))
    two.wait_for(lambda s: "/p" in s.changed())
    two.events.clear()
    two.children("/p", watch=True)
    one.commit(Create("/p/c"))
    two.wait_for(lambda s: "/p" in s.changed())
    assert two.children("/p") == Children((("c",),))


def test_a_session_that_expired_says_so_and_asks_nothing_more(shared_bench: Bench) -> None:
    one, two = shared_bench.open(), shared_bench.open()
    one.commit(Create("/mine", ephemeral=True))
    two.commit(Create("/seen"))
    two.read("/mine", watch=True)
    shared_bench.lose_session(one)
    one.wait_for(lambda s: EXPIRED in s.states)
    two.wait_for(lambda s: "/mine" in s.changed())
    assert two.read("/mine") == Found((None,))
    assert one.commit(Create("/x")) == Unknown(ended=True)
    assert one.read("/x") == Unknown(ended=True)
    assert one.states[-1] is EXPIRED
    assert two.read("/x") == Found((None,))


def test_a_session_outlives_the_servers_restart(shared_bench: Bench) -> None:
    store = shared_bench.open()
    store.commit(Create("/a", b"kept"), Create("/mine", b"", ephemeral=True))
    store.read("/a", watch=True)
    shared_bench.go_away()
    store.wait_for(lambda s: s.states[-1] is SUSPENDED)
    assert store.commit(Replace("/a", b"never")) == Unknown()
    assert store.read("/a") == Unknown()
    shared_bench.come_back()
    store.wait_for(lambda s: s.states[-1] is CONNECTED)
    assert store.states == [CONNECTED, SUSPENDED, CONNECTED]
    kept, mine = store.read("/a", "/mine").nodes
    assert kept.value == b"kept"
    assert mine.owned
    assert Changed("/a") not in store.events


def test_answers_come_in_the_order_of_requests(bench: Bench) -> None:
    session = bench.open()
    session.commit(Create("/n", b"0"))
    came: list[Any] = []
    for number in range(1, 40):
        session.store.commit([Replace("/n", b"%d" % number)], came.append)
        session.store.read(["/n"], came.append)
    session.children("/n")
    assert [x.versions[0] for x in came[::2]] == list(range(1, 40))
    assert [int(x.nodes[0].value) for x in came[1::2]] == list(range(1, 40))


def test_a_mistake_of_the_caller_is_told_at_once(bench: Bench) -> None:
    store = bench.open().store
    for path in ("", "/", "a", "/a/", "//a", "/a/../b", "/a\n"):
        with pytest.raises(ValueError, match="no path"):
            store.read([path], lambda answer: None)
    with pytest.raises(ValueError, match="without operations"):
        store.commit([], lambda answer: None)


@pytest.mark.parametrize("seed", range(3))
def test_random_commits_are_answered_as_by_a_model(bench: Bench, seed: int) -> None:
    session, model, chance = bench.open(), Model(), random.Random(seed)
    happened = 0
    for number in range(300):
        operations = random_commit(chance, model)
        answer = session.commit(*operations)
        assert as_pair(answer) == model.commit(operations), (number, operations)
        happened += isinstance(answer, Committed)
        if number % 20 == 19:
            found = [node and (node.value, node.version, node.owned)
                     for node in session.read(*PATHS).nodes]  # fmt: skip
            assert found == [model.nodes.get(path) for path in PATHS]
            names = session.children(*PATHS).names
            assert names == tuple(model.children(path) for path in PATHS)
    assert 50 < happened < 250


def test_a_refusal_waits_for_the_answers_before_it(bench: Bench) -> None:
    session = bench.open()
    session.commit(Create("/n"))
    came: list[object] = []
    session.store.commit([Replace("/n", b"1")], lambda answer: came.append("one"))
    session.store.commit([Create("/large", bytes(1_000_001))], lambda answer: came.append("large"))
    session.store.read([], lambda answer: came.append("nothing"))
    session.store.children([], lambda answer: came.append("nobody"))
    session.read("/n")
    assert came == ["one", "large", "nothing", "nobody"]


def test_a_commit_of_many_small_operations_is_too_large_as_well(bench: Bench) -> None:
    session = bench.open()
    answer = session.commit(*[Create(f"/{number:06d}") for number in range(15_000)])
    assert isinstance(answer, Conflict)
    assert answer.reason is Reason.REFUSED
    assert "bytes in one commit" in answer.detail
    assert isinstance(session.commit(*[Create(f"/{n:06d}") for n in range(5_000)]), Committed)
    assert session.states == [CONNECTED]


def test_a_change_is_told_before_an_answer_that_shows_it(bench: Bench) -> None:
    session = bench.open()
    session.commit(Create("/n", b"0"))
    session.read("/n", watch=True)
    seen: list[Any] = []
    session.store.commit([Replace("/n", b"1")], seen.append)
    session.store.read(["/n"], lambda answer: seen.append((answer, session.changed())))
    session.read("/n")
    answer, changed = seen[1]
    assert answer.nodes[0].value == b"1"
    assert changed == ["/n"]


def test_a_store_is_closed_by_what_it_calls(bench: Bench) -> None:
    session = bench.open()
    session.store.read(["/a"], lambda answer: session.store.close())
    assert isinstance(session.commit(Create("/a")), Unknown | Committed)
    session.wait_for(lambda s: CLOSED in s.states)
    assert session.states == [CONNECTED, CLOSED]


def test_what_is_asked_after_the_close_is_answered(bench: Bench) -> None:
    session = bench.open()
    session.store.close()
    session.store.close()
    assert session.commit(Create("/a")) == Unknown(ended=True)
    assert session.read("/a") == Unknown(ended=True)
    assert session.states == [CONNECTED, CLOSED]


def test_a_store_is_started_once_and_first(bench: Bench) -> None:
    store = bench.new_store()
    with pytest.raises(ValueError, match="not started"):
        store.read(["/a"], lambda answer: None)
    store.close()
    with pytest.raises(ValueError, match="once"):
        store.start(lambda event: None)
    with pytest.raises(ValueError, match="once"):
        bench.open().store.start(lambda event: None)
