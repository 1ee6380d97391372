"""Whole jobs of real processes over a broker: what comes out equals what DuckDB makes of the topic,
however the job is run, and whatever of it is refused says why."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kdirect
from kdirect.client.session import Session
from kdirect.errors import (
    BadValueError,
    ConfigError,
    KdirectError,
    StateDirectoryError,
    StateError,
    StateLimitError,
    TransportError,
    UnknownTopicError,
)
from kdirect.model import TopicPartition
from kdirect.state import AggregatePlan, Input, NoWindow, column, snapshots, stream_job
from kdirect.state.stream_job import run
from tests.state import jobs, whole_jobs

RECORDS = 40_000


@pytest.fixture
def session(broker: Any) -> Iterator[Session]:
    with kdirect.connect(broker.bootstrap_servers) as made:
        yield made


def run_all(broker: Any, **settings: Any) -> list[tuple[int, pa.Table]]:
    """The whole output of a job that ends at the ends of the topic."""
    plan = settings.pop("plan", None) or jobs.plan()
    with run(plan, broker.bootstrap_servers, until="latest", **settings) as job:
        return list(job)


@pytest.mark.parametrize(
    "settings",
    [
        {"executors": 1},
        {"executors": 2},
        {"executors": 3, "batch_records": 9000},
        {"executors": 2, "epoch_bytes": 100_000, "slot_bytes": 4096},
        {"executors": 2, "exchange": "tcp", "epoch_bytes": 100_000, "slot_bytes": 4096},
        {"executors": 2, "mode": "uppar"},
        {"executors": 2, "mode": "uppar", "layout": "split", "batch_records": 9000},
        {"executors": 3, "mode": "uppar", "layout": "split", "exchange": "tcp"},
    ],
    ids=lambda s: "-".join(str(v) for v in s.values()),
)
def test_a_job_equals_duckdb(
    broker: Any, session: Session, seed: int, settings: dict[str, Any]
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 3)
    output = run_all(broker, **settings)
    assert [number for number, _ in output] == list(range(len(output)))
    if "batch_records" in settings:
        assert len(output) > 4
    wanted = jobs.expected(session)
    assert len(wanted) > 100
    jobs.assert_same(jobs.rows_of(table for _, table in output), wanted)


def test_a_continuous_job_takes_what_comes(broker: Any, session: Session, seed: int) -> None:
    rows = jobs.events(seed, RECORDS)
    jobs.write(session, rows[: RECORDS // 2], 2)
    tables = []
    with run(jobs.plan(), broker.bootstrap_servers, executors=2) as job:
        tables.append(next(job)[1])
        jobs.write(session, rows[RECORDS // 2 :], 2)
        wanted = jobs.expected(session)
        while sum(table.num_rows for table in tables) < len(wanted):
            tables.append(next(job)[1])
    jobs.assert_same(jobs.rows_of(tables), wanted)


def test_a_job_goes_on_where_it_was_stopped(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    rows = jobs.events(seed, RECORDS)
    tables, numbers = [], []
    for piece in np.array_split(rows, 4):
        jobs.write(session, piece, 2)
        output = run_all(broker, executors=2, directory=tmp_path / "job", batch_records=4000)
        tables += [table for _, table in output]
        numbers += [number for number, _ in output]
    assert numbers == list(range(len(numbers)))
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_another_number_of_executors_goes_on(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    rows = jobs.events(seed, RECORDS)
    tables = []
    for executors, piece in zip((2, 3, 1, 2), np.array_split(rows, 4)):
        jobs.write(session, piece, 3)
        output = run_all(broker, executors=executors, directory=tmp_path, batch_records=4000)
        tables += [table for _, table in output]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_a_job_that_was_killed_before_its_first_batch_begins_where_it_began(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """With starting_offsets=latest the next start began at the ends of its own time: what came in
    between was lost."""
    rows = jobs.events(seed, RECORDS)
    session.admin.create_topic(jobs.TOPIC, 2)
    settings: dict[str, Any] = {"directory": tmp_path, "executors": 1, "starting_offsets": "latest"}
    job = run(jobs.plan(), broker.bootstrap_servers, **settings)
    jobs.write(session, rows[: RECORDS // 2], 2)
    job.close(stop=False)
    jobs.write(session, rows[RECORDS // 2 :], 2)
    tables = [table for _, table in run_all(broker, **settings)]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_as_many_executors_go_on_in_another_mode(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """Their state is where they left it, and it is of other keys than they lead now."""
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    settings: dict[str, Any] = {"executors": 2, "directory": tmp_path, "batch_records": 6000}
    split = {"mode": "uppar", "layout": "split"}
    outputs = {}
    for mode in ({}, split):
        job = run(jobs.plan(), broker.bootstrap_servers, **settings, **mode)
        outputs |= dict(next(job) for _ in range(2))
        job.close(stop=False)  # as if all processes had been killed
    outputs |= dict(run_all(broker, **settings))
    assert sorted(outputs) == list(range(len(outputs)))
    jobs.assert_same(jobs.rows_of(outputs.values()), jobs.expected(session))


def test_an_output_that_was_not_committed_comes_again(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, RECORDS), 2)
    settings: dict[str, Any] = {"executors": 2, "directory": tmp_path, "batch_records": 15_000}
    with run(jobs.plan(), broker.bootstrap_servers, **settings) as job:
        next(job)
        number, table = next(job)
    assert number == 1
    output = run_all(broker, **settings)
    assert output[0][0] == 1
    assert jobs.rows_of([output[0][1]]) == jobs.rows_of([table])


def test_late_rows_are_dropped_and_counted(broker: Any, session: Session, seed: int) -> None:
    rows = jobs.events(seed, RECORDS)
    jobs.write(session, rows, 2)
    wanted = jobs.expected(session)
    late = jobs.events(seed, 100)
    with run(jobs.plan(), broker.bootstrap_servers, executors=2) as job:
        _, table = next(job)
        jobs.write(session, late, 2)
        _, more = next(job)
        assert job.counts["late"] == len(late)
    assert more.num_rows == 0
    jobs.assert_same(jobs.rows_of([table]), wanted)


def test_a_quiet_partition_holds_no_window_open_and_changes_nothing_when_it_comes_back(
    broker: Any, session: Session, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's clock is moved by hours, so that no wait of the test is a timeout."""
    hours = 0
    monkeypatch.setattr(
        stream_job,
        "CoordinatorServer",
        partial(stream_job.CoordinatorServer, clock=lambda: time.time() + 3600 * hours),
    )
    first, second, third = np.array_split(jobs.events(seed, RECORDS), 3)
    late = first[:100]
    tables = []
    jobs.write(session, first, 2)
    plan = jobs.plan(idle_timeout_ms=3 * 3600 * 1000)
    with run(plan, broker.bootstrap_servers, executors=2) as job:
        tables.append(next(job)[1])
        assert tables[0].num_rows > 0
        hours = 2
        jobs.write(session, second, 1)  # to partition 0 only
        assert next(job)[1].num_rows == 0  # partition 1 holds the windows open
        hours = 4
        tables.append(next(job)[1])  # of a batch that has nothing to read
        wanted = jobs.expected_of([np.concatenate([first, second])])
        jobs.assert_same(jobs.rows_of(tables), wanted)
        assert job.batch_counts["rows"] == 0
        whole_jobs.send(session, jobs.TOPIC, 1, jobs.LAYOUT.values(late))
        jobs.write(session, third, 2)
        tables.append(next(job)[1])
        assert job.counts["late"] == len(late)
    wanted = jobs.expected_of(
        [
            np.concatenate([first[::2], second, third[::2]]),
            np.concatenate([first[1::2], third[1::2]]),
        ]
    )
    jobs.assert_same(jobs.rows_of(tables), wanted)


