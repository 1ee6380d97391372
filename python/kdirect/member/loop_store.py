"""A metadata store whose answers and events come on the event loop.

Owns: the store, which it closes.  Stores answer on a thread of their own; here each answer is
handed to the loop, in its order.  After `drop` nothing comes any more: what was asked in a session
that has ended is nobody's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kdirect.store.contract import (
    ChildrenAnswer,
    CommitAnswer,
    Event,
    MetadataStore,
    Operation,
    ReadAnswer,
)


class LoopStore:
    """See the module.  `loop`: where answers come; all calls are made on it."""

    def __init__(self, store: MetadataStore, loop: asyncio.AbstractEventLoop) -> None:
        self.store = store
        self._loop = loop
        self._dropped = False

    def start(self, on_event: Callable[[Event], None]) -> None:
        """As `MetadataStore.start`."""
        self.store.start(self._handed(on_event))

    def read(
        self, paths: Sequence[str], done: Callable[[ReadAnswer], None], *, watch: bool = False
    ) -> None:
        """As `MetadataStore.read`."""
        self.store.read(paths, self._handed(done), watch=watch)

    def children(
        self, paths: Sequence[str], done: Callable[[ChildrenAnswer], None], *, watch: bool = False
    ) -> None:
        """As `MetadataStore.children`."""
        self.store.children(paths, self._handed(done), watch=watch)

    def commit(self, operations: Sequence[Operation], done: Callable[[CommitAnswer], None]) -> None:
        """As `MetadataStore.commit`."""
        self.store.commit(operations, self._handed(done))

    # -- the same for coroutines -------------------------------------------------------------------

    def read_later(self, *paths: str, watch: bool = False) -> asyncio.Future[ReadAnswer]:
        """The answer of `read`."""
        answer: asyncio.Future[ReadAnswer] = self._loop.create_future()
        self.read(paths, _setter(answer), watch=watch)
        return answer

    def commit_later(self, *operations: Operation) -> asyncio.Future[CommitAnswer]:
        """The answer of `commit`."""
        answer: asyncio.Future[CommitAnswer] = self._loop.create_future()
        self.commit(operations, _setter(answer))
        return answer

    # -- the end -----------------------------------------------------------------------------------

    def drop(self) -> None:
        """Let no answer and no event through any more."""
        self._dropped = True

    async def close(self) -> None:
        """End the session.  Servers that do not answer are waited for on another thread."""
        self.drop()
        await on_a_thread(self.store.close)

    def _handed(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def on_the_loop(value: Any) -> None:
            if not self._dropped:
                call(value)

        def hand(value: Any) -> None:
            try:
                self._loop.call_soon_threadsafe(on_the_loop, value)
            except RuntimeError:
                pass  # the loop has ended, and with it everybody who could be told

        return hand


def _setter(answer: asyncio.Future[Any]) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if not answer.done():
            answer.set_result(value)

    return put


async def on_a_thread(call: Callable[[], None]) -> None:
    """Run `call` on a thread that ends with it, for what may wait and happens once."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            call()
        finally:
            try:
                loop.call_soon_threadsafe(_setter(ended), None)
            except RuntimeError:
                pass  # as above

    threading.Thread(target=run, name="kdirect-store-end", daemon=True).start()
    await ended
