"""A broker's part in a simulated cluster: it registers, races for `/controller`, and carries out
what the controller's machine decides.  No more than the machines need; the rules are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdirect.cluster import candidate as candidate_rules
from kdirect.cluster import controller as controller_rules
from kdirect.cluster import paths
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.controller import Controller, Phase
from kdirect.cluster.image import Settings, read_brokers
from kdirect.cluster.requests import Answer
from kdirect.store.contract import (
    Changed,
    Children,
    Conflict,
    Create,
    Event,
    Found,
    Node,
    Reason,
    SessionState,
)
from kdirect.store.sim import SimServer, SimStore
from tests.cluster.desk import registration

ROOTS = ("/brokers", "/config", "/admin", paths.CONTROLLER_EPOCH, paths.CHANGES)


class SimBroker:
    """One process of broker `number`.  `answered`: told of every answer to a request."""

    def __init__(
        self,
        server: SimServer,
        number: int,
        settings: Settings,
        answered: Callable[[Answer], None],
        *,
        runs_for_controller: bool,
        intact: bool = True,
    ) -> None:
        self.store = SimStore(server)
        self.number = number
        self.ended = False
        self.reports: list[str] = []
        self.controller: Controller | None = None
        self._server = server
        self._settings = settings
        self._answered = answered
        self._runs = runs_for_controller
        self._intact = intact
        self._candidate = candidate_rules.begin(number)
        self._epoch = -1  # of the controller that is to begin, or has
        # Answers of the store to a controller that has ended since are nobody's.
        self._life = 0
        self.store.start(self._on_event)

    @property
    def leads(self) -> bool:
        return self.controller is not None and self.controller.phase is not Phase.DEPOSED

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        match event:
            case SessionState.CONNECTED:
                self._make_nodes(0)
            case SessionState.EXPIRED | SessionState.CLOSED:
                self.ended = True
                self._run(candidate_rules.Ended())
            case Changed(paths.CONTROLLER | paths.CONTROLLER_EPOCH):
                self._run(candidate_rules.Noticed())
            case Changed(paths.BROKER_IDS):
                self._look_for_brokers()
            case Changed():
                self._register()

    def _make_nodes(self, place: int) -> None:
        """Every broker makes sure of the nodes that must be there, then takes part."""
        if place == len(paths.PERSISTENT):
            self._register()
            self._look_for_brokers()
            if self._runs:
                self._run(candidate_rules.Connected())
            if self.controller is not None:
                self.feed(controller_rules.Connected())
            elif self._candidate.leads:
                self._begin(self._life)
            return
        path, value = paths.PERSISTENT[place]

        def made(answer: Any) -> None:
            if not isinstance(answer, controller_rules.Unknown):
                self._make_nodes(place + 1)

        self.store.commit((Create(path, value),), made)

    def _register(self) -> None:
        value = registration(self.number, intact_since=0 if self._intact else None)
        path = paths.broker(self.number)

        def registered(answer: Any) -> None:
            if isinstance(answer, Conflict):
                assert answer.reason is Reason.EXISTS
                self.store.read((path,), seen, watch=True)

        def seen(answer: Any) -> None:
            if isinstance(answer, Found) and answer.nodes[0] is None:
                self._register()

        self.store.commit((Create(path, value, ephemeral=True),), registered)

    # -- the candidate -----------------------------------------------------------------------------

    def _run(self, event: candidate_rules.Event) -> None:
        self._candidate, effects = candidate_rules.step(self._candidate, event)
        for effect in effects:
            match effect:
                case candidate_rules.Look():
                    wanted = (paths.CONTROLLER, paths.CONTROLLER_EPOCH)
                    self.store.read(
                        wanted, lambda a: self._run(candidate_rules.Looked(a, 0)), watch=True
                    )
                case candidate_rules.Claim(operations):
                    self.store.commit(operations, lambda a: self._run(candidate_rules.Claimed(a)))
                case candidate_rules.Release(operations):
                    self.store.commit(operations, lambda a: self._run(candidate_rules.Released()))
                case candidate_rules.Lead(epoch):
                    self._epoch = epoch
                    self._life += 1
                    self._begin(self._life)
                case candidate_rules.Depose(why):
                    if self.controller is not None:
                        self.feed(controller_rules.Deposed(why))
                    self._life += 1
                case candidate_rules.Report(error):
                    self.reports.append(error)

    # -- the controller ----------------------------------------------------------------------------

    def _begin(self, life: int) -> None:
        """Read all nodes, one level after the other, then begin."""
        nodes: dict[str, Node] = {}

        def read_level(level: tuple[str, ...]) -> None:
            if not level:
                begin()
                return
            self.store.read(level, lambda answer: found(level, answer))
            self.store.children(level, lambda answer: descend(level, answer))

        def found(level: tuple[str, ...], answer: Any) -> None:
            if isinstance(answer, Found):
                for path, node in zip(level, answer.nodes, strict=True):
                    if node is not None:
                        nodes[path] = node

        def descend(level: tuple[str, ...], answer: Any) -> None:
            if isinstance(answer, Children) and life == self._life:
                names = zip(level, answer.names, strict=True)
                read_level(tuple(f"{p}/{name}" for p, inner in names for name in inner or ()))

        def begin() -> None:
            if life != self._life or self.controller is not None:
                return
            self.controller, effects = controller_rules.begin(
                nodes, self._epoch, self._settings, now_ms=self._server.now_ns // 10**6
            )
            self._do(effects)
            self._look_for_brokers()

        read_level(ROOTS)

    def _look_for_brokers(self) -> None:
        if self.controller is None:
            return

        def named(answer: Any) -> None:
            if isinstance(answer, Children):
                numbers = answer.names[0] or ()
                wanted = tuple(f"{paths.BROKER_IDS}/{number}" for number in numbers)
                self.store.read(wanted, lambda a: read(wanted, a))

        def read(wanted: tuple[str, ...], answer: Any) -> None:
            if isinstance(answer, Found):
                pairs = zip(wanted, answer.nodes, strict=True)
                live, _ = read_brokers({path: node for path, node in pairs if node is not None})
                self.feed(controller_rules.BrokersChanged(live))

        self.store.children((paths.BROKER_IDS,), named, watch=True)

    def ask(self, request: Any) -> None:
        """A request from a client or another broker."""
        if self.controller is None:
            self._answered(Answer(request.tag, Outcome(Code.NOT_CONTROLLER)))
        else:
            self.feed(request)

    def feed(self, event: controller_rules.Event) -> None:
        if self.controller is None:
            return
        self.controller, effects = controller_rules.step(self.controller, event)
        self._do(effects)

    def _do(self, effects: tuple[controller_rules.Effect, ...]) -> None:
        life = self._life

        def mine(event: controller_rules.Event) -> None:
            if life == self._life:
                self.feed(event)

        for effect in effects:
            match effect:
                case controller_rules.Commit(operations, tag):
                    self.store.commit(
                        operations,
                        lambda a, tag=tag: mine(controller_rules.CommitAnswered(tag, a)),
                    )
                case controller_rules.Reread(wanted):
                    self.store.read(wanted, lambda a: mine(controller_rules.ReadBack(a)))
                case Answer():
                    self._answered(effect)
                case controller_rules.Report(error):
                    self.reports.append(error)
                case controller_rules.Resign():
                    self.controller = None
                    self._life += 1
                    self._run(candidate_rules.Resigned())
