"""What the tests of reading share: partitions on disk, and a store to put their segments into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.log.conftest import batch, make_batch, open_partition, small_disk, stamped
from tests.storage.tiered import Tiers


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.close()


__all__ = ["batch", "make_batch", "open_partition", "small_disk", "stamped", "tiers"]
