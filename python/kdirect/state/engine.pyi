"""Types of `kdirect.state.engine`, which is compiled.  See engine.pyx."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.fragments import Fragment
from kdirect.state.keys import KeyBlock, KeyShape
from kdirect.state.table import Table

NOBODY: int
BLOCK_ROWS: int

class Engine:
    batch: int
    track: bool
    expected_rows: float
    def __init__(
        self,
        memory: StateMemory,
        pages: PageMemory,
        keys: KeyShape,
        layout: Any,
        executor: int,
        owners: Sequence[int],
        origin: int = 0,
        size: int = 0,
        always_tuples: bool = False,
        least_ratio: float = 3.0,
    ) -> None: ...
    @property
    def memory(self) -> StateMemory: ...
    @property
    def pages(self) -> PageMemory: ...
    @property
    def keys(self) -> KeyShape: ...
    @property
    def layout(self) -> Any: ...
    @property
    def slots(self) -> dict[int, int]: ...
    @property
    def fragments(self) -> list[Fragment | None]: ...
    def own(self, owners: Sequence[int]) -> None: ...
    def new_table(self, bucket: int = 0) -> Table: ...
    def adopt(self, table: Table) -> None: ...
    def table(self, bucket: int) -> Any: ...
    def drop(self, bucket: int) -> None: ...
    def limit_times(self, least_bucket: int, most_time: int) -> None: ...
    def begin_tracking(self) -> None: ...
    def update(
        self,
        keys: KeyBlock,
        inputs: list[tuple[np.ndarray, np.ndarray | None]],
        times: np.ndarray | None = None,
        time_valid: tuple[int, int] | None = None,
        mask: tuple[int, int] | None = None,
    ) -> dict[str, Any]: ...
    def take_changed(self) -> np.ndarray: ...
