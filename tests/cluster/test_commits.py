"""What a controller does when a commit fails, is lost, or meets nodes that somebody edited."""

from __future__ import annotations

import pytest

from kdirect.cluster import controller as rules
from kdirect.cluster import paths, records
from kdirect.cluster.codes import Code
from kdirect.cluster.controller import Phase, Ticked
from kdirect.cluster.image import Settings
from kdirect.cluster.requests import (
    AlterInSync,
    DeleteTopic,
    ElectionKind,
    InSyncRow,
    ShutDown,
)
from kdirect.errors import CorruptMetadataError
from kdirect.store.contract import (
    Check,
    Committed,
    Conflict,
    Create,
    Delete,
    Reason,
    Replace,
    Unknown,
)
from tests.cluster.desk import T0, T1, Desk, alter, elect, stop
from tests.cluster.observer import Unchecked

# -- commits ---------------------------------------------------------------------------------------


def test_every_commit_is_fenced_and_one_is_under_way() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0,)])
    desk.create("u", [(0,)])
    desk.create("v", [(0,)])
    (commit,) = desk.held
    version = desk.tree.get(paths.CONTROLLER_EPOCH).version
    assert commit.operations[0] == Check(paths.CONTROLLER_EPOCH, version)
    assert not desk.answers
    desk.commit_held()
    assert len(desk.answers) == 1
    (commit,) = desk.held  # all that came meanwhile
    written = {operation.path for operation in commit.operations}
    assert {paths.topic("u"), paths.topic("v")} <= written
    desk.commit_held()
    assert len(desk.answers) == 3


def test_leaders_are_elected_before_requests_are_carried_out() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0, 1)])
    desk.commit_held()
    desk.create("u", [(1,)])
    for number in range(3):
        desk.create(f"large{number}", [(1,)], note="x" * 200_000)
    stop(desk, 0)
    desk.commit_held()
    assert paths.state(T0) in [operation.path for operation in desk.held[0].operations]
    while desk.held:
        desk.commit_held()
    assert desk.state().leader == 1
    assert len(desk.answers) == 5


@pytest.mark.parametrize("happened", [True, False])
def test_an_unknown_commit_is_read_back_before_anything_goes_on(happened) -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0,)])
    desk.create("u", [(0,)])
    if happened:
        desk.carry_out(desk.held[0])
    desk.lose(Unknown())
    assert (desk.controller.phase, desk.answers, desk.held) == (Phase.READING, {}, [])
    assert desk.asked == [(paths.CONTROLLER_EPOCH, paths.CHANGES)]
    desk.asked.clear()
    # The store still does not answer: it is asked again when it is back, and not before.
    desk.feed(rules.ReadBack(Unknown()))
    desk.brokers()
    assert not desk.asked
    desk.feed(rules.Connected())
    desk.read_asked()
    assert len(desk.answers) == (1 if happened else 0)
    desk.hold = False
    desk.commit_held()
    assert [a.outcome.code for a in desk.answers.values()] == [Code.NONE] * 2
    assert {"t", "u"} == set(desk.tree.children(paths.TOPICS))


@pytest.mark.parametrize("answer", ["conflict", "read back"])
def test_a_controller_that_was_replaced_resigns(answer) -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0,)])
    desk.create("u", [(0,)])
    desk.write(Replace(paths.CONTROLLER_EPOCH, b"7"))
    if answer == "conflict":
        desk.commit_held()
    else:
        desk.lose(Unknown())
        desk.read_asked()
    assert desk.resigned == ["another broker has become controller"]
    assert [a.outcome.code for a in desk.answers.values()] == [Code.NOT_CONTROLLER] * 2
    later = desk.ask(AlterInSync(None, 0, 0, (InSyncRow(T0, 0, 0, ()),)))
    assert (later.outcome.code, later.rows[0].code) == (Code.NOT_CONTROLLER,) * 2
    assert not desk.held


def test_a_controller_whose_session_ended_answers_all_that_waits() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0,)])
    desk.ask(ShutDown(None, 0, desk.live(0).incarnation))
    desk.ask(DeleteTopic(None, "t"))
    desk.lose(Unknown(ended=True))
    assert [a.outcome.code for a in desk.answers.values()] == [Code.NOT_CONTROLLER] * 3
    assert len(desk.resigned) == 1


def test_what_the_store_does_not_take_fails_alone() -> None:
    desk = Desk(hold=True)
    desk.create("t", [(0,)])
    desk.create("bad", [(0,)])
    desk.create("u", [(0,)])
    desk.commit_held()
    while desk.held:
        paths_of = [operation.path for operation in desk.held[0].operations]
        if paths.topic("bad") in paths_of:
            desk.lose(Conflict(paths_of.index(paths.topic("bad")), Reason.REFUSED, "too large"))
        else:
            desk.commit_held()
    assert [a.outcome.code for a in desk.answers.values()] == [
        Code.NONE, Code.UNKNOWN_SERVER_ERROR, Code.NONE,
    ]  # fmt: skip
    (report,) = desk.reports
    assert paths.topic("bad") in report


def test_a_review_that_the_store_does_not_take_waits_for_the_next_tick() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.hold = True
    stop(desk, 0)
    for _ in range(2):
        index = [o.path for o in desk.held[0].operations].index(paths.state(T0))
        desk.lose(Conflict(index, Reason.REFUSED))
    assert not desk.held
    desk.hold = False
    desk.feed(Ticked(1))
    assert desk.state().leader == 1


