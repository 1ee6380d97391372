"""A broker's part in having a controller: it runs for it, and carries out what it decides.

The driver of two pure machines, `cluster.candidate` and `cluster.controller`, for one session.  All
of it happens on the event loop.

**Lives.**  Each time that this broker becomes controller a machine begins whose commits are
numbered from 1 again.  Answers of the store to a machine that has ended are nobody's, so each
carries the number of the life in which it was asked for.

**Dead brokers.**  A session outlives its process.  The controller keeps a connection to every
broker, and every broker one to the controller.  If one breaks and is refused when it is made again,
the process has died, and the broker counts as gone at once, until its node goes too or it takes
connections again; if it was the controller, another one is elected.  Both are safe at any time: a
leader that lives after all cannot acknowledge without the others, nor can a controller write.

**A controller that fails.**  What makes one fail may be in the store, where the next one finds it,
too.  So a broker whose controller has failed runs for it only after a pause, longer each time;
another one may become it at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kdirect.cluster import candidate as candidate_rules
from kdirect.cluster import controller as controller_rules
from kdirect.cluster import paths
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.controller import Controller, Phase
from kdirect.cluster.image import Settings
from kdirect.cluster.requests import Answer, Request
from kdirect.errors import CorruptMetadataError
from kdirect.member.loop_store import LoopStore
from kdirect.member.metadata import LiveNode
from kdirect.member.pause import Pause
from kdirect.member.reports import Reports
from kdirect.member.tree_reader import ROOTS, read_tree
from kdirect.store.contract import Node, Unknown
from kdirect.wire.environment import Environment

log = logging.getLogger("kdirect.member")

# Of a broker whose controller has failed, until it runs for it again; doubled each time, and
# forgotten when it has worked for `WELL_S`.
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
WELL_S = 60.0

NOT_CONTROLLER = Outcome(Code.NOT_CONTROLLER, "this broker is not the controller")


class ControllerHost:
    """See the module.  `look_for_brokers()`: have the brokers read, so that `brokers_changed`
    follows.  `elected()` is called when who is controller, as far as known, may have changed."""

    def __init__(
        self,
        store: LoopStore,
        node_id: int,
        settings: Settings,
        environment: Environment,
        reports: Reports,
        *,
        look_for_brokers: Callable[[], None],
        elected: Callable[[], None],
    ) -> None:
        self._store = store
        self._node_id = node_id
        self._settings = settings
        self._environment = environment
        self._reports = reports
        self._look_for_brokers = look_for_brokers
        self._elected = elected
        self._candidate = candidate_rules.begin(node_id)
        self._controller: Controller | None = None
        self._life = 0
        self._reading = False  # all nodes, for a controller that is to begin
        self._tags = itertools.count(1)
        self._asked: dict[int, asyncio.Future[tuple[Answer, int]]] = {}
        self._registered: Mapping[int, LiveNode] = {}
        self._pauses = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._paused: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # the last controller that worked here
        self.dead: dict[int, int] = {}  # broker -> incarnation of the process that has died

    @property
    def controller_id(self) -> int:
        """Who is controller, as far as known; -1: nobody."""
        return self._candidate.controller

    @property
    def leads(self) -> bool:
        """Does this broker's controller work?"""
        return self._controller is not None

    @property
    def commits(self) -> int:
        """Of the controller that works; for tests and metrics."""
        return self._controller.tag if self._controller is not None else 0

    # -- what the session tells --------------------------------------------------------------------

    def connected(self) -> None:
        """The store can be reached, for the first time or again."""
        self._run(candidate_rules.Connected())
        if self._controller is not None:
            self._feed(controller_rules.Connected())
        elif self._candidate.leads:
            self._begin()

    def noticed(self) -> None:
        """``/controller`` or ``/controller_epoch`` may have changed."""
        self._run(candidate_rules.Noticed())

    def ended(self) -> None:
        """The session has ended: whatever waits is answered NOT_CONTROLLER."""
        if self._paused is not None:
            self._paused.cancel()
        self._run(candidate_rules.Ended())
        self._controller = None
        self._refuse_all()

    def brokers_changed(self, registered: Mapping[int, LiveNode]) -> None:
        """All brokers that are registered now."""
        self._registered = registered
        self.dead = {
            n: incarnation
            for n, incarnation in self.dead.items()
            if n in registered and registered[n].incarnation == incarnation
        }
        self._tell_brokers()

    def died(self, node_id: int) -> None:
        """The process of a registered broker does not take connections any more.  Each time that
        this is seen the candidate hears of it: that the broker is controller it may have learned
        since the last time."""
        there = self._registered.get(node_id)
        if there is None or node_id == self._node_id:
            return
        if node_id not in self.dead:
            self.dead[node_id] = there.incarnation
            if self.leads:
                log.warning("broker %d refuses connections: it counts as gone", node_id)
            self._tell_brokers()
        self._run(candidate_rules.ControllerDied(node_id))

    def revived(self, node_id: int) -> None:
        """A broker that counted as gone takes connections."""
        if self.dead.pop(node_id, None) is not None:
            self._tell_brokers()

    def _tell_brokers(self) -> None:
        live = {
            n: node.as_live_broker() for n, node in self._registered.items() if n not in self.dead
        }
        self._feed(controller_rules.BrokersChanged(live))

    def tick(self) -> None:
        """Every few seconds: rebalancing, and what was refused or lost before."""
        if self._controller is not None:
            self._feed(controller_rules.Ticked(self._now_ms()))
        elif self._candidate.leads and not self._reading:
            self._begin()

    def _now_ms(self) -> int:
        """For the machine, of which nobody sets the clock."""
        return int(self._environment.monotonic() * 1000)

    # -- requests ----------------------------------------------------------------------------------

    def ask(self, request: Request) -> asyncio.Future[tuple[Answer, int]]:
        """The answer, and the generation of ``/kdirect/changes`` in which it is true.  A request's
        tag is not looked at; the answer has the tag of the request."""
        future: asyncio.Future[tuple[Answer, int]] = asyncio.get_running_loop().create_future()
        if self._controller is None:
            future.set_result((Answer(request.tag, NOT_CONTROLLER), -1))
            return future
        tag = next(self._tags)
        asked = request.tag
        self._asked[tag] = future
        future.add_done_callback(partial(self._withdraw, tag))
        self._feed(request._replace(tag=tag))
        if asked is None:
            return future
        return asyncio.ensure_future(_tagged(future, asked))

    def _withdraw(self, tag: int, future: asyncio.Future[tuple[Answer, int]]) -> None:
        """Whoever has given up asks again: while the store is away, what all of them ask would
        pile up."""
        if future.cancelled() and self._asked.pop(tag, None) is not None:
            self._feed(controller_rules.Withdrawn(tag))

    def _answer(self, answer: Answer) -> None:
        assert isinstance(answer.tag, int)
        future = self._asked.pop(answer.tag, None)
        if future is not None and not future.done():
            # An answer is an effect of the step that made the image of which it tells.
            image = self._controller.image if self._controller is not None else None
            generation = image.changes.generation if image is not None else -1
            future.set_result((answer._replace(tag=None), generation))

    def _refuse_all(self) -> None:
        for tag in list(self._asked):
            self._answer(Answer(tag, NOT_CONTROLLER))

    # -- the candidate -----------------------------------------------------------------------------

    def _run(self, event: candidate_rules.Event) -> None:
        before = self._candidate.controller
        self._candidate, effects = candidate_rules.step(self._candidate, event)
        for effect in effects:
            self._carry_out(effect)
        if self._candidate.controller != before:
            self._elected()

    def _carry_out(self, effect: candidate_rules.Effect) -> None:
        match effect:
            case candidate_rules.Look():
                wanted = (paths.CONTROLLER, paths.CONTROLLER_EPOCH)
                self._store.read(wanted, self._looked, watch=True)
            case candidate_rules.Claim() if self._paused is not None:
                # As if the store had not answered: when the pause is over it is looked at again.
                self._run(candidate_rules.Claimed(Unknown()))
            case candidate_rules.Claim(operations):
                self._store.commit(operations, lambda a: self._run(candidate_rules.Claimed(a)))
            case candidate_rules.Release(operations):
                self._store.commit(operations, lambda a: self._run(candidate_rules.Released()))
            case candidate_rules.Lead():
                self._life += 1
                self._reading = False
                self._begin()
            case candidate_rules.Depose(why):
                self._feed(controller_rules.Deposed(why))
                self._controller = None
                self._life += 1
            case candidate_rules.Report(error):
                self._reports.error(error)

    def _looked(self, answer: Any) -> None:
        self._run(candidate_rules.Looked(answer, self._environment.time_ms()))

    # -- the controller ----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Read all nodes, then begin.  A reading that is lost is made again at the next connection,
        or tick."""
        life = self._life
        self._reading = True
        read_tree(self._store, ROOTS, lambda nodes: self._read_all(life, nodes))

    def _read_all(self, life: int, nodes: dict[str, Node] | None) -> None:
        if life != self._life or self._controller is not None:
            return
        self._reading = False
        if nodes is None:
            return
        try:
            self._controller, effects = controller_rules.begin(
                nodes, self._candidate.epoch, self._settings, now_ms=self._now_ms()
            )
        except CorruptMetadataError as e:
            self._reports.error(e)
            self._pause()
            self._run(candidate_rules.Resigned())
            return
        except Exception:
            log.exception("the controller cannot begin: it resigns")  # a mistake of ours
            self._pause()
            self._run(candidate_rules.Resigned())
            return
        self._began_s = self._environment.monotonic()
        log.info("this broker is the controller, in epoch %d", self._candidate.epoch)
        self._do(effects)
        # What was read may be older by now than what the watch has told.
        read = max((b.incarnation for b in self._controller.fleet.live.values()), default=-1)
        if any(there.incarnation > read for there in self._registered.values()):
            self._tell_brokers()
        self._look_for_brokers()
        self._elected()

    def _feed(self, event: controller_rules.Event) -> None:
        if self._controller is None:
            return
        try:
            self._controller, effects = controller_rules.step(self._controller, event)
        except Exception:
            # A mistake of ours.  This machine would wait for ever; the next one reads everything.
            log.exception("the controller has failed at %s: it resigns", type(event).__name__)
            self._pause()
            self._resigned("it has failed")
            return
        self._do(effects)

    def _do(self, effects: tuple[controller_rules.Effect, ...]) -> None:
        life = self._life

        def mine(event: controller_rules.Event) -> None:
            if life == self._life:
                self._feed(event)

        def commit(operations: Any, tag: int) -> None:
            self._store.commit(
                operations, lambda answer: mine(controller_rules.CommitAnswered(tag, answer))
            )

        for effect in effects:
            match effect:
                case controller_rules.Commit(operations, tag):
                    commit(operations, tag)
                case controller_rules.Reread(wanted):
                    self._store.read(wanted, lambda a: mine(controller_rules.ReadBack(a)))
                case Answer():
                    self._answer(effect)
                case controller_rules.Report(error):
                    self._reports.error(error)
                case controller_rules.Resign(why):
                    self._resigned(why)

    def _pause(self) -> None:
        """Do not run for controller for a while."""
        worked_s = self._environment.monotonic() - self._began_s if self.leads else 0.0
        if worked_s >= WELL_S:
            self._pauses.reset()
        if self._paused is not None:
            self._paused.cancel()
        pause_s = self._pauses.next_s()
        self._paused = asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self.noticed()

    def _resigned(self, why: str) -> None:
        if self._controller is not None and self._controller.phase is Phase.DEPOSED:
            log.info("this broker is not the controller any more: %s", why)
        self._controller = None
        self._life += 1
        self._refuse_all()
        self._run(candidate_rules.Resigned())


async def _tagged(future: asyncio.Future[tuple[Answer, int]], tag: Any) -> tuple[Answer, int]:
    answer, generation = await future
    return answer._replace(tag=tag), generation
