"""Jobs that aggregate strings and collect sets, with executors killed at each step: what comes out
is what DuckDB makes of the same rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.state import AggregatePlan, Input, JoinPlan, NoWindow, Session, Tumbling
from tests.state import jobs
from tests.state.reference import Row
from tests.state.whole_jobs import Plan, arrow_values, assert_equal, run_batches, send

SECOND = 1_000_000
ROWS = 400  # of a partition in a batch


def texts(window: Any) -> AggregatePlan:
    return AggregatePlan(
        input=Input(
            topic="texts",
            schema="k string, at int64, v string, raw binary, f binary[3]",
            value_format="arrow",
            time="at",
            delay_us=SECOND,
        ),
        keys="k",
        window=window,
        aggregates=[
            "count",
            ("min", "v"),
            ("max", "f"),
            ("first", "v"),
            ("last", "raw"),
            ("collect_set", "raw"),
            ("avg", "at"),
        ],
    )


def full_join() -> JoinPlan:
    left, right = (
        Input(
            topic=name,
            schema=f"k{name} int64, at int64, {name} string",
            value_format="arrow",
            time="at",
        )
        for name in ("l", "r")
    )
    return JoinPlan(
        left=left, right=right, left_keys="kl", right_keys="kr", how="full",
        window=Session(gap_us=SECOND // 50),
        columns=[(0, "kl", "kl"), (0, "l", "l"), (1, "kr", "kr"), (1, "r", "r")],
    )  # fmt: skip


def rows_of(plan: Plan, topic: str, chance: random.Random, batch: int) -> list[Row]:
    def value(kind: str) -> Any:
        if chance.random() < 0.1:
            return None
        if kind == "int64":
            return chance.randrange(200)
        text = chance.choice("aé") * chance.randrange(30) + str(chance.randrange(20))
        return {"string": text, "binary": text.encode()}.get(kind, text.encode().ljust(3)[:3])

    (given,) = (i for i in plan.inputs if i.topic == topic)
    found = []
    for i in range(ROWS):
        row = {f.name: value(f.type) for f in given.schema}
        found.append(row | {"at": batch * 4 * SECOND + i * 10_000 + chance.randrange(SECOND)})
        if "k" in row:
            found[-1]["k"] = chance.choice(["", "one", "a key of more than eight bytes"])
    return found


PLANS = {
    "tumbling": texts(Tumbling(size_us=SECOND)),
    "session": texts(Session(gap_us=SECOND // 50)),
    "none": texts(NoWindow()),
    "join": full_join(),
}


@pytest.mark.parametrize("name, step", [
    ("tumbling", "read"), ("tumbling", "snapshot"), ("session", "merge"), ("none", "output"),
    ("none", "merge"), ("join", "merge"), ("join", "output"),
])  # fmt: skip
def test_a_kill_in_a_job_of_strings_sets_and_full_joins(
    broker: Any, seed: int, tmp_path: Path, name: str, step: str
) -> None:
    plan, chance = PLANS[name], random.Random(seed)
    batches = [
        {i.name: {p: rows_of(plan, i.topic, chance, batch) for p in range(2)} for i in plan.inputs}
        for batch in range(4)
    ]
    mark = tmp_path / "killed"
    with kdirect.connect(broker.bootstrap_servers) as session:
        for i in plan.inputs:
            session.admin.create_topic(i.topic, 2)

        def write(batch: Any) -> None:
            for i in plan.inputs:
                for partition, rows in batch[i.name].items():
                    send(session, i.topic, partition, arrow_values(i, rows, 50))

        outcome = run_batches(
            broker.bootstrap_servers,
            plan,
            [lambda b=batch: write(b) for batch in batches],
            launcher=jobs.killing(step, 2 if step == "snapshot" else 3, mark),
            executors=2,
            epoch_bytes=4000,
            block_rows=100,
            slot_bytes=8192,
            snapshot_interval=0,
        )
    assert mark.exists()
    assert outcome.attempts > 1
    assert sum(len(rows) for rows in outcome.batches) >= 8
    assert_equal(plan, outcome, {i.name: 2 for i in plan.inputs}, batches)
