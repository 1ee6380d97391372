"""Where tasks find the coordinators of batch queries: no Spark, a real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdirect.errors import FormatError
from kdirect.state.batches import Partition, Range
from kdirect.state.plan import AggregatePlan, Input
from kdirect.state.windows import Tumbling
from kdirect_spark.slash import batch_service
from kdirect_spark.slash.batch_service import BatchService, Request, ask, service_at
from kdirect_spark.slash.control_row import BatchRow
from kdirect_spark.slash.job_spec import JobSpec
from tests.support import wait_until


def test_tasks_are_told_the_advertised_address():
    """A driver that listens at every address is nowhere for the tasks of another host."""
    service = BatchService("0.0.0.0", "localhost")
    try:
        assert service.address.host == "localhost"
        row = BatchRow(
            run="run", task=0, executors=1, host="localhost", port=service.address.port,
            token=service.address.token, request="{}",
        )  # fmt: skip
        with pytest.raises(FormatError, match="a task asked for something else"):
            ask(row)
    finally:
        service.close()


def test_another_advertised_address_is_another_service():
    first = service_at("127.0.0.1", "localhost")
    assert service_at("127.0.0.1", "localhost") == first
    plain = service_at("127.0.0.1")
    assert plain.host == "127.0.0.1" and plain.token != first.token


def test_a_run_whose_tasks_never_came_to_the_end_is_given_up(monkeypatch):
    """As one that was cancelled, or failed: its state in memory is not kept for a day."""
    monkeypatch.setattr(batch_service, "KEPT_S", 0.2)
    plan = AggregatePlan(
        input=Input(topic="t", schema="k long, at timestamp(ms)", value_format="json", time="at"),
        keys="k",
        window=Tumbling(size_us="10 seconds"),
        aggregates=["count"],
    )
    source = {
        "kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t", "valueFormat": "json",
        "valueSchema": "k long, at timestamp(ms)",
    }  # fmt: skip
    spec = JobSpec(
        plan=plan, inputs=(source,), executors=1, mode="slash", state_dir=None, state_root="unused",
        options={}, name="slash",
    )  # fmt: skip
    range_ = {Partition("t", 0): Range(0, 10)}
    service = BatchService("127.0.0.1")
    try:
        at = service.address
        row = BatchRow(
            run="run", task=0, executors=1, host=at.host, port=at.port, token=at.token,
            request=Request(spec=spec, ranges=range_, ends=range_).to_text(),
        )  # fmt: skip
        memory = Path(ask(row).memory)
        wait_until(lambda: not memory.exists())
        assert Path(ask(row).memory) != memory  # a task that comes later finds another coordinator
    finally:
        service.close()
