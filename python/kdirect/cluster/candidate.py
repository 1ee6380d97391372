"""How a broker becomes controller, and notices that it is not any more.  Pure.

Every broker watches ``/controller``.  When the node is not there, it creates it, ephemeral, and
raises ``/controller_epoch`` in one commit that is conditional on the epoch's version, so of several
one wins (Kafka's `registerControllerAndIncrementControllerEpoch`).  A claim with unknown outcome
happened if the node is this session's own and the epoch is the one that was claimed.

A session outlives its process.  Where it is known that the controller's process has died, or it was
one before this one of the same broker, its node is deleted by the claim, without waiting for the
session's end.  That is safe even if the process lives after all: the epoch is another one then, and
all that it writes is refused.

=================  =================================================================================
event              what it does
=================  =================================================================================
`Connected`        look: watches were lost, and a claim may have an unknown outcome
`Noticed`          a watch has told: look
`ControllerDied`   look, and claim what the dead process still has
`Looked`           claim what nobody has; see that what is claimed is still there
`Claimed`          lead, or look who was faster
`Resigned`         this broker's controller has ended: give the node back
`Released`         look
`Ended`            the session has ended: whoever follows is another session's candidate
=================  =================================================================================
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeAlias

from kdirect.cluster import paths, records
from kdirect.errors import CorruptMetadataError
from kdirect.store.contract import (
    Check,
    CommitAnswer,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Node,
    Operation,
    ReadAnswer,
    Reason,
    Replace,
    Unknown,
)

NOBODY = -1


class Phase(enum.Enum):
    """Where a candidate is."""

    WAITING = "the store has not been asked, or does not answer"
    LOOKING = "the store was asked who is controller"
    WATCHING = "another broker is controller, or nobody can be; a watch will tell"
    CLAIMING = "a claim is under way"
    LEADING = "this broker is controller"
    RELEASING = "the node is being given back"
    ENDED = "the session has ended"


# -- events ----------------------------------------------------------------------------------------


class Connected(NamedTuple):
    """The store can be reached, for the first time or again."""


class Noticed(NamedTuple):
    """``/controller`` or ``/controller_epoch`` may have changed."""


class ControllerDied(NamedTuple):
    """The process of this broker, which was seen to be controller, takes no connections any
    more."""

    broker: int


class Looked(NamedTuple):
    """What the store said to `Look`."""

    answer: ReadAnswer
    now_ms: int


class Claimed(NamedTuple):
    """What the store said to `Claim`."""

    answer: CommitAnswer


class Resigned(NamedTuple):
    """The controller's machine has ended."""


class Released(NamedTuple):
    """The store has answered to `Release`, whatever it was."""


class Ended(NamedTuple):
    """The session has expired or was closed."""


Event: TypeAlias = (
    Connected | Noticed | ControllerDied | Looked | Claimed | Resigned | Released | Ended
)


# -- effects ---------------------------------------------------------------------------------------


class Look(NamedTuple):
    """Read ``/controller`` and ``/controller_epoch``, and watch them; `Looked` answers."""


class Claim(NamedTuple):
    """Commit; `Claimed` answers."""

    operations: tuple[Operation, ...]


class Lead(NamedTuple):
    """Begin a controller of this epoch, from all nodes of the store, read now."""

    epoch: int


class Depose(NamedTuple):
    """End this broker's controller."""

    why: str


class Release(NamedTuple):
    """Commit, `Released` answers.  It fails if another controller was elected since."""

    operations: tuple[Operation, ...]


class Report(NamedTuple):
    """Something is wrong with the store that people must look at."""

    error: str


Effect: TypeAlias = Look | Claim | Lead | Depose | Release | Report


# -- the machine -----------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A broker's part in electing the controller.  `epoch` and `version`: of ``/controller_epoch``
    as this broker claimed it.  `controller`: who is it, as far as known.  `leads`: a controller was
    begun here that has not ended.  `again`: something was noticed while the store was being asked.
    `node`: which node ``/controller`` was when it was looked at last (`Node.created`), another's;
    `dead`: the one whose process has died."""

    broker: int
    phase: Phase = Phase.WAITING
    epoch: int = -1
    version: int = -1
    controller: int = NOBODY
    leads: bool = False
    again: bool = False
    node: int = NOBODY
    dead: int = NOBODY


_Stepped: TypeAlias = tuple[Candidate, tuple[Effect, ...]]


def begin(broker: int) -> Candidate:
    """Before the session's first `Connected`."""
    return Candidate(broker)


def step(candidate: Candidate, event: Event) -> _Stepped:
    """What the event makes of the state, and what is to be done."""
    if candidate.phase is Phase.ENDED:
        return candidate, ()
    match event:
        case Connected() | Noticed():
            return _look(candidate)
        case ControllerDied(broker):
            if broker in (candidate.broker, NOBODY) or broker != candidate.controller:
                return candidate, ()
            return _look(candidate._replace(dead=candidate.node))
        case Looked(answer, now_ms):
            if candidate.phase is not Phase.LOOKING:
                return candidate, ()
            return _looked(candidate, answer, now_ms)
        case Claimed(answer):
            return _claimed(candidate, answer)
        case Resigned():
            return _resigned(candidate)
        case Released():
            if candidate.phase is not Phase.RELEASING:
                return candidate, ()
            return _look(candidate._replace(phase=Phase.WAITING, again=False))
        case Ended():
            return _lose(candidate, Phase.ENDED, "its session with the metadata store has ended")


