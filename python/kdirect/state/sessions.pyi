"""Types of `kdirect.state.sessions`, which is compiled.  See sessions.pyx."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kdirect.state.accumulators import StateLayout
from kdirect.state.aggregates import Aggregate
from kdirect.state.arena import StateMemory
from kdirect.state.chains import ChainTable
from kdirect.state.keys import KeyBlock
from kdirect.state.texts import TextCells, TextStore
from kdirect.state.tuples import ChainShape, ParsedPage

class Cells:
    def __init__(
        self, layout: StateLayout, texts: Iterable[tuple[Aggregate, str]] = ()
    ) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def layout(self) -> StateLayout: ...
    @property
    def texts(self) -> TextCells: ...
    @property
    def initial(self) -> bytes: ...
    @property
    def words(self) -> int: ...
    @property
    def check(self) -> int: ...
    def point(self, columns: Mapping[str, Any], overflow: str) -> None: ...
    def check_sums(self, cell: int) -> None: ...
    def whole(self, page: ParsedPage) -> bool: ...
    def reduce(
        self, lengths: np.ndarray, times: np.ndarray | None, overflow: str
    ) -> dict[str, Any]: ...
    def fold(
        self, lengths: np.ndarray, intervals: np.ndarray, texts: TextStore, overflow: str
    ) -> dict[str, Any]: ...

class IntervalTable(ChainTable):
    def __init__(
        self,
        memory: StateMemory,
        shape: ChainShape,
        bucket: int = 0,
        cells: Cells | None = None,
        changes: bool = False,
    ) -> None: ...
    @property
    def cells(self) -> Cells: ...
    @property
    def texts(self) -> TextStore: ...
    def update(self, keys: KeyBlock, rows: np.ndarray, times: np.ndarray, lane: int) -> None: ...
    def add_intervals(
        self, page: ParsedPage, rows: np.ndarray | None, lane: int | None
    ) -> None: ...
    def folded(
        self, lengths: np.ndarray, intervals: np.ndarray, overflow: str
    ) -> dict[str, Any]: ...
