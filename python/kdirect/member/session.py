"""One session of a broker with the metadata store, from its first connection to its end.

At each connection, the first and those after a suspension, the same happens in the same order: the
nodes that must be there are made sure of, the cluster's id is compared, the broker is registered or
still is, the picture is brought up to date (watches were lost), and it runs for controller.  Each
step may be cut short by a lost connection; the next connection begins with the first one again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kdirect.cluster import paths
from kdirect.cluster.image import Settings
from kdirect.cluster.records import BrokerRegistration
from kdirect.errors import KdirectError, StoreLostError
from kdirect.member.controller_host import ControllerHost
from kdirect.member.identity import Past
from kdirect.member.loop_store import LoopStore
from kdirect.member.picture import Picture
from kdirect.member.registration import Registration, settle_cluster_id
from kdirect.member.reports import Reports
from kdirect.store.contract import Changed, Event, Refused, SessionState
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.member")


@dataclass(frozen=True)
class Hooks:
    """What a session asks of the broker, and tells it; all on the event loop.

    `reached(cluster_id)`: the store was reached, and this is its cluster's id; raises KdirectError
    if that is not this broker's.  `may_found()`: may this broker make a new cluster of an empty
    store?  `registration()`: what is to be registered.  `registered()`: it
    is.  `changed()`: something in the picture, or the controller, is another one.  `failed(error)`:
    this broker cannot take part.  `ended()`: the session is over."""

    reached: Callable[[str], None]
    may_found: Callable[[], bool]
    registration: Callable[[], Awaitable[BrokerRegistration]]
    registered: Callable[[], None]
    changed: Callable[[], None]
    failed: Callable[[KdirectError], None]
    ended: Callable[[], None]


class Session:
    """See the module.  `cluster_id`: what the cluster is called if this broker is the first, and
    `where` the first of its log directories.
    `may_register`: set when the broker is ready to be found by others."""

    def __init__(
        self,
        store: LoopStore,
        node_id: int,
        cluster_id: str,
        past: Past,
        settings: Settings,
        environment: Environment,
        reports: Reports,
        hooks: Hooks,
        *,
        where: str,
        may_register: asyncio.Event,
        wait_s: float | None,
    ) -> None:
        self.store = store
        self.connected = asyncio.Event()  # while the store answers
        self.was_connected = False  # ever
        self.has_ended = False
        self.picture = Picture(store, reports, self._picture_changed)
        self.registration = Registration(store, node_id, past, reports, wait_s=wait_s)
        self.host = ControllerHost(
            store,
            node_id,
            settings,
            environment,
            reports,
            look_for_brokers=self.picture.look_for_brokers,
            elected=hooks.changed,
        )
        self._cluster_id = cluster_id
        self._where = where
        self._hooks = hooks
        self._may_register = may_register
        self._joining: asyncio.Task[None] | None = None
        self._joined = False  # since the last connection

    @property
    def incarnation(self) -> int:
        return self.registration.incarnation

    def start(self) -> None:
        self.store.start(self._on_event)

    async def close(self) -> None:
        """End the session, and with it the registration and the controller's part."""
        self._end()
        await self.store.close()

    def tick(self) -> None:
        """Every few seconds: what failed or was damaged is tried again."""
        if self._joined:
            self.host.tick()
            self.picture.look_at_damaged()
        elif self.connected.is_set() and (self._joining is None or self._joining.done()):
            self._join()

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case SessionState.CONNECTED:
                self.was_connected = True
                self.connected.set()
                self._join()
            case SessionState.SUSPENDED:
                self.connected.clear()
            case SessionState.EXPIRED | SessionState.CLOSED:
                self._end()
                self._hooks.ended()
            case Refused(error):
                self._hooks.failed(error)
            case Changed(path):
                self._noticed(path)

    def _noticed(self, path: str) -> None:
        if path in (paths.CONTROLLER, paths.CONTROLLER_EPOCH):
            self.host.noticed()
        elif path == paths.CHANGES:
            self.picture.look()
        elif path == paths.BROKER_IDS:
            self.picture.look_for_brokers()
        elif path == self.registration.path:
            self.registration.changed()
            if self._joined:  # somebody has deleted it, or it has just been made
                self._join()

    def _end(self) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        self._joined = False
        self.connected.clear()
        self.store.drop()
        self.registration.incarnation = -1
        if self._joining is not None:
            self._joining.cancel()
        self.host.ended()

    # -- joining -----------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
        self._joined = False
        self._joining = asyncio.get_running_loop().create_task(self._take_part())

    async def _take_part(self) -> None:
        try:
            self._hooks.reached(
                await settle_cluster_id(
                    self.store,
                    self._cluster_id,
                    may_found=self._hooks.may_found(),
                    where=self._where,
                )
            )
            await self._may_register.wait()
            before = self.registration.incarnation
            made = await self.registration.register(await self._hooks.registration())
            if made != before:
                self._hooks.registered()
            # Not before: the server may lag, and what it shows after a write of this session is no
            # older than that.  A broker removes replicas that the store does not name.
            self.picture.look()
            self.picture.look_for_brokers()
        except StoreLostError:
            return  # the next connection begins again
        except KdirectError as e:
            self._hooks.failed(e)
            return
        except Exception:
            log.exception("joining the cluster has failed; it is tried again")  # a mistake of ours
            return
        self._joined = True
        self.host.connected()

    def _picture_changed(self) -> None:
        if self.picture.brokers is not None:
            self.host.brokers_changed(self.picture.brokers)
        self._hooks.changed()
