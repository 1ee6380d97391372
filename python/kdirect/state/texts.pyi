"""Types of `kdirect.state.texts`, which is compiled.  See texts.pyx."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kdirect.state.aggregates import Aggregate
from kdirect.state.arena import Log

KINDS: dict[str, int]
LONGEST_VALUE_BYTES: int

class TextStore:
    def __init__(self, log: Log | None = None) -> None: ...

class TextCells:
    def __init__(self, texts: Iterable[tuple[Aggregate, str]], at: int) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def texts(self) -> tuple[tuple[Aggregate, str], ...]: ...
    @property
    def words(self) -> int: ...
    @property
    def initial(self) -> bytes: ...
    @property
    def check(self) -> int: ...
    def point(self, columns: Mapping[str, Any]) -> None: ...
    def results(self, base: int, positions: np.ndarray, store: TextStore) -> list[Any]: ...
