"""Object stores of each kind, and S3 behind a gate that counts requests and inflicts faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.object_servers import Gate, Place, gate_to


@pytest.fixture(params=["directory", "s3", "gcs"])
def place(request: pytest.FixtureRequest, object_stores: Mapping[str, Place]) -> Place:
    """One of each kind of store, below a prefix of the test's own."""
    return object_stores[request.param].fresh()


@pytest.fixture
def s3(object_stores: Mapping[str, Place]) -> Place:
    return object_stores["s3"].fresh()


@pytest.fixture
def gated(s3: Place) -> Iterator[tuple[Gate, Place]]:
    with gate_to(s3) as (gate, place):
        yield gate, place
