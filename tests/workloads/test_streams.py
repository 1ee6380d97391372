"""Records of workloads: their bytes, and whether their numbers are distributed as they should be.

Seeds are fixed; a share is held within five standard deviations of what the rules say.
"""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect import workloads
from kdirect.errors import ConfigError
from kdirect.state.plan import plan_from_json
from kdirect.workloads import EventTime

SIZES = {"ysb": 78, "bid": 32, "person": 206, "auction": 269, "cm": 64, "ro": 16}
START_MS = 1_700_000_000_000
NAMES = ("ysb", "nexmark", "cm", "ro", "zipf")


def streams() -> dict[str, Any]:
    return {s.name: s for name in NAMES for s in workloads.named(name).streams.values()}


def near(share: float, expected: float, count: int) -> bool:
    return abs(share - expected) <= 5 * math.sqrt(expected * (1 - expected) / count) + 1e-12


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_paper(name: str) -> None:
    stream = streams()[name]
    assert stream.layout.size == SIZES[name]
    assert stream.records(0, 3).tobytes().__len__() == 3 * SIZES[name]
    ends = sorted((f.position, f.end) for f in stream.layout.fields)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(ends))  # no gaps


@given(
    st.sampled_from(list(SIZES)),
    st.integers(0, 10**12),
    st.integers(1, 400),
    st.integers(1, 7),
    st.integers(1, 100),
)
def test_a_record_depends_on_its_number_alone(
    name: str, first: int, count: int, step: int, cut: int
) -> None:
    stream = streams()[name]
    whole = stream.records(first, count * step)
    dealt = stream.records(first + step - 1, count, step)
    assert dealt.tobytes() == whole[step - 1 :: step].tobytes()
    pieces = b"".join(
        stream.records(first + at, min(cut, count - at)).tobytes() for at in range(0, count, cut)
    )
    assert pieces == whole[:count].tobytes()


def test_seeds_differ_and_fields_do_not_repeat_each_other() -> None:
    one = workloads.ysb(keys=1 << 40, seed=1).streams["ysb"].records(0, 1000)
    two = workloads.ysb(keys=1 << 40, seed=2).streams["ysb"].records(0, 1000)
    assert (one["campaign"] != two["campaign"]).all()
    columns = [one[name].astype(float) for name in ("user", "page", "campaign", "ip")]
    correlation = np.corrcoef(columns) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(1000)


def test_an_array_of_another_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of ro"):
        workloads.ro().streams["ro"].records(0, 2, out=np.zeros(2, np.int64))


# -- YSB, CM, RO -----------------------------------------------------------------------------------


def test_ysb() -> None:
    n = 300_000
    rows = workloads.ysb(keys=100, step_us=10).streams["ysb"].records(0, n)
    user, page, campaign, ad, kind, time, ip, *rest = struct.unpack(
        "<5qqq2qih", rows[123_456].tobytes()
    )
    assert min(user, page, ip) >= 0 and campaign < 100 and ad < 5 and kind < 3
    assert time == START_MS + 123_456 * 10 // 1000
    assert rest == [0, 0, 0, 0]
    for kind in range(3):
        assert near((rows["event_type"] == kind).mean(), 1 / 3, n)
    counts = np.bincount(rows["campaign"], minlength=100)
    assert len(counts) == 100
    chi = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert abs(chi - 99) < 5 * math.sqrt(2 * 99)