def test_bad_rows_are_dropped_and_counted(broker: Any, session: Session, seed: int) -> None:
    rows = jobs.events(seed, RECORDS)
    jobs.write(session, rows, 2)
    wanted = jobs.expected(session)
    bad = jobs.events(seed, 30)
    bad["time"][:10] = -5
    bad["time"][10:] = 1 << 60
    with session.producer() as producer:
        producer.send_arrow(
            pa.record_batch({"value": pa.array([b"short", *(r.tobytes() for r in bad)])}),
            jobs.TOPIC,
        )
        producer.flush()
    with run(jobs.plan(), broker.bootstrap_servers, executors=2, until="latest") as job:
        tables = [table for _, table in job]
        counts = job.counts
    jobs.assert_same(jobs.rows_of(tables), wanted)
    assert counts["wrong_size"] == 1
    assert counts["before_1970"] == 10
    assert counts["too_far_ahead"] == 20
    assert len(job.bad_rows) == 10
    tp = job.bad_rows[0].split()[0]
    assert job.bad_rows[:2] == (
        f"{tp} offset 20000: the value has 5 bytes, the layout 32",
        f"{tp} offset 20001: field time: the event time is before 1970",
    )


def test_an_error_of_a_condition_says_where_it_is(broker: Any, session: Session) -> None:
    """It named neither topic nor offset."""
    session.admin.create_topic("names", 1)
    with session.producer() as producer:
        values = [b'{"amount":1}', b'{"amount":40000}']
        producer.send_arrow(pa.record_batch({"value": pa.array(values)}), "names")
        producer.flush()
    where = column("amount") * (1 << 62) > 0
    plan = AggregatePlan(
        input=Input(topic="names", schema="name string, amount long", where=where),
        keys=(),
        window=NoWindow(),
        aggregates="count",
    )
    says = r"executor 0: names-0 offsets 0 to 1: expression: \* overflows 64 bits; filter such rows"
    with pytest.raises(KdirectError, match=says):
        run_all(broker, plan=plan, executors=1)


