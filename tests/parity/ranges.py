"""Ranges of batch queries by offsets and by times, and more of what is refused: the rest of
KafkaRelationSuite and of the bad options of KafkaSourceSuiteBase."""

from __future__ import annotations

from typing import Any

from tests.parity.relation import MS, at
from tests.parity.scenario import scenario
from tests.parity.world import World

FAR = 2**63 - 1


def three(w: World) -> str:
    """Three partitions, with 0 to 9 in the first second, 10 to 19 in the next, 20 to 29 in the
    third; a number's partition is its remainder by 3."""
    topic = w.topic(3, retention_ms=-1)
    for second in range(3):
        for p in range(3):
            values = [b"%d" % n for n in range(10 * second, 10 * second + 10) if n % 3 == p]
            w.topics.fill(topic, values, p, timestamp_ms=MS + 1000 * second)
    return topic


def listed(*numbers: int) -> str:
    return repr(sorted(map(str, numbers)))


def second(topic: str, *numbers: int) -> str:
    """Times of the three partitions; one number for all of them."""
    return at(topic, *(n if n == FAR else MS + 1000 * n for n in (numbers * 3)[:3]))


TENS = {n: range(10 * n, 10 * n + 10) for n in range(3)}

for name, expected, options in (
    ("starts and ends of partitions", listed(*TENS[1]),
     lambda t: {"startingOffsetsByTimestamp": second(t, 1),
                "endingOffsetsByTimestamp": second(t, 2)}),
    ("starts of partitions, ending offsets", listed(*(n for n in range(30) if n % 3 != 2), 2),
     lambda t: {"startingOffsetsByTimestamp": second(t, 0), "endingOffsets": at(t, -1, -1, 1)}),
    ("starting offsets, ends of partitions", listed(*range(20)),
     lambda t: {"startingOffsets": at(t, -2, -2, 0), "endingOffsetsByTimestamp": second(t, 2)}),
    ("starts of partitions alone", listed(*range(10, 30)),
     lambda t: {"startingOffsetsByTimestamp": second(t, 1)}),
    ("ends of partitions alone", listed(*range(20)),
     lambda t: {"endingOffsetsByTimestamp": second(t, 2)}),
    ("one start and one end", listed(*TENS[1]),
     lambda t: {"startingTimestamp": MS + 1000, "endingTimestamp": MS + 2000}),
    ("an end after every record of a partition",
     listed(*range(10), *(n for n in range(10, 30) if n % 3 == 2)),
     lambda t: {"endingOffsetsByTimestamp": second(t, 1, 1, FAR)}),
):  # fmt: skip

    @scenario("relation", f"a range by time: {name}", expected)
    def by_time(w: World, options: Any = options) -> Any:
        topic = three(w)
        return w.values(w.read(topic, **options(topic)))


@scenario("relation", "a start after every record of one partition is refused", "'refused'")
def one_unmatched(w: World) -> Any:
    topic = three(w)
    given = {"startingOffsetsByTimestamp": second(topic, 1, 1, FAR)}
    return w.refused(lambda: w.values(w.read(topic, **given)))


@scenario(
    "relation", "given ends stay, latest ones move", "(['0', '1', '2'], ['0', '1', '2', '4'])"
)
def moving(w: World) -> Any:
    topic = w.topic(3, 0, 1, 2)
    given = {"startingOffsets": at(topic, -2, -2, 0), "endingOffsets": at(topic, -1, -1, 1)}
    frame = w.read(topic, **given)
    first = w.values(frame)
    w.topics.fill(topic, [b"3"], 2)
    w.topics.fill(topic, [b"4"], 1)
    return first, w.values(frame)


@scenario("relation", "earliest is what it is when an action starts", "(['0', '1'], ['2'])")
def late_start(w: World) -> Any:
    topic = w.topic(1, 0, 1)
    frame = w.read(topic, startingOffsets="earliest", endingOffsets="latest")
    first = w.values(frame)
    w.topics.delete_records(topic, 0, 2)
    w.fill(topic, 1, 2)
    return first, w.values(frame)


@scenario("relation", "no headers, several, and two of one name",
          "[None, [('a', b'b'), ('c', b'd')], [('e', b'f'), ('e', b'g')]]")  # fmt: skip
def several_headers(w: World) -> Any:
    topic = w.topic(1)
    for given in (None, [("a", b"b"), ("c", b"d")], [("e", b"f"), ("e", b"g")]):
        w.topics.fill(topic, [b"v"], headers=given)
    rows = w.read(topic, includeHeaders=True).orderBy("offset").collect()
    return [r.headers and [(h.key, bytes(h.value)) for h in r.headers] for r in rows]


