"""Types of `kdirect.state.merging`, which is compiled.  See merging.pyx."""

from typing import Any

import numpy as np

from kdirect.state.engine import Engine
from kdirect.state.table import Table

FAULTS: tuple[str, ...]
ENTRY_FAULTS: dict[int, str]

class MergingEngine(Engine):
    def __init__(self, *args: Any, **options: Any) -> None: ...
    @property
    def merged_entries(self) -> int: ...
    @property
    def merged_tuples(self) -> int: ...
    @property
    def merged_pages(self) -> int: ...
    def merge(self, sender: int, address: int, length: int) -> tuple[int, int]: ...
    def merge_table(self, into: Table, table: Table) -> None: ...
    def restore(
        self, bucket: int, data: np.ndarray, entries: int, layout: Any, vparts: tuple[int, int]
    ) -> int: ...
