"""Waiting until this broker has seen what the controller has done.

Owns: who waits for which change of the cluster's metadata.  A change that a client asked for is
answered when this broker's own picture shows it, so that the client, which asks here next, sees it.
What a client has done through another broker is looked for at the controller before it is denied.

All methods run on the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from kdirect.broker.services import Membership
from kdirect.cluster.requests import Answer, Request, TellGeneration
from kdirect.errors import KdirectError, TimedOutError
from kdirect.member.metadata import Metadata

log = logging.getLogger("kdirect.broker")

CATCH_UP_S = 5.0  # without a controller, what this broker knows is what it says
SEEN_S = 10.0  # a broker that is cut off from the store answers without having seen the change


class Picture:
    """The newest metadata of a membership, and those who wait for a newer one."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._waiting: list[tuple[Callable[[Metadata], bool], asyncio.Future[None]]] = []
        membership.subscribe(self._changed)

    @property
    def metadata(self) -> Metadata:
        found: Metadata = self._membership.metadata
        return found

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """What the controller answers; TimedOutError names the request."""
        return await self._membership.ask(request, timeout_s)

    async def until(self, shows: Callable[[Metadata], bool], timeout_s: float = SEEN_S) -> bool:
        """Wait until `shows(metadata)` holds; False when it does not in time."""
        if shows(self.metadata):
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (shows, future)
        self._waiting.append(item)
        try:
            await asyncio.wait_for(future, timeout_s)
        except (asyncio.TimeoutError, TimedOutError):
            return False
        finally:
            self._waiting = [w for w in self._waiting if w is not item]
        return True

    async def catch_up(
        self, shows: Callable[[Metadata], bool], timeout_s: float = CATCH_UP_S
    ) -> bool:
        """Does `shows(metadata)` hold?  Where it does not, the controller is asked how far it is,
        and this broker looks again when it has read that: what another broker has been told that
        it is done may not have come here yet."""
        if shows(self.metadata):
            return True
        try:
            await self._membership.ask(TellGeneration(None), timeout_s)
        except KdirectError as e:
            log.debug("this broker may not know what the controller knows: %s", e)
        return shows(self.metadata)

    def _changed(self, before: Any, after: Metadata) -> None:
        for shows, future in self._waiting:
            if not future.done() and shows(after):
                future.set_result(None)