# -- nodes that somebody edited --------------------------------------------------------------------


def test_a_state_that_was_deleted_is_written_again_in_a_new_epoch() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    alter(desk, 0, 0)
    desk.observer.see((Delete(paths.state(T0)),), 1)
    alter_after = InSyncRow(T0, 0, 1, desk.in_sync(0, 1))
    desk.ask(AlterInSync(None, 0, desk.live(0).incarnation, (alter_after,)))
    assert desk.state().leader_epoch == 1
    assert desk.state().leader == 0
    stop(desk, 0)
    assert desk.state().leader_epoch == 2


def test_nodes_of_a_topic_that_were_all_deleted_are_written_again() -> None:
    desk = Desk()
    topic_id = desk.create("t", [(0, 1)]).rows[0].topic_id
    root = paths.topic("t")
    desk.observer.see(
        (
            Delete(paths.state(T0)), Delete(paths.partition(T0)), Delete(paths.partitions("t")),
            Delete(root),
        ),
        1,
    )  # fmt: skip
    stop(desk, 0)
    assert desk.state().leader == 1
    assert records.decode_topic(root, desk.tree.get(root).value).topic_id == topic_id


def test_a_state_that_was_damaged_meanwhile_is_written_again() -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.tree.commit((Replace(paths.state(T0), b"{"),))
    stop(desk, 0)
    assert desk.state()[:3] == (1, 1, (1,))


def test_a_state_that_a_new_controller_cannot_read_is_left_alone_until_it_is_repaired() -> None:
    desk = Desk()
    desk.create("t", [(0, 1), (0, 1)])
    good = desk.tree.get(paths.state(T0)).value
    desk.tree.commit((Replace(paths.state(T0), b"[]"),))
    desk.begin()
    (report,) = desk.reports
    assert paths.state(T0) in report
    assert "restore the node" in report
    stop(desk, 0)
    assert desk.tree.get(paths.state(T0)).value == b"[]"
    assert desk.state(T1).leader == 1
    row = InSyncRow(T0, 0, 1, desk.in_sync(1))
    answer = desk.ask(AlterInSync(None, 1, desk.live(1).incarnation, (row,)))
    assert answer.rows[0].code is Code.UNKNOWN_TOPIC_OR_PARTITION
    assert elect(desk, ElectionKind.UNCLEAN, T0) == [Code.KAFKA_STORAGE_ERROR]
    desk.tree.commit((Replace(paths.state(T0), good),))
    desk.feed(Ticked(1))
    assert desk.state(T0).leader == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (paths.topic("t"), b"{}"),
        (paths.topic_config("t"), b"no"),
        (paths.CHANGES, b"\xff"),
        (paths.broker(0), b"{}"),
        (paths.broker_config("1"), b"1"),
        (paths.REASSIGNMENTS, b"1"),
    ],
)
def test_a_new_controller_reports_damaged_nodes_and_works_on(path, value) -> None:
    desk = Desk()
    desk.create("t", [(0, 1)])
    desk.create("u", [(1, 2)])
    desk.tree.commit((Create(path),))
    desk.tree.commit((Replace(path, value),))
    desk.observer = Unchecked(desk.observer.tree)
    desk.begin()
    (report,) = desk.reports
    assert path in report
    assert desk.create("new", [(1,)]).outcome.code is Code.NONE
    if path == paths.topic("t"):
        assert desk.create("t", [(0,)]).outcome.code is Code.TOPIC_ALREADY_EXISTS


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"99999999999999999999", b"\xff", b"3"])
def test_a_damaged_controller_epoch_is_one_clear_error(value) -> None:
    desk = Desk()
    desk.tree.commit((Replace(paths.CONTROLLER_EPOCH, value),))
    with pytest.raises(CorruptMetadataError, match=paths.CONTROLLER_EPOCH):
        rules.begin(desk.nodes(), 9, Settings(), now_ms=0)
    nodes = desk.nodes()
    del nodes[paths.CONTROLLER_EPOCH]
    with pytest.raises(CorruptMetadataError, match="missing"):
        rules.begin(nodes, 9, Settings(), now_ms=0)


def test_changes_written_by_somebody_else_end_the_controller() -> None:
    desk = Desk()
    desk.tree.commit((Replace(paths.CHANGES, b'{"version":1,"generation":9,"changes":[]}'),))
    desk.create("t", [(0,)])
    assert desk.resigned == [f"somebody else has written {paths.CHANGES}"]
    assert [a.outcome.code for a in desk.answers.values()] == [Code.NOT_CONTROLLER]


def test_an_answer_to_no_question_does_nothing() -> None:
    desk = Desk()
    before = desk.controller
    for event in (
        rules.CommitAnswered(7, Committed(())),
        rules.ReadBack(Unknown()),
        rules.Connected(),
    ):
        desk.feed(event)
    assert desk.controller == before


def test_a_new_controller_writes_changes_again_if_they_and_their_parent_are_lost() -> None:
    desk = Desk()
    desk.create("t", [(0,)])
    before = desk.controller.image.changes.generation
    desk.observer = Unchecked(desk.observer.tree)
    desk.write(Delete(paths.CHANGES), Delete("/kdirect"))
    desk.begin()
    assert desk.create("u", [(0,)]).outcome.code is Code.NONE
    changes = records.decode_changes(paths.CHANGES, desk.tree.get(paths.CHANGES).value)
    assert changes.since(before) is None  # a broker that has seen the old ones reads everything