def test_a_bad_row_ends_a_job_that_fails_fast(broker: Any, session: Session, seed: int) -> None:
    jobs.write(session, jobs.events(seed, 100), 1)
    with session.producer() as producer:
        producer.send_arrow(pa.record_batch({"value": pa.array([b"short"])}), jobs.TOPIC)
        producer.flush()
    with pytest.raises(BadValueError, match=r"executor 0: .*events-0.*\b100\b") as said:
        run_all(broker, plan=jobs.plan(mode="FAILFAST"), executors=2)
    assert said.value.topic_partition == TopicPartition(jobs.TOPIC, 0)
    assert said.value.offset == 100


def test_a_job_that_failed_fast_goes_on_in_permissive_mode(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """As its error says, in the same directory.  The batches before it were committed."""
    rows = jobs.events(seed, 30_000)
    jobs.write(session, rows[:20_000], 2)
    settings = {"executors": 2, "directory": tmp_path, "until": "latest", "batch_records": 10_000}
    tables = []
    with run(jobs.plan(mode="FAILFAST"), broker.bootstrap_servers, **settings) as job:
        tables += [table for _, table in job]
    jobs.write(session, rows[20_000:], 2)
    wanted = jobs.expected(session)
    with session.producer() as producer:
        producer.send_arrow(pa.record_batch({"value": pa.array([b"short"])}), jobs.TOPIC)
        producer.flush()
    with (
        pytest.raises(BadValueError, match="PERMISSIVE"),
        run(jobs.plan(mode="FAILFAST"), broker.bootstrap_servers, **settings) as job,
    ):
        for _, table in job:
            tables.append(table)
    with run(jobs.plan(), broker.bootstrap_servers, **settings) as job:
        tables += [table for _, table in job]
        assert job.counts["wrong_size"] == 1
    jobs.assert_same(jobs.rows_of(tables), wanted)


def test_state_beyond_its_limit_is_an_error_that_names_it(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, 200_000, keys=1 << 40), 2)
    with pytest.raises(StateLimitError, match=r"executor \d: .*state_limit"):
        run_all(broker, executors=2, state_limit=2 << 20)


def test_a_job_whose_sum_overflowed_goes_on_where_it_may_wrap(
    broker: Any, session: Session, tmp_path: Path
) -> None:
    """It had to begin anew, in another directory; what the error says to do was refused."""
    session.admin.create_topic("sums", 1)
    most = (1 << 63) - 1

    def write(*numbers: int) -> None:
        values = [b'{"n":%d}' % n for n in numbers]
        with session.producer() as producer:
            producer.send_arrow(pa.record_batch({"value": pa.array(values, pa.binary())}), "sums")
            producer.flush()

    def go_on(overflow: str) -> list[int]:
        plan = AggregatePlan(
            input=Input(topic="sums", schema="n int64", value_format="json"),
            keys=(), window=NoWindow(), aggregates=(("sum", "n"),), overflow=overflow,
        )  # fmt: skip
        settings = {"executors": 2, "directory": tmp_path, "until": "latest"}
        with run(plan, broker.bootstrap_servers, **settings) as job:
            return [value for _, table in job for value in table.column(0).to_pylist()]

    write(most - 5)
    assert go_on("error") == [most - 5]
    write(7)
    with pytest.raises(StateError, match="overflow=wrap"):
        go_on("error")
    assert go_on("wrap") == [1 - (1 << 63)]
    write(1)
    with pytest.raises(StateDirectoryError, match="overflow differ"):
        go_on("error")
    assert go_on("wrap") == [2 - (1 << 63)]


def test_a_job_at_its_limit_goes_on_with_a_larger_one(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    """The first batch has few keys, the second one more than there is room for."""
    records = 100_000
    later = jobs.FIRST_MS + records // 10
    jobs.write(session, jobs.events(seed, records), 2)
    jobs.write(session, jobs.events(seed, records, keys=1 << 40, start_ms=later), 2)
    settings = {
        "executors": 2, "directory": tmp_path, "until": "latest", "batch_records": records,
    }  # fmt: skip
    tables: list[pa.Table] = []
    with (
        pytest.raises(StateLimitError, match="state_limit"),
        run(jobs.plan(), broker.bootstrap_servers, state_limit=2 << 20, **settings) as job,
    ):
        for _, table in job:
            tables.append(table)
    assert tables
    with run(jobs.plan(), broker.bootstrap_servers, **settings) as job:
        tables += [table for _, table in job]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))


