"""Random conditions, counts and options: what is pushed down gives the rows that Spark chooses when
nothing is.

The oracle is one query over rows that were read before, in which Spark evaluates every condition:
where it is true, and neither false nor NULL, the row is expected.

More conditions: ``make pushdown-fuzz COUNT=... SEED=...``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from kdirect_spark import shim

pytestmark = pytest.mark.spark

T0 = 1_700_000_000_000  # ms
FILTERS = "spark.sql.python.filterPushdown.enabled"
CONDITIONS = int(os.environ.get("KDIRECT_CONDITIONS", "16"))
ALL = ("topic", "partition", "offset")


@pytest.fixture(scope="module")
def topics_of_all_kinds(broker, topics_of):
    """Names of three topics: times in no order, an aborted transaction, records that are deleted,
    times that the broker gives."""
    topics = topics_of(broker.bootstrap_servers)
    chance = random.Random(5)
    names = [
        topics.create(2, "fuzz", retention_ms=-1),
        topics.create(1, "Fuzz", retention_ms=-1),
        topics.create(1, "fuzz", retention_ms=-1, message_timestamp_type="LogAppendTime"),
    ]
    for name, partition in ((names[0], 0), (names[0], 1), (names[1], 0), (names[2], 0)):
        for codec in ("none", "zstd"):
            base = T0 + chance.randint(-3, 3) * 1000
            values = [chance.choice((b"a", b"b", None)) for _ in range(30)]
            topics.fill(
                name, values, partition, timestamp_ms=lambda i, base=base: base + i * 37 % 500,
                **{"compression.type": codec, "batch.num.messages": 7},
            )  # fmt: skip
    topics.transact(names[1], [(b"kept", True), (b"aborted", False), (b"kept", True)])
    topics.delete_records(names[0], 1, 4)
    return names


class Conditions:
    """Random conditions on a row of Kafka's, as SQL."""

    def __init__(self, chance: random.Random, topics: list[str]) -> None:
        self._chance = chance
        self._topics = topics

    def any(self, depth: int = 2) -> str:
        chance = self._chance
        if not depth or chance.random() < 0.25:
            return self._comparison()
        if chance.random() < 0.3:
            return f"(NOT {self.any(depth - 1)})"
        return f"({self.any(depth - 1)} {chance.choice(('AND', 'OR'))} {self.any(depth - 1)})"

    def _comparison(self) -> str:
        chance, roll = self._chance, self._chance.random()
        if roll < 0.08:
            return chance.choice(("(value = 'a')", "(value IS NULL)", "true", "(NULL = 1)"))
        name = chance.choice((*ALL, "offset", "timestamp", "timestamp"))
        column = chance.choice((name, name, name.upper(), f"`{name}`"))
        if roll < 0.25:
            several = ", ".join(self._literal(name) for _ in range(chance.randint(1, 4)))
            return f"({column} {chance.choice(('IN', 'NOT IN'))} ({several}))"
        if roll < 0.32:
            return f"({column} IS {chance.choice(('NOT NULL', 'NULL'))})"
        if roll < 0.4:
            return f"({column} BETWEEN {self._literal(name)} AND {self._literal(name)})"
        if roll < 0.44 and name == "topic":
            return f"(topic LIKE '{chance.choice(('fuzz%', '%', self._topics[1]))}')"
        sides = [column, self._literal(name)]
        if roll > 0.75:
            sides.reverse()
        op = chance.choice(("=", "<=>", "<", "<=", ">", ">=", "<>"))
        return f"({sides[0]} {op} {sides[1]})"

    def _literal(self, column: str) -> str:
        chance = self._chance
        if chance.random() < 0.06:
            return "NULL"
        if column == "topic":
            return repr(chance.choice((*self._topics, "nope", "", "z", self._topics[0].upper())))
        if column == "partition":
            return chance.choice((str(chance.randint(-1, 3)), "1L", "1.5", "2147483648L"))
        if column == "offset":
            near = str(chance.randint(-2, 66))
            return chance.choice((near, f"{near}L", "9223372036854775807L", "-1", "3.5", "'7'"))
        us = (T0 + chance.randint(-3200, 3700)) * 1000 + chance.choice((0, 0, 1, 999))
        us = chance.choice((us, us, us, us, -1, 0, 4_102_444_800_000_000))
        text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)).isoformat()
        plain = text.removesuffix("+00:00")
        return chance.choice((
            f"TIMESTAMP '{text}'", f"TIMESTAMP_NTZ '{plain}'", f"timestamp_micros({us})",
        ))  # fmt: skip


@pytest.mark.parametrize("level", ["read_uncommitted", "read_committed"])
def test_what_is_pushed_down_changes_no_result(spark, read, topics_of_all_kinds, seed, level):
    chance = random.Random(seed)
    conditions = [Conditions(chance, topics_of_all_kinds).any() for _ in range(CONDITIONS)]
    options = {"subscribe": ",".join(topics_of_all_kinds), "kafka__isolation__level": level}
    try:
        spark.conf.set(shim.CONF, "false")
        whole = read(**options).select("value", "timestamp", *ALL).collect()
        table = spark.createDataFrame(whole, "value binary, timestamp timestamp, topic string,"
                                      " partition int, offset long")  # fmt: skip
        chosen = table.selectExpr(*ALL, *(f"{c} AS c{i}" for i, c in enumerate(conditions)))
        expected = [sorted(row[:3] for row in rows if row[3 + i])
                    for rows in [chosen.collect()] for i in range(CONDITIONS)]  # fmt: skip
        assert len(whole) > 200 and sum(map(bool, expected)) > CONDITIONS // 4
        for i, condition in enumerate(conditions):
            by_shim = chance.random() < 0.7
            spark.conf.set(shim.CONF, str(by_shim).lower())
            spark.conf.set(FILTERS, str(not by_shim).lower())
            more = chance.choice(({}, {"minPartitions": "7"}, {"coalescePartitions": "2"}))
            df = read(**options, **more).where(condition)
            said = f"{condition} {more} {'shim' if by_shim else 'pushFilters'}"
            if i % 3:
                assert sorted(map(tuple, df.select(*ALL).collect())) == expected[i], said
                continue
            by = chance.choice((["partition"], ["topic", "partition"], []))
            counted = Counter(tuple(row[ALL.index(name)] for name in by) for row in expected[i])
            if not by:
                counted.setdefault((), 0)
            found = df.groupBy(*by).count().collect()
            assert {tuple(row)[:-1]: row[-1] for row in found} == counted, said
    finally:
        spark.conf.unset(shim.CONF)
        spark.conf.unset(FILTERS)