def test_cm() -> None:
    n = 200_000
    rows = workloads.cm().streams["cm"].records(0, n)
    assert rows["machine"].max() == 12_499 and rows["machine"].min() == 0
    for name in ("cpu", "ram", "disk"):
        column = rows[name].view(np.float32) if rows[name].dtype.kind == "V" else rows[name]
        assert column.min() >= 0 and column.max() < 1.0000001
        assert abs(column.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    tasks = np.sort(np.bincount(rows["job"]))[::-1]
    assert tasks[:100].sum() > n / 2 and len(tasks) > 5000  # few jobs have most tasks


@pytest.mark.parametrize("z", [0.2, 0.99, 1.0, 1.5, 2.0])
def test_zipf(z: float) -> None:
    n, keys = 400_000, 1000
    found = workloads.named("zipf", keys=keys, zipf=z).streams["ro"].records(0, n)["key"]
    weights = (np.arange(keys) + 1.0) ** -z
    expected = n * weights / weights.sum()
    counts = np.bincount(found, minlength=keys)
    assert len(counts) == keys
    often = expected >= 10
    rest = np.array([counts[~often].sum()]), np.array([expected[~often].sum()])
    o, e = (np.concatenate([a[often], b]) for a, b in zip((counts, expected), rest))
    o, e = o[e > 0], e[e > 0]
    chi = ((o - e) ** 2 / e).sum()
    assert abs(chi - (len(o) - 1)) < 5 * math.sqrt(2 * len(o))


def test_zipf_of_a_wide_range() -> None:
    n, keys = 200_000, 100_000_000
    found = workloads.named("zipf", keys=keys, zipf=1.0).streams["ro"].records(0, n)["key"]
    total = math.log(keys) + 0.5772156649
    for first in (1, 10, 1000):
        share = sum(1 / k for k in range(1, first + 1)) / total
        assert near((found < first).mean(), share, n)
    assert found.max() < keys


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.5])
def test_pareto(alpha: float) -> None:
    n, keys = 200_000, 10_000
    found = workloads.ro(keys=keys, pareto=alpha).streams["ro"].records(0, n)["key"]
    assert found.min() == 0 and found.max() < keys
    cut = (keys + 1.0) ** -alpha
    for k in (1, 2, 10, 100):
        assert near((found >= k).mean(), ((k + 1.0) ** -alpha - cut) / (1 - cut), n)


