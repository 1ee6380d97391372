"""Where tasks find the coordinators of batch queries: no Spark, a real service."""

from __future__ import annotations

import pytest

from kdirect.errors import FormatError
from kdirect_spark.slash.batch_service import BatchService, ask, service_at
from kdirect_spark.slash.control_row import BatchRow


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