def test_a_second_job_in_a_directory_is_refused(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, 100), 1)
    with (
        run(jobs.plan(), broker.bootstrap_servers, executors=1, directory=tmp_path) as first,
        pytest.raises(StateDirectoryError, match=rf"{tmp_path}: another job runs"),
    ):
        assert first.directory == tmp_path
        run(jobs.plan(), broker.bootstrap_servers, executors=1, directory=tmp_path)


def test_another_plan_is_refused_in_the_directory_of_a_job(
    broker: Any, session: Session, seed: int, tmp_path: Path
) -> None:
    jobs.write(session, jobs.events(seed, 100), 1)
    run_all(broker, executors=1, directory=tmp_path)
    with pytest.raises(StateDirectoryError, match="another job"):
        run_all(broker, plan=jobs.plan(delay_us=5), executors=1, directory=tmp_path)


def test_a_damaged_snapshot_is_left_out_and_the_one_before_it_used(
    broker: Any,
    session: Session,
    seed: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = jobs.events(seed, RECORDS)
    tables = []
    pieces = np.array_split(rows, 3)
    for piece in pieces[:2]:
        jobs.write(session, piece, 2)
        tables += [t for _, t in run_all(broker, executors=2, directory=tmp_path)]
    root = tmp_path / "snapshots"
    newest = snapshots.snapshot_directory(root, snapshots.batches_of(root)[0])
    assert len(snapshots.batches_of(root)) == 2
    part = next(p for p in newest.iterdir() if p.name != snapshots.MANIFEST)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    jobs.write(session, pieces[2], 2)
    with caplog.at_level(logging.WARNING, "kdirect.state"):
        # Another number of executors: all of them are cold.
        tables += [t for _, t in run_all(broker, executors=3, directory=tmp_path)]
    jobs.assert_same(jobs.rows_of(tables), jobs.expected(session))
    assert any(part.name in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"mode": "storm"}, ConfigError, "mode='storm'"),
        ({"executors": 0}, ConfigError, "0 executors"),
        ({"executors": 257}, ConfigError, "257 executors"),
        ({"executors": "2"}, ConfigError, "'2' executors"),
        ({"source": None}, ConfigError, "None names no brokers"),
        ({"plan": jobs.plan().to_json()}, ConfigError, "is no plan; .*plan_from_json"),
        ({"executors": 1, "mode": "uppar", "layout": "split"}, ConfigError, "1 executors"),
        ({"until": "tomorrow"}, ConfigError, "until='tomorrow'"),
        ({"epoch_byte": 5}, ConfigError, "did you mean epoch_bytes"),
        ({"provider": "verbs"}, TransportError, "exchange=rdma cannot be had"),
        ({"source": "127.0.0.1:1"}, KdirectError, "127.0.0.1:1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_cannot_be_are_refused(
    broker: Any, session: Session, settings: dict[str, Any], error: type, what: str
) -> None:
    session.admin.create_topic(jobs.TOPIC, 1)
    given = {"executors": 1, **settings}
    with pytest.raises(error, match=what):
        plan = given.pop("plan", jobs.plan())
        run(plan, given.pop("source", broker.bootstrap_servers), **given).close()


def test_a_topic_that_is_not_there_is_refused(broker: Any) -> None:
    with pytest.raises(UnknownTopicError, match="no topic events"):
        run(jobs.plan(), broker.bootstrap_servers, executors=1)


def test_auto_takes_tcp_where_there_is_no_device_and_says_why(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, 5000), 2)
    with run(
        jobs.plan(),
        broker.bootstrap_servers,
        executors=2,
        until="latest",
        provider="verbs",
        exchange="auto",
    ) as job:
        if job.exchange == "rdma":
            pytest.skip("there is an RDMA device here, so auto takes it")
        assert "no RDMA path: verbs" in job.exchange_reason
        assert len(list(job)) == 1


def test_nothing_is_left_of_a_job_without_a_directory(
    broker: Any, session: Session, seed: int
) -> None:
    jobs.write(session, jobs.events(seed, 5000), 2)
    with run(jobs.plan(), broker.bootstrap_servers, executors=2) as job:
        next(job)
        memory = job.memory
        processes = [process.pid for process in job.processes.values()]
        assert list(memory.iterdir())
        directory = job.directory
    assert not memory.exists()
    assert not directory.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
