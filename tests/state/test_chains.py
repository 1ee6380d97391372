"""Chains of rows and their pages: forged pages, limits, other processes, long rows."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import DeltaError, StateError, StateLimitError
from kdirect.state import AggregatePlan, Input, JoinPlan, Session, Tumbling
from kdirect.state.append import AppendState
from kdirect.state.arena import StateMemory
from kdirect.state.layout import PAGE_HEADER_BYTES
from kdirect.state.rows import RowBlock, RowShape
from tests.state.append_run import Cluster, owners_of, page_memory, update
from tests.state.family import NOW_US, SECOND, VALUES, nullable, types_unit


def join(window: Any = None, how: str = "left") -> JoinPlan:
    return JoinPlan(
        left=Input(topic="l", schema="k string, t int64, a string, n int32", time="t"),
        right=Input(topic="r", schema="k2 string, t2 int64, b binary", time="t2"),
        left_keys=("k",),
        right_keys=("k2",),
        window=window or Tumbling(size_us=SECOND),
        how=how,
    )


def sessions() -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="l", schema="k int64, t int64, x int64", time="t"),
        keys=("k",),
        window=Session(gap_us=SECOND),
        aggregates=(("sum", "x"), ("collect_list", "x")),
    )


def intervals() -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="l", schema="k int64, t int64, x int64", time="t"),
        keys=("k",),
        window=Session(gap_us=SECOND),
        aggregates=(("sum", "x"), ("max", "x")),
    )


def texts() -> AggregatePlan:
    return AggregatePlan(
        input=Input(topic="l", schema="k int64, t int64, x int64, a string", time="t"),
        keys=("k",),
        window=Tumbling(size_us=SECOND),
        aggregates=(("min", "a"), ("last", "a"), ("collect_set", "x"), ("collect_set", "a")),
    )


def left_rows(n: int) -> list[dict]:
    return [{"k": f"key {i % 7}", "t": i, "a": "v" * (i % 20), "n": i, "x": i} for i in range(n)]


def pages_of(plan: Any, n: int = 100) -> list[bytes]:
    """Pages that executor 1 of two sends to executor 0."""
    cluster = Cluster(plan, 2)
    rows = left_rows(n)
    if isinstance(plan, AggregatePlan):
        rows = [r | {"k": r["n"] % 7} for r in rows]
    update(cluster.executors[1], 0, plan.inputs[0], rows, NOW_US)
    return [page for _, leader, page in cluster.flush(1) if leader == 0]


NOT_UTF8 = [
    b"\x80", b"\xbf", b"\xc0\x80", b"\xc1\xbf", b"\xc3", b"\xe0\x9f\xbf", b"\xed\xa0\x80",
    b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5", b"\xff", b"\xe2\x82",
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "text"), [(join(), b"vvvvvvvvv"), (join(), b"key 3"), (texts(), b"vvvvvvvvv")]
)
def test_text_that_is_not_utf8_is_refused(plan: Any, text: bytes) -> None:
    """It was merged, and came out in a table that no other program can read."""
    reasons = set()
    for page in pages_of(plan, 30):
        for at in range(0, len(text) - 3, 4):
            for bad in (*NOT_UTF8, "aé".encode()[:2]):
                forged = page.replace(text, text[:at] + bad + text[at + len(bad) :], 1)
                state = Cluster(plan, 2).executors[0]
                if len(forged) != len(page) or forged == page:
                    continue
                with pytest.raises(DeltaError, match="executor 1") as said:
                    state.merge(1, forged)
                assert not state.tables
                reasons.add("UTF-8" in str(said.value))
    # A changed key may belong to another leader, too.
    assert True in reasons and (text.startswith(b"key") or False not in reasons)


@pytest.mark.parametrize("text", ["é", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\U00010000"])
def test_text_that_is_utf8_is_merged(text: str) -> None:
    page = next(page for page in pages_of(join()) if b"vvvvvvvvv" in page)
    forged = page.replace(b"v" * len(text.encode()), text.encode())
    assert Cluster(join(), 2).executors[0].merge(1, forged)


def results(state: AppendState) -> list[str]:
    return sorted(str(r) for b in state.trigger(1 << 50) for r in b.to_pylist())


@pytest.mark.parametrize(
    "plan",
    [join(), sessions(), intervals(), texts()],
    ids=["join", "list", "interval", "text"],
)
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30))
def test_a_forged_page_is_refused_or_read_and_never_leads_outside(plan: Any, seed: int) -> None:
    chance = random.Random(seed)
    page = bytearray(chance.choice(pages_of(plan)))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(page))
        page[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    if chance.random() < 0.3:
        del page[chance.randrange(len(page)) // 8 * 8 :]
    cluster = Cluster(plan, 2)
    state = cluster.executors[0]
    before = state.memory.allocated
    try:
        state.merge(1, bytes(page))
    except DeltaError as e:
        assert "executor 1" in str(e)
        assert state.memory.allocated == before and not state.tables
    except StateError:
        pass  # a state whose sum overflows
    else:
        for batch in state.trigger(1 << 50):
            assert batch.num_rows  # every length was followed


def test_pages_of_another_plan_and_for_another_leader_are_refused() -> None:
    page = pages_of(join())[0]
    with pytest.raises(DeltaError, match="another plan"):
        Cluster(sessions(), 2).executors[0].merge(1, page)
    with pytest.raises(DeltaError, match="another leader"):
        Cluster(join(), 2).executors[1].merge(0, page)
    late = Cluster(join(), 2).executors[0]
    late.begin(SECOND)
    with pytest.raises(DeltaError, match="not open"):
        late.merge(1, page)
    with pytest.raises(DeltaError, match="bytes"):
        late.merge(1, page[: PAGE_HEADER_BYTES - 8])


@pytest.mark.parametrize(
    "plan",
    [join(), sessions(), intervals(), texts()],
    ids=["join", "list", "interval", "text"],
)
def test_another_process_goes_on_with_the_same_memory(plan: Any, tmp_path: Any) -> None:
    path = tmp_path / "state"
    memory = StateMemory.open(path, 1 << 22)
    state = AppendState(plan, memory, page_memory(), executor=0, executors=1, owners=owners_of(1))
    rows = left_rows(300)
    if isinstance(plan, AggregatePlan):
        rows = [r | {"k": r["n"] % 7} for r in rows]
    update(state, 0, plan.inputs[0], rows, NOW_US)
    alike = Cluster(plan, 1).executors[0]
    update(alike, 0, plan.inputs[0], rows, NOW_US)
    catalogue, blocks, top = state.catalogue(), state.blocks(), memory.top
    other = StateMemory.open(path, 1 << 22)
    other.restore(top, blocks)
    again = AppendState(plan, other, page_memory(), executor=0, executors=1, owners=owners_of(1))
    again.adopt(catalogue, blocks)
    expected = results(alike)
    assert len(expected) >= 7 and results(again) == expected


def test_a_chain_that_leaves_its_log_is_found_before_it_is_followed(tmp_path: Any) -> None:
    plan = join()
    memory = StateMemory.open(tmp_path / "state", 1 << 22)
    state = AppendState(plan, memory, page_memory(), executor=0, executors=1, owners=owners_of(1))
    update(state, 0, plan.inputs[0], left_rows(300), NOW_US)
    table = state.tables[0]
    entry = int(table.table.scan()[3])
    words = np.frombuffer(memory, np.uint64)
    head, count = int(words[entry // 8]), int(words[entry // 8 + 1])
    for word, value in ((0, head + 8), (0, 1 << 40), (1, count + 1), (1, count - 1), (2, head)):
        kept = words[entry // 8 + word]
        words[entry // 8 + word] = value
        fresh = AppendState(
            plan, memory, page_memory(), executor=0, executors=1, owners=owners_of(1)
        )
        with pytest.raises(ValueError, match="leaves its log"):
            fresh.adopt(state.catalogue(), state.blocks())
        words[entry // 8 + word] = kept


@pytest.mark.parametrize("plan", [join(), intervals()], ids=["join", "interval"])
def test_a_catalogue_that_names_other_memory_is_refused(plan: Any) -> None:
    """It was believed, as long as its CRC was right: the process ended by a signal."""
    memory = StateMemory.anonymous(1 << 22)
    make = {"executor": 0, "executors": 1, "owners": owners_of(1)}
    state = AppendState(plan, memory, page_memory(), **make)
    keys = {"k": 7} if isinstance(plan, AggregatePlan) else {}
    update(state, 0, plan.inputs[0], [r | keys for r in left_rows(300)], NOW_US)
    far, blocks = 1 << 45, state.blocks()

    def entries() -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
        catalogue = copy.deepcopy(state.catalogue())
        return catalogue, catalogue[0], catalogue[0]["table"]

    forged = []
    for index, log in ((far, 12), (entries()[1]["segments"][0][0], 12), (-4096, 12), (None, 39)):
        catalogue, _, table = entries()
        table |= {"index_log": log} | ({} if index is None else {"index": index})
        forged.append(catalogue)
    for segment in ((far, 12, far + 4096), blocks[-1] + (blocks[-1][0],)):
        for which in (1, 2):
            found = entries()
            found[which]["segments"].append(segment)
            forged.append(found[0])
    for rows_in_log in (1 << 63, -1):
        catalogue, chains, _ = entries()
        chains["rows"] = rows_in_log
        forged.append(catalogue)
    forged.append(entries()[0] * 2)
    for catalogue in forged:
        with pytest.raises((ValueError, OverflowError)):
            AppendState(plan, memory, page_memory(), **make).adopt(catalogue, blocks)
    AppendState(plan, memory, page_memory(), **make).adopt(state.catalogue(), blocks)


@pytest.mark.parametrize("plan", [sessions(), intervals()], ids=["list", "interval"])
def test_sessions_that_go_on_are_not_written_again(plan: Any) -> None:
    """All of them were, each time that as many had been looked at as there are."""
    state = Cluster(plan, 1).executors[0]
    source, place = plan.inputs[0], []
    for n in range(12):
        now = n * SECOND // 2
        time = now // types_unit(source)
        update(state, 0, source, [{"t": time, "k": k, "x": 1} for k in range(2000)], NOW_US)
        place = place or list(state.tables[0].table.scan())
        assert not list(state.trigger(now - 1))
        assert list(state.tables[0].table.scan()) == place
    assert sum(batch.num_rows for batch in state.trigger(NOW_US)) == 2000


def test_the_limit_of_the_state_is_named() -> None:
    plan = join()
    cluster = Cluster(plan, 1, limit=1 << 16)
    with pytest.raises(StateLimitError, match=r"state_limit"):
        update(cluster.executors[0], 0, plan.inputs[0], left_rows(5000), NOW_US)


def test_a_row_that_is_too_long_is_refused_wherever_its_leader_is() -> None:
    plan = join()
    row = {**left_rows(1)[0], "a": "x" * 40_000}
    for executors in (1, 4):
        cluster = Cluster(plan, executors)
        with pytest.raises(StateLimitError, match="row of l has"):
            update(cluster.executors[0], 0, plan.inputs[0], [row], NOW_US)


def test_a_page_is_filled_and_another_one_follows() -> None:
    pages = pages_of(join(), 2000)
    assert len(pages) > 5
    assert all(len(page) <= 4096 - 64 for page in pages)
    cluster = Cluster(join(), 2)
    merged = sum(cluster.executors[0].merge(1, page) for page in pages)
    assert merged == sum(int.from_bytes(page[4:8], "little") for page in pages)
    assert sum(b.num_rows for b in cluster.executors[0].trigger(SECOND)) == merged


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_what_they_were(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=10))
    from kdirect.state.schema import arrow_type

    n = data.draw(st.integers(1, 20))
    arrays = [
        pa.array([data.draw(nullable(kind)) for _ in range(n + 2)], arrow_type(kind))[1 : n + 1]
        for kind in kinds
    ]
    shape = RowShape([(f"c{i}", a.type) for i, a in enumerate(arrays)])
    rows = np.array(data.draw(st.lists(st.integers(0, n - 1))), np.uint32)
    block = RowBlock(shape, arrays, rows)
    words = np.full((len(rows) + 1, block.longest + 1), 0xA5A5A5A5A5A5A5A5, np.uint64)
    base = words.ctypes.data
    addresses = base + np.arange(len(rows), dtype=np.uint64) * np.uint64(words.strides[0])
    block.write(addresses)
    assert (words[:, -1] == 0xA5A5A5A5A5A5A5A5).all()  # nothing is written after a row
    holes = np.concatenate([addresses, np.zeros(1, np.uint64)])
    for array, found in zip(arrays, shape.decode(holes), strict=True):
        assert found.to_pylist() == [*array.take(pa.array(rows)).to_pylist(), None]
        found.validate(full=True)
