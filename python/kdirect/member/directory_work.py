"""Work on the threads of a log directory, awaited on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# `run(partition, work, done)`: call `work` on a thread of the partition's log directory, then, on
# the event loop, `done(result, None)` or `done(None, error)`.
OnThread = Callable[[Any, Callable[[], Any], Callable[[Any, BaseException | None], None]], Any]


async def awaited(run: OnThread, partition: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises.  It runs to its end also when nobody waits any more."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    run(partition, work, done)
    return await future