def _look(candidate: Candidate) -> _Stepped:
    if candidate.phase in (Phase.LOOKING, Phase.CLAIMING, Phase.RELEASING):
        return candidate._replace(again=True), ()  # when that has been answered
    return candidate._replace(phase=Phase.LOOKING, again=False), (Look(),)


def _looked(candidate: Candidate, answer: ReadAnswer, now_ms: int) -> _Stepped:
    again, candidate = candidate.again, candidate._replace(phase=Phase.WAITING, again=False)
    if again:
        return _look(candidate)
    if not isinstance(answer, Found):
        return candidate, ()  # after a lost connection there is another one, which looks again
    node, epoch = answer.nodes
    if epoch is None:
        error = f"node {paths.CONTROLLER_EPOCH} is missing; restart a broker: it creates the node"
        lost, effects = _lose(candidate, Phase.WATCHING, error)
        return lost, (*effects, Report(error))
    if node is not None and node.owned:
        return _own(candidate, epoch)
    lost, effects = _lose(candidate, Phase.WATCHING, "another broker has become controller")
    there: tuple[Operation, ...] = ()
    try:
        if node is not None:
            controller = records.decode_controller(paths.CONTROLLER, node.value)
            if node.created != lost.dead and controller != lost.broker:
                return lost._replace(controller=controller, node=node.created), effects
            there = (Delete(paths.CONTROLLER, node.version),)
        number = records.decode_controller_epoch(paths.CONTROLLER_EPOCH, epoch.value) + 1
    except CorruptMetadataError as e:
        return lost, (*effects, Report(str(e)))
    claim = Claim(
        (
            *there,
            Create(
                paths.CONTROLLER, records.encode_controller(lost.broker, now_ms), ephemeral=True
            ),
            Replace(paths.CONTROLLER_EPOCH, records.encode_controller_epoch(number), epoch.version),
        )
    )
    lost = lost._replace(phase=Phase.CLAIMING, epoch=number, version=epoch.version + 1)
    return lost, (*effects, claim)


def _own(candidate: Candidate, epoch: Node) -> _Stepped:
    """The node is this session's: by a claim whose outcome was unknown, or since long."""
    if epoch.version != candidate.version:
        # Edited by hand, for an election would have needed the node.
        lost, effects = _lose(candidate, Phase.RELEASING, f"{paths.CONTROLLER_EPOCH} was edited")
        return lost, (*effects, Release((Delete(paths.CONTROLLER),)))
    if candidate.leads:
        return candidate._replace(phase=Phase.LEADING), ()
    return _lead(candidate)


def _lead(candidate: Candidate) -> _Stepped:
    candidate = candidate._replace(phase=Phase.LEADING, controller=candidate.broker, leads=True)
    return candidate, (Lead(candidate.epoch),)


def _claimed(candidate: Candidate, answer: CommitAnswer) -> _Stepped:
    if candidate.phase is not Phase.CLAIMING:
        return candidate, ()
    if isinstance(answer, Committed):
        again = candidate.again
        candidate, effects = _lead(candidate._replace(again=False))
        if again:
            candidate, more = _look(candidate)
            effects = (*effects, *more)
        return candidate, effects
    if isinstance(answer, Conflict) and answer.reason is Reason.REFUSED:
        error = f"the metadata store takes no controller: {answer.detail or answer.reason.value}"
        again = candidate.again  # what was noticed may be that the store takes one now
        candidate = candidate._replace(phase=Phase.WATCHING, again=False)
        candidate, effects = _look(candidate) if again else (candidate, ())
        return candidate, (Report(error), *effects)
    looking = candidate.again or not isinstance(answer, Unknown)
    candidate = candidate._replace(phase=Phase.WAITING, again=False)
    return _look(candidate) if looking else (candidate, ())


def _resigned(candidate: Candidate) -> _Stepped:
    if not candidate.leads:
        return candidate, ()
    # Nobody was elected since, so the node is this session's, if it is there.
    fence = Check(paths.CONTROLLER_EPOCH, candidate.version)
    candidate = candidate._replace(
        phase=Phase.RELEASING, controller=NOBODY, leads=False, again=False
    )
    return candidate, (Release((fence, Delete(paths.CONTROLLER))),)


def _lose(candidate: Candidate, phase: Phase, why: str) -> _Stepped:
    """This broker is not controller: end its machine, if it had begun."""
    effects = (Depose(why),) if candidate.leads else ()
    candidate = candidate._replace(phase=phase, controller=NOBODY, leads=False, again=False)
    return candidate, effects
