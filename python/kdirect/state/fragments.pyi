"""Types of `kdirect.state.fragments`, which is compiled.  See fragments.pyx."""

from kdirect.state.arena import Log, PageMemory, StateMemory
from kdirect.state.table import Table

class PageLog(Log):
    def __init__(self, pages: PageMemory) -> None: ...
    @property
    def pages(self) -> PageMemory: ...
    def stretches(self) -> list[tuple[int, int]]: ...

class Fragment:
    def __init__(
        self,
        memory: StateMemory,
        pages: PageMemory,
        sender: int,
        leader: int,
        key_words: int,
        state_words: int,
        initial: bytes,
        tuple_words: int,
        shape: int,
        always_tuples: bool = False,
        least_ratio: float = 3.0,
    ) -> None: ...
    @property
    def leader(self) -> int: ...
    @property
    def sender(self) -> int: ...
    @property
    def table(self) -> Table: ...
    @property
    def tuples(self) -> PageLog: ...
    @property
    def rows(self) -> int: ...
    @property
    def entries(self) -> int: ...
    def flush(self) -> tuple[list[tuple[int, int]], int, int, int]: ...