@scenario("relation", "minPartitions over unequal partitions, and records that come",
          "(True, 21, 31)")  # fmt: skip
def min_partitions(w: World) -> Any:
    topic = w.topic(3)
    for p, values in enumerate((range(10), range(10, 20), [20])):
        w.topics.fill(topic, [b"%d" % v for v in values], p)
    frame = w.read(topic, minPartitions=6)
    tasks, before = frame.rdd.getNumPartitions(), len(w.values(frame))
    w.fill(topic, 1, *range(21, 31))
    return tasks >= 6, before, len(w.values(frame))


for name, starts, ends in (
    ("starts and ends of other partitions", (1, 1, 1), (0, 0)),
    ("starts beyond their ends", (1, 1, 1), (0, 0, 0)),
):

    @scenario("relation", f"{name} are refused", "'refused'")
    def unfit(w: World, starts: tuple[int, ...] = starts, ends: tuple[int, ...] = ends) -> Any:
        topic = w.topic(3, *range(6))
        given = {"startingOffsets": at(topic, *starts), "endingOffsets": at(topic, *ends)}
        return w.refused(lambda: w.read(topic, **given).collect())


@scenario("relation", "a start beyond an end that a time gives is refused", "'refused'")
def beyond_time(w: World) -> Any:
    topic = w.topic(1, retention_ms=-1)
    w.topics.fill(topic, [b"0", b"1"], timestamp_ms=lambda i: MS + 1000 * i)
    given = {"startingOffsets": at(topic, 2), "endingOffsetsByTimestamp": at(topic, MS + 1000)}
    return w.refused(lambda: w.read(topic, **given).collect())


BAD = (
    {},
    {"subscribe": "t", "subscribePattern": "t.*"},
    {"subscribe": "t", "assign": '{"a":[0]}'},
    {"assign": ""},
    {"subscribe": ""},
    {"subscribePattern": ""},
)
STREAM_ONLY = (
    {"subscribe": "t", "kafka__interceptor__classes": "x"},
    {"subscribe": "t", "kafka__key__deserializer": "x"},
    {"subscribe": "t", "kafka__value__deserializer": "x"},
    {"subscribe": "t", "kafka__auto__offset__reset": "none"},
    {"subscribe": "t", "kafka__auto__offset__reset": "earliest"},
)


def shown(given: dict[str, str]) -> str:
    return ", ".join(f"{k.replace('__', '.')}={v}" for k, v in given.items()) or "no topics at all"


for given in BAD:

    @scenario("options", f"a batch with {shown(given)} is refused", "'refused'")
    def bad_batch(w: World, given: dict[str, str] = given) -> Any:
        return w.refused(lambda: w.read(**given).collect())


for given in (*BAD, *STREAM_ONLY):

    @scenario("options", f"a stream with {shown(given)} is refused", "'refused'")
    def bad_stream(w: World, given: dict[str, str] = given) -> Any:
        return w.refused(lambda: w.stream(**given))


@scenario("options", "kafka.group.id and groupIdPrefix in a stream", "(['0'], ['0'])")
def groups(w: World) -> Any:
    topic = w.topic(1, 0)
    return tuple(
        w.drained(w.stream(topic, startingOffsets="earliest", **{name: f"{w.form}-group"}))
        for name in ("kafka__group__id", "groupIdPrefix")
    )


def words(w: World, topic: str) -> str:
    return f"'kafka.bootstrap.servers' '{w.servers}', 'subscribe' '{topic}', 'topic' '{topic}'"


@scenario("sql", "a temporary view", "['0', '1']")
def view(w: World) -> Any:
    name, topic = f"{w.form}_view", w.topic(1, 0, 1)
    w.spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW {name} USING {w.form} OPTIONS ({words(w, topic)})"
    )
    return w.values(w.spark.table(name))


@scenario("sql", "a table in the catalog", "['0', '1']")
def table(w: World) -> Any:
    name, topic = f"{w.form}_table", w.topic(1, 0, 1)
    w.spark.sql(f"DROP TABLE IF EXISTS {name}")
    w.spark.sql(f"CREATE TABLE {name} USING {w.form} OPTIONS ({words(w, topic)})")
    try:
        return w.values(w.spark.table(name))
    finally:
        w.spark.sql(f"DROP TABLE {name}")
