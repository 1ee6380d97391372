"""Jobs of all kinds killed with signal 9 at a point that a seed draws, beside what DuckDB makes of
the same rows.

A job of a case runs in a process of its own (job_program.py) and is started again until it ends by
itself.  Each executor's step can be where an executor or the coordinator dies, and so can each
moment at which the coordinator has just written, or not yet written, what must be durable.

    python -m tests.state.killed_jobs --first 0 --examples 50
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

import kdirect
from kdirect.client.session import Session
from kdirect.state import AggregatePlan, Input, JoinPlan, Tumbling
from kdirect.state import Session as SessionWindow
from tests.state import family
from tests.state.oracle import Oracle
from tests.state.reference import Batch, Row
from tests.state.whole_jobs import arrow_values, plain_rows, send

HERE = Path(__file__).parent
SECOND = 1_000_000
ROWS = 1500  # of each input
PARTITIONS = 2
LIMIT_S = 120
SETTINGS: dict[str, Any] = {
    "executors": 2,
    "batch_records": 300,  # a record has several rows
    "epoch_bytes": 6000,
    "block_rows": 100,
    "slot_bytes": 4096,
    "snapshot_interval": 0,
}
KINDS = ("tumbling", "session", "join", "left join", "session join")
STEPS = ("read", "delta", "merge", "trigger", "output", "snapshot")
# Moments of the coordinator; see job_program.py.
MOMENTS = ("batch", "batch torn", "commit", "commit before", "commit torn", "attempt",
           "manifest", "manifest before", "forget")  # fmt: skip
# What every run begins with: the kills that once found something, at each step and moment.
NAMED = (
    ("session", "delta", 2, "self"),
    ("join", "trigger", 2, "self"),
    ("left join", "snapshot", 2, "self"),
    ("tumbling", "read", 7, "self"),
    ("tumbling", "output", 3, "self"),
    ("session", "trigger", 2, "parent"),
    ("tumbling", "output", 3, "parent"),
    ("tumbling", "snapshot", 3, "parent"),
    ("tumbling", "read", 3, "parent"),
    ("tumbling", "merge", 3, "parent"),
    ("session", "commit", 2, ""),
    ("session join", "batch torn", 2, ""),
    ("join", "manifest before", 2, ""),
    ("session join", "forget", 1, ""),
)
SETTINGS_DRAWN: tuple[dict[str, Any], ...] = (
    {},
    {"executors": 3},
    {"exchange": "tcp"},
    {"mode": "uppar", "layout": "colocated"},
    {"mode": "uppar", "layout": "split"},
    {"mode": "uppar", "layout": "split", "executors": 3, "exchange": "tcp"},
)
_numbers = count()


@dataclass(frozen=True)
class Kill:
    """Who dies: an executor ("self") or the coordinator ("parent") when an executor comes to a
    step for the number-th time, or the coordinator ("") at a moment of its own."""

    at: str
    number: int
    victim: str = ""


def plan_of(kind: str, topics: tuple[str, str]) -> AggregatePlan | JoinPlan:
    """A plan of the kind; rows that are out of order by less than the delay are never late."""
    left, right = (
        Input(
            topic=topic,
            schema=f"{p}k int64, {p}t int64, {p}v int64",
            value_format="arrow",
            time=f"{p}t",
            delay_us=SECOND,
        )
        for topic, p in zip(topics, "lr")
    )
    windows = {"tumbling": Tumbling(size_us=2 * SECOND), "session": SessionWindow(gap_us=SECOND)}
    if kind in windows:
        return AggregatePlan(
            input=left,
            keys=("lk",),
            window=windows[kind],
            aggregates=("count", ("sum", "lv", "total"), ("max", "lv", "most")),
        )
    return JoinPlan(
        left=left,
        right=right,
        left_keys=("lk",),
        right_keys=("rk",),
        window=windows["session" if kind == "session join" else "tumbling"],
        how="left" if kind == "left join" else "inner",
        columns=((0, "lk", "key"), (0, "lv", "a"), (1, "rv", "b")),
    )


def rows_of(source: Input, seed: int) -> dict[int, list[Row]]:
    """Rows by partition, with times that go back by less than the delay."""
    chance = random.Random(f"{seed} {source.topic[-1]}")
    key, when, value = (f.name for f in source.schema)
    found: dict[int, list[Row]] = {p: [] for p in range(PARTITIONS)}
    for i in range(ROWS):
        at = 10 * SECOND + i * 20_000 + chance.randrange(SECOND - 1)
        row = {key: chance.randrange(60), when: at, value: chance.randrange(-1000, 1000)}
        found[i % PARTITIONS].append(row)
    return found


def run_killed(
    session: Session, bootstrap: str, kind: str, kill: Kill, seed: int, **settings: Any
) -> bool:
    """Run a job of the kind, kill it, run it to its end.  Was anything killed?  AssertionError if
    what came out is not what DuckDB makes of the topics, or any batch came twice and differed."""
    number = next(_numbers)
    plan = plan_of(kind, (f"killed-{number}-l", f"killed-{number}-r"))
    batch: Batch = {source.name: rows_of(source, seed) for source in plan.inputs}
    for source in plan.inputs:
        session.admin.create_topic(source.topic, PARTITIONS)
        for partition, rows in batch[source.name].items():
            send(session, source.topic, partition, arrow_values(source, rows))
    with tempfile.TemporaryDirectory() as root:
        mark, output = Path(root) / "killed", Path(root) / "output"
        output.mkdir()
        given: dict[str, Any] = {
            "bootstrap": bootstrap,
            "directory": f"{root}/job",
            "output": str(output),
            "plan": plan.to_json(),
            "settings": SETTINGS | settings,
        }
        if kill.victim:
            program = str(HERE / "failing_executor.py")
            given["command"] = [
                sys.executable, program, kill.at, str(kill.number), str(mark), kill.victim
            ]  # fmt: skip
        else:
            given["die"] = [kill.at, kill.number, str(mark)]
        dies = kill.victim != "self"
        for _ in range(3):
            job = subprocess.run(
                [sys.executable, str(HERE / "job_program.py"), json.dumps(given)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=LIMIT_S,
                check=False,
            )
            if job.returncode == 0:
                break
            assert dies and job.returncode == -signal.SIGKILL, job.stderr.decode()[-3000:]
        assert job.returncode == 0
        found = outputs(output)
        was_killed = mark.exists()
    oracle = Oracle(
        plan,
        {source.name: PARTITIONS for source in plan.inputs},
        [(batch, int(time.time() * 1_000_000))],
    )
    wanted = oracle.final_rows()
    assert len(wanted) > 100
    wrong = family.differences(plan, found, wanted)
    assert not wrong, f"{kind}, {kill}, seed {seed}: {wrong[:5]}"
    for source in plan.inputs:
        session.admin.delete_topic(source.topic)
    return was_killed


def outputs(directory: Path) -> list[Row]:
    """The rows of all batches that the processes of a job got; no batch is missing."""
    paths = sorted(directory.glob("*.arrow"))
    assert [int(path.stem) for path in paths] == list(range(len(paths)))
    rows = []
    for path in paths:
        with pa.ipc.open_file(path) as file:
            rows += plain_rows(file.read_all())
    return rows


def drawn(seed: int) -> tuple[str, Kill, dict[str, Any]]:
    """A kind of job, who dies where, and settings."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    at = chance.choice([*((step, v) for step in STEPS for v in ("self", "parent")),
                        *((moment, "") for moment in MOMENTS)])  # fmt: skip
    most = 6 if at[0] in ("read", "delta", "merge") else 2
    settings = chance.choice(SETTINGS_DRAWN)
    return kind, Kill(at[0], chance.randint(1, most), at[1]), settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--examples", type=int, default=50)
    given = parser.parse_args()
    killed = 0
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        for seed in range(given.first, given.first + given.examples):
            kind, kill, settings = drawn(seed)
            if seed - given.first < len(NAMED):
                kind, *how = NAMED[seed - given.first]
                kill, settings = Kill(*how), {}
            try:
                killed += run_killed(
                    session, broker.bootstrap_servers, kind, kill, seed, **settings
                )
            except BaseException:
                print(f"seed {seed}: {kind}, {kill}, {settings}", file=sys.stderr)
                raise
    print(f"{given.examples} jobs, {killed} of them killed, are as DuckDB has them")


if __name__ == "__main__":
    main()
