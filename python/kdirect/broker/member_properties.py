"""Changed properties in a cluster: `ChangedProperties` of a member.

The controller writes them into the metadata store, below ``/config``, and each broker reads them
with the rest of its picture.  Owns: what of the broker's own properties is in force.  Those that
concern logs apply as soon as the picture shows them, and before the broker serves.  When they do
not apply to a log, as of a full disk, that is told and tried again, after longer and longer pauses.

`of` and `names` may be called on any thread.  All else happens on the event loop, but for the logs'
part, which is work of the admin thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kdirect.broker.changed_properties import (
    ALL_BROKERS,
    ChangedProperties,
    Kind,
    Properties,
    checked,
)
from kdirect.broker.config import BrokerConfig
from kdirect.cluster import paths
from kdirect.cluster.requests import ConfigOf
from kdirect.errors import ConfigError, KdirectError
from kdirect.log.config import LogConfig
from kdirect.log.manager import LogManager
from kdirect.member.metadata import Metadata
from kdirect.member.pause import Pause

log = logging.getLogger("kdirect.broker")

CONFIG_OF = {
    Kind.BROKER: ConfigOf.BROKER,
    Kind.GROUP: ConfigOf.GROUP,
    Kind.METRICS: ConfigOf.METRICS,
}
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
OnAdmin = Callable[[Callable[[], None]], Awaitable[None]]


class MemberProperties(ChangedProperties):
    """See the module.  Life: construct, `follow` once there is a picture, before the broker
    serves, `close` when it stops."""

    def __init__(
        self, metadata: Callable[[], Metadata], config: BrokerConfig, logs: LogManager
    ) -> None:
        super().__init__(None)
        self._metadata = metadata
        self._config = config
        self._logs = logs
        self._names = (ALL_BROKERS, str(config["node.id"]))
        # None: what is in force is not known, for it did not apply.
        self._in_force: list[Properties] | None = [{}, {}]
        self._on_admin: OnAdmin | None = None
        self._applying: asyncio.Task[None] | None = None
        self._pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._next_try: asyncio.TimerHandle | None = None
        self._closed = False

    def load(self) -> None:
        """Nothing is read here: the store has them."""

    def of(self, kind: Kind, name: str) -> Properties:
        image = self._metadata().image
        if kind is Kind.BROKER:
            return image.broker_configs.get(name or paths.ALL_BROKERS, {})
        return image.other_configs.get((CONFIG_OF[kind].value, name), {})

    def names(self, kind: Kind) -> list[str]:
        image = self._metadata().image
        if kind is Kind.BROKER:
            everybody = paths.ALL_BROKERS
            return sorted("" if n == everybody else n for n, c in image.broker_configs.items() if c)
        of = CONFIG_OF[kind].value
        return sorted(name for whose, name in image.other_configs if whose == of)

    # -- what is in force --------------------------------------------------------------------------

    async def follow(self, subscribe: Callable[[Any], None], on_admin: OnAdmin) -> None:
        """Have what the metadata says, now and from now on."""
        self._on_admin = on_admin
        subscribe(self._changed)
        await self._apply()

    async def settled(self) -> None:
        """Wait until the newest metadata that is known here is in force, or did not apply."""
        if self._applying is not None:
            await asyncio.wait((self._applying,))

    def close(self) -> None:
        """Try nothing again."""
        self._closed = True
        self._try_no_more()

    def _wanted(self) -> list[Properties]:
        return [dict(self.of(Kind.BROKER, name)) for name in self._names]

    def _changed(self, before: Any, after: Any) -> None:
        if self._wanted() == self._in_force or self._closed:
            return
        if self._applying is None or self._applying.done():
            self._applying = asyncio.get_running_loop().create_task(self._apply())

    async def _apply(self) -> None:
        while (wanted := self._wanted()) != self._in_force:
            self._try_no_more()
            self._in_force = wanted  # another change may come while the admin thread works
            values = usable_values(self._config, wanted)
            self._config.change(values)
            assert self._on_admin is not None
            try:
                await self._on_admin(lambda v=values: self._reconfigure(v))  # type: ignore[misc]
            except (KdirectError, OSError) as e:
                if self._closed:
                    return
                pause_s = self._pause.next_s()
                log.error(
                    "properties of the broker that were changed do not apply yet: %s;"
                    " the next try is in %g s", e, pause_s,
                )  # fmt: skip
                loop = asyncio.get_running_loop()
                self._next_try = loop.call_later(pause_s, self._try_again)
            else:
                self._pause.reset()

    def _try_again(self) -> None:
        self._next_try = self._in_force = None
        self._changed(None, None)

    def _try_no_more(self) -> None:
        if self._next_try is not None:
            self._next_try.cancel()
            self._next_try = None

    def _reconfigure(self, values: Mapping[str, Any]) -> None:
        self._logs.reconfigure(LogConfig.from_broker(values))


def usable_values(config: BrokerConfig, properties: list[Properties]) -> dict[str, Any]:
    """The broker's values after these, without those that it cannot have: they come from the
    store, where anybody may have written them."""
    usable: list[dict[str, str]] = []
    for found in properties:
        usable.append({})
        for name, text in found.items():
            try:
                one = checked(Kind.BROKER, {name: text})
                config.changed_by(*usable[:-1], {**usable[-1], **one})
            except ConfigError as e:
                log.warning("a property of the broker in the store has no effect: %s", e)
            else:
                usable[-1].update(one)
    return config.changed_by(*usable)