def test_event_times() -> None:
    n = 100_000
    times = {"start_us": 10**15, "step_us": 250, "disorder_us": 50_000, "late_share": 0.01}
    rows = workloads.ro(**times, late_by_us=10**9).streams["ro"].records(0, n)
    behind = 10**12 + np.arange(n) // 4 - rows["time"]
    late = behind > 500_000
    assert near(late.mean(), 0.01, n)
    assert behind[~late].min() == 0 and behind[~late].max() == 50
    assert abs(behind[~late].mean() - 25) < 1
    assert set(np.unique(behind[late] // 1000)) == {1000}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: workloads.named("nope"), "no workload 'nope'"),
        (lambda: workloads.named("ysb", colour=1), "does not take all of colour"),
        (lambda: workloads.ro(keys=0), "keys=0"),
        (lambda: workloads.ro(zipf=1.0, pareto=1.0), "both"),
        (lambda: workloads.ro(zipf=-1.0), "zipf=-1.0"),
        (lambda: workloads.named("ro", zipf="steep"), "zipf=steep is out of range"),
        (lambda: workloads.named("ysb", late_share="half"), "late_share half is no share"),
        # It was taken for true.
        (lambda: workloads.named("nexmark", paper="no"), "paper='no'.*true or false"),
        (lambda: EventTime(late_share=2), "no share"),
        (lambda: workloads.nexmark(active_persons=0), "active_persons=0 is out of range"),
        (lambda: workloads.nexmark(active_persons=-5), "active_persons=-5"),
        (lambda: workloads.nexmark(hot_bidders=0), "hot_bidders=0"),
        (lambda: workloads.nexmark(hot_bidders=1.5), "hot_bidders=1.5"),  # type: ignore[arg-type]
        (lambda: workloads.nexmark(keys=0), "keys=0"),
        (lambda: workloads.nexmark(session_gap="0 seconds"), "session"),
        (lambda: workloads.cm(machines=0), "machines=0"),
        (lambda: workloads.cm(jobs=0), "keys=0"),
        (lambda: workloads.cm(window="0 seconds"), "window"),
        (lambda: workloads.ysb(window="-1 seconds"), "window"),
        (lambda: EventTime(start_us=5, disorder_us=6), "before 1970"),
        (lambda: EventTime(step_us=-1), "out of range"),
        (lambda: workloads.nexmark(hot_sellers=0), "hot_sellers=0"),
        (lambda: workloads.ysb().plan("t", "q9"), "it has ysb"),
    ],
)
def test_what_cannot_be_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_fields_of_one_name_in_two_streams_have_nothing_to_do_with_each_other() -> None:
    """Event times of persons and auctions were late by the same, record by record."""
    when = {"step_us": 0, "disorder_us": 1 << 40}
    streams = workloads.nexmark(**when).streams.values()
    times = [stream.records(0, 2000)["time"].astype(np.int64) for stream in streams]
    for one, other in itertools.combinations(times, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.1


# -- NEXMark ---------------------------------------------------------------------------------------

FIRST = 1000


def story(of_epoch: tuple[int, int, int], epochs: int) -> dict[str, np.ndarray]:
    """The rules told event by event: for each auction and each bid, how many persons and auctions
    there were when it happened, it included; and the number of its event."""
    persons = auctions = event = 0
    out: dict[str, list] = {"person": [], "auction": [], "bid": []}
    for _ in range(epochs):
        for kind, many in zip(("person", "auction", "bid"), of_epoch):
            for _ in range(many):
                persons += kind == "person"
                auctions += kind == "auction"
                out[kind].append((event, persons, auctions))
                event += 1
    return {kind: np.array(rows) for kind, rows in out.items()}


EPOCHS = 4000
TOLD = story((1, 3, 46), EPOCHS)


def of_stream(name: str, count: int, **settings: Any) -> Any:
    return workloads.nexmark(**settings).streams[name].records(0, count)


def test_ids_and_times_follow_the_order_of_events() -> None:
    for kind in ("person", "auction", "bid"):
        rows = of_stream(kind, len(TOLD[kind]))
        assert np.array_equal(rows["time"], START_MS + TOLD[kind][:, 0] * 100 // 1000)
        if kind != "bid":
            assert np.array_equal(rows["id"], FIRST + np.arange(len(rows)))


def held_to_the_rules(
    ids: np.ndarray, made: np.ndarray, *, hot_share: float, hot_at: int, active: int
) -> None:
    """Ids of others (counted from 0) against how many there were: a share is the hot one of the
    last 100 begun, the others are among the last `active` or the 10 to come."""
    hot = (made - 1) // 100 * 100 + hot_at
    oldest = np.maximum(made - active, 0)
    inside = (ids >= oldest) & (ids < made + 10)
    assert (inside | (ids == hot)).all()
    by_chance = ((hot >= oldest) & (hot < made + 10)) / (np.minimum(made, active) + 10)
    expected = (hot_share + (1 - hot_share) * by_chance).mean()
    assert near((ids == hot).mean(), expected, len(ids))
    # Those that are not hot are spread evenly over their range.
    others = inside & (ids != hot) & (made >= active)
    place = (ids - oldest)[others] / (active + 10)
    assert abs(place.mean() - 0.5) < 5 * math.sqrt(1 / 12 / others.sum()) + 0.02


def test_bids_follow_the_rules_of_the_public_generator() -> None:
    told = TOLD["bid"]
    rows = of_stream("bid", len(told))
    held_to_the_rules(rows["auction"] - FIRST, told[:, 2], hot_share=1 / 2, hot_at=0, active=101)
    held_to_the_rules(rows["bidder"] - FIRST, told[:, 1], hot_share=3 / 4, hot_at=1, active=1000)
    price = np.log10(rows["price"].view(np.float64) / 100)
    assert (rows["price"] == np.round(rows["price"])).all()
    assert abs(price.min()) < 0.01 and abs(price.max() - 6) < 0.01
    assert abs(price.mean() - 3) < 5 * 6 / math.sqrt(12 * len(rows))


def test_auctions_follow_the_rules_of_the_public_generator() -> None:
    told = TOLD["auction"]
    rows = of_stream("auction", len(told))
    held_to_the_rules(rows["seller"] - FIRST, told[:, 1], hot_share=3 / 4, hot_at=0, active=1000)
    assert set(np.unique(rows["category"])) == set(range(10, 15))
    length = rows["end"] - rows["start"]
    # 100 auctions take 166 ms; an auction lasts up to twice that.
    assert length.min() >= 0 and length.max() <= 334
    assert abs(length.mean() - 166.5) < 5


def test_shares_of_matching_joins() -> None:
    """A seller or bidder is there already unless he is one of the 10 to come (or, of bidders, the
    hot one in the moment before he is made)."""
    for name, column, hot_at in (("auction", "seller", 0), ("bid", "bidder", 1)):
        told = TOLD[name]
        made = told[:, 1]
        there = of_stream(name, len(told))[column] - FIRST < made
        active = np.minimum(made, 1000)
        hot_is_there = (made - 1) // 100 * 100 + hot_at < made
        expected = (0.75 * hot_is_there + 0.25 * active / (active + 10)).mean()
        assert near(there.mean(), expected, len(told))


def test_ratios_can_be_chosen() -> None:
    told = TOLD["bid"]
    rows = of_stream("bid", len(told), hot_auctions=10, hot_bidders=1)
    held_to_the_rules(rows["auction"] - FIRST, told[:, 2], hot_share=9 / 10, hot_at=0, active=101)
    held_to_the_rules(rows["bidder"] - FIRST, told[:, 1], hot_share=0, hot_at=1, active=1000)


def test_the_variant_of_the_paper() -> None:
    told = story((1, 4, 4), 20_000)
    workload = workloads.nexmark(paper=True)
    auctions = workload.streams["auction"].records(0, len(told["auction"]))
    bids = workload.streams["bid"].records(0, len(told["bid"]))
    assert len(auctions) == len(bids) == 4 * len(told["person"])
    for rows, column, name in ((auctions, "seller", "auction"), (bids, "bidder", "bid")):
        made = told[name][:, 1]
        ids = rows[column] - FIRST
        assert (ids >= 0).all() and (ids < made).all()  # always a person that is there
        place = (ids + 0.5) / made
        assert abs(place.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(ids))
        assert np.array_equal(rows["time"], START_MS + told[name][:, 0] * 100 // 1000)


def test_bids_of_skewed_auctions() -> None:
    n = 100_000
    rows = of_stream("bid", n, pareto=1.0, keys=1000)
    keys = rows["auction"] - FIRST
    assert keys.min() == 0 and keys.max() < 1000
    cut = 1 / 1001
    assert near((keys >= 9).mean(), (0.1 - cut) / (1 - cut), n)


def test_texts() -> None:
    person = of_stream("person", 500)
    cities = {bytes(city).rstrip(b"\0").decode() for city in person["city"]}
    assert "Los Angeles" in cities and len(cities) == 10
    auction = of_stream("auction", 500)
    letters = {bytes(text) for text in auction["description"]}
    assert len(letters) == 500
    assert all(b"a" <= bytes([c]) <= b"p" for text in letters for c in text)


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "query", "columns"),
    [
        ("ysb", "ysb", [["campaign"]]),
        ("nexmark", "nb7", [["auction", "price"]]),
        ("nexmark", "nb8", [["id", "name"], ["id"]]),
        ("nexmark", "nb11", [["bidder", "auction", "price"], []]),
        ("nexmark", "q11", [["bidder"]]),
        ("cm", "cm", [["job", "cpu"]]),
        ("ro", "ro", [["key"]]),
    ],
)
def test_plans(name: str, query: str, columns: list[list[str]]) -> None:
    workload = workloads.named(name)
    topics = {stream: f"topic-{stream}" for stream in workload.streams}
    plan = workload.plan(topics, query, mode="FAILFAST", delay_us=5)
    assert plan_from_json(plan.to_json()).hash == plan.hash
    assert [sorted(plan.columns_kept(i)) for i in range(len(plan.inputs))] == [
        sorted(names) for names in columns
    ]
    for read in plan.inputs:
        assert read.topic == f"topic-{read.name}"
        assert (read.mode, read.delay_us, read.time) == ("FAILFAST", 5, "time")


def test_the_command_knows_every_workload() -> None:
    from kdirect.cli_workload import NAMES as of_the_command
    from kdirect.workloads import NAMES as of_the_room

    assert tuple(of_the_room) == of_the_command == NAMES


@given(st.integers(0, 500))
def test_how_many_of_the_first_events_are_of_a_stream(events: int) -> None:
    for name in ("person", "auction", "bid"):
        expected = int((TOLD[name][:, 0] < events).sum())
        assert workloads.nexmark().streams[name].among(events) == expected
    assert workloads.ro().streams["ro"].among(events) == events
