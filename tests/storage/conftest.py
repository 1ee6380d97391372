"""What the tests of reading share: partitions on disk, and a store to put their segments into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.log.conftest import batch, make_batch, open_partition, small_disk, stamped
from tests.object_servers import Place
from tests.storage.tiered import Tiers


@pytest.fixture
def place(object_stores: Any) -> Place:
    """A store of its own, in a directory."""
    found: Place = object_stores["directory"].fresh()
    return found


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.close()


__all__ = ["batch", "make_batch", "open_partition", "place", "small_disk", "stamped", "tiers"]
