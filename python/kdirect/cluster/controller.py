"""The controller: the one broker that decides who leads and who is in sync, and writes it.

Pure: `step` takes a state and an event and returns the next state and effects.  A driver reads and
writes the store, and carries requests and answers.  A state begins with `begin`, from all nodes of
the store, after the broker has become controller (`candidate`); it ends with `Resign`.

**One commit at a time.**  What is asked, and what has to be looked at because brokers came or went,
is collected into a draft and committed; what comes meanwhile waits for the next one, which takes
all of it.  So no two commits are under way for one partition, and each draft is made from what the
store has.  Requests are answered when the commit that carries them out has happened.

**Fencing.**  Each commit checks the version of ``/controller_epoch``.  If it is another one, a
newer controller exists: this one resigns, and answers all that waits NOT_CONTROLLER.

**Unknown outcomes.**  After a lost connection a commit may have happened or not.  Each commit
replaces ``/kdirect/changes``; reading this node back and comparing it with what was to be written
says which, because nobody but a controller of this epoch writes it, and that is this one.

==================  ================================================================================
event               what it does
==================  ================================================================================
a request           it is carried out with the next commit; see `requests`
`Withdrawn`         a request that has not been begun is forgotten
`BrokersChanged`    partitions of brokers that came or went are reviewed; see `election`
`CommitAnswered`    committed: answers go out; conflict: read again what was in the way; unknown:
                    read back
`ReadBack`          the commit happened, or is made again from what was read
`Connected`         a reading that was lost with the connection is asked for again
`Ticked`            leaders are rebalanced when it is time; what the store refused is tried again
`Deposed`           the session has ended, or somebody saw a newer controller
==================  ================================================================================

=============  =====================================================================================
phase          what goes on
=============  =====================================================================================
READY          nothing is under way, and nothing waits that could be done
COMMITTING     a commit is under way
READING        it is being found out whether one happened, or what was in its way
DEPOSED        the end: requests are answered NOT_CONTROLLER, all else does nothing
=============  =====================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from kdirect.cluster import paths, records
from kdirect.cluster.codes import DONE, Code, Outcome
from kdirect.cluster.draft import Draft
from kdirect.cluster.election import Fleet, LiveBroker
from kdirect.cluster.image import Image, Settings, absorb, read_brokers, read_image
from kdirect.cluster.partition_rules import list_reassignments, unbalanced
from kdirect.cluster.requests import (
    REQUESTS,
    AlterInSync,
    Answer,
    ElectionKind,
    ElectLeaders,
    InSyncAnswer,
    ListReassignments,
    Reassign,
    ReassignRow,
    ReplicasFailed,
    Request,
    RowOutcome,
    ShutDown,
    Tag,
    TellGeneration,
)
from kdirect.cluster.work import Queued, Work
from kdirect.errors import CorruptMetadataError
from kdirect.model import TopicPartition
from kdirect.store.contract import (
    CommitAnswer,
    Committed,
    Conflict,
    Found,
    Node,
    Operation,
    ReadAnswer,
    Reason,
    Unknown,
    parent_of,
)

# -- events ----------------------------------------------------------------------------------------


class BrokersChanged(NamedTuple):
    """All brokers that are registered now."""

    live: Mapping[int, LiveBroker]


class Withdrawn(NamedTuple):
    """Nobody waits for the answer to the request with this tag any more."""

    tag: Tag


class CommitAnswered(NamedTuple):
    """What the store said to the commit with this tag."""

    tag: int
    answer: CommitAnswer


class ReadBack(NamedTuple):
    """What the store said to `Reread`."""

    answer: ReadAnswer


class Connected(NamedTuple):
    """The store can be reached again, and its session lives."""


class Ticked(NamedTuple):
    now_ms: int


class Deposed(NamedTuple):
    """This broker is not controller any more."""

    why: str


Event: TypeAlias = (
    Request | Withdrawn | BrokersChanged | CommitAnswered | ReadBack | Connected | Ticked | Deposed
)


# -- effects ---------------------------------------------------------------------------------------


class Commit(NamedTuple):
    """Commit to the store; `CommitAnswered` with the same tag answers."""

    operations: tuple[Operation, ...]
    tag: int


class Reread(NamedTuple):
    """Read these nodes; `ReadBack` answers."""

    paths: tuple[str, ...]


class Report(NamedTuple):
    """Something is wrong with the store that people must look at."""

    error: str


class Resign(NamedTuple):
    """Delete ``/controller``, if it is still this session's, and end."""

    why: str


Effect: TypeAlias = Commit | Reread | Answer | Report | Resign


# -- the state -------------------------------------------------------------------------------------


class Phase(enum.Enum):
    """See the module."""

    READY = "ready"
    COMMITTING = "committing"
    READING = "reading"
    DEPOSED = "deposed"


class InFlight(NamedTuple):
    """A commit that is under way, and what becomes of it.

    If it happens: `after` is the image, `answers` go out, `rest` is what is left of a long request,
    `deletions` are (topic, tag) that wait for the topic's end, `concerned` partitions are reviewed.
    If not: `taken` is queued again, and `reviewed` partitions are reviewed again.  `doomed`: topics
    whose nodes it deletes.
    """

    operations: tuple[Operation, ...]
    after: Image
    taken: tuple[Queued, ...]
    answers: tuple[Answer, ...]
    rest: Queued | None
    deletions: tuple[tuple[str, Tag], ...]
    reviewed: frozenset[TopicPartition]
    concerned: frozenset[TopicPartition]
    doomed: frozenset[str]


class Controller(NamedTuple):
    """See the module.  `waiting`: partitions to be reviewed.  `stuck`: partitions and topics whose
    commit the store refused; they wait for the next tick.  `alone`: the store refused a commit of
    several things, so each is committed by itself."""

    phase: Phase
    image: Image
    fleet: Fleet
    settings: Settings
    queue: tuple[Queued, ...] = ()
    waiting: frozenset[TopicPartition] = frozenset()
    in_flight: InFlight | None = None
    tag: int = 0
    reading: tuple[str, ...] = ()
    reading_lost: bool = False
    deletions: tuple[tuple[str, Tag], ...] = ()
    shutdowns: tuple[ShutDown, ...] = ()
    stuck: frozenset[TopicPartition | str] = frozenset()
    alone: bool = False
    rebalance_ms: int = 0


_Stepped: TypeAlias = tuple[Controller, list[Effect]]


def begin(
    nodes: Mapping[str, Node], epoch: int, settings: Settings, *, now_ms: int
) -> tuple[Controller, tuple[Effect, ...]]:
    """The controller of `epoch`, from all nodes of the store: those below ``/brokers``, ``/config``
    and ``/admin``, and ``/controller_epoch`` and ``/kdirect/changes``.  They must have been read
    after this broker became controller.  CorruptMetadataError: see `read_image`."""
    image = read_image(nodes, epoch)
    live, wrong = read_brokers(nodes)
    controller = Controller(
        Phase.READY,
        image,
        Fleet(live),
        settings,
        waiting=frozenset(tp for tp, _ in image.all_partitions()),
        rebalance_ms=now_ms + settings.rebalance_interval_ms,
    )
    effects: list[Effect] = [Report(str(e)) for e in (*wrong, *image.damaged.values())]
    node = nodes.get(paths.REASSIGNMENTS)
    if node is not None:
        try:
            wanted = records.decode_reassignments(paths.REASSIGNMENTS, node.value)
            rows = tuple(ReassignRow(tp, replicas) for tp, replicas in wanted.items())
            request = Reassign(None, rows, from_node=True)
            controller = controller._replace(queue=(Queued(request),))
        except CorruptMetadataError as e:
            effects.append(Report(str(e)))
    controller, planned = _plan(controller)
    return controller, (*effects, *planned)


def step(controller: Controller, event: Event) -> tuple[Controller, tuple[Effect, ...]]:
    """What the event makes of the state, and what is to be done."""
    if controller.phase is Phase.DEPOSED:
        refused = [_refused(event, ())] if isinstance(event, REQUESTS) else []
        return controller, tuple(answer for answer in refused if answer.tag is not None)
    controller, effects = _take(controller, event)
    controller, planned = _plan(controller)
    return controller, (*effects, *planned)


def _take(controller: Controller, event: Event) -> _Stepped:
    match event:
        case BrokersChanged(live):
            return _brokers_changed(controller, live), []
        case Withdrawn(tag):
            queue = tuple(q for q in controller.queue if q.request.tag != tag)
            shutdowns = tuple(r for r in controller.shutdowns if r.tag != tag)
            return controller._replace(queue=queue, shutdowns=shutdowns), []
        case CommitAnswered(tag, answer):
            return _commit_answered(controller, tag, answer)
        case ReadBack(answer):
            return _read_back(controller, answer)
        case Connected():
            return _read_again(controller)
        case Ticked(now_ms):
            return _ticked(controller, now_ms)
        case Deposed(why):
            return _depose(controller, why)
        case ListReassignments(tag, partitions):
            rows = list_reassignments(controller.image, partitions)
            return controller, [Answer(tag, DONE, rows)]
        case TellGeneration(tag):
            return controller, [Answer(tag)]
        case ShutDown():
            return _shut_down(controller, event)
        case ElectLeaders(rows=None):
            everything = tuple(tp for tp, _ in controller.image.all_partitions())
            event = event._replace(rows=everything, of_all=True)
    return controller._replace(queue=(*controller.queue, Queued(event))), []


# -- brokers ---------------------------------------------------------------------------------------


def _brokers_changed(controller: Controller, live: Mapping[int, LiveBroker]) -> Controller:
    before, leaving = controller.fleet
    changed = {n for n in {*before, *live} if before.get(n) != live.get(n)}
    if not changed:
        return controller
    fleet = Fleet(dict(live), frozenset(leaving - changed))
    return _review_brokers(controller._replace(fleet=fleet), changed)


def _review_brokers(controller: Controller, brokers: set[int]) -> Controller:
    """Have the partitions reviewed that have a replica on one of these."""
    images = [controller.image]
    if controller.in_flight is not None:  # partitions that it creates are not in the image yet
        images.append(controller.in_flight.after)
    concerned = {
        tp for image in images for tp, p in image.all_partitions() if brokers & {*p.replicas}
    }
    return controller._replace(waiting=controller.waiting | concerned)


def _shut_down(controller: Controller, request: ShutDown) -> _Stepped:
    there = controller.fleet.live.get(request.broker)
    if there is None or there.incarnation != request.incarnation:
        message = f"broker {request.broker} is not registered with {request.incarnation}"
        return controller, [Answer(request.tag, Outcome(Code.STALE_BROKER_EPOCH, message))]
    fleet = controller.fleet._replace(leaving=controller.fleet.leaving | {request.broker})
    controller = _review_brokers(controller._replace(fleet=fleet), {request.broker})
    return controller._replace(shutdowns=(*controller.shutdowns, request)), []


def _answer_shutdowns(controller: Controller) -> _Stepped:
    """Answer when nothing waits that could move a leader away from the broker."""
    effects: list[Effect] = []
    kept = []
    for request in controller.shutdowns:
        of_it = {
            tp: p for tp, p in controller.image.all_partitions() if request.broker in p.replicas
        }
        if any(tp in controller.waiting and tp not in controller.stuck for tp in of_it):
            kept.append(request)
            continue
        led = tuple(
            tp
            for tp, p in of_it.items()
            if p.state is not None and p.state.leader == request.broker and len(p.replicas) > 1
        )
        effects.append(Answer(request.tag, DONE, led))
    return controller._replace(shutdowns=tuple(kept)), effects


# -- drafts ----------------------------------------------------------------------------------------


def _plan(controller: Controller) -> _Stepped:
    """Commit what waits, if nothing is under way."""
    effects: list[Effect] = []
    while controller.phase is Phase.READY:
        controller, answered = _answer_shutdowns(controller)
        effects += answered
        if not _has_work(controller):
            controller = controller._replace(alone=False)
            break
        controller, in_flight = _draft(controller)
        if in_flight.operations:
            tag = controller.tag + 1
            controller = controller._replace(phase=Phase.COMMITTING, tag=tag, in_flight=in_flight)
            effects.append(Commit(in_flight.operations, tag))
        else:
            controller, answered = _happened(controller._replace(in_flight=in_flight))
            effects += answered
    return controller, effects


def _has_work(controller: Controller) -> bool:
    return bool(
        controller.queue or controller.waiting - controller.stuck or any(_doomed(controller))
    )


def _doomed(controller: Controller) -> Iterable[str]:
    """Topics whose nodes are to be deleted."""
    topics = controller.image.topics.items()
    return (name for name, t in topics if t.deleting and name not in controller.stuck)


def _draft(controller: Controller) -> tuple[Controller, InFlight]:
    """Take as much of what waits as one commit has room for."""
    draft = Draft(controller.image, controller.fleet, controller.settings)
    work = Work(draft, alone=controller.alone)
    queue = list(controller.queue)
    # First what brokers' coming and going needs: partitions without a leader wait for it.
    work.review_all(controller.waiting - controller.stuck)
    while queue and not work.is_full:
        work.carry_out(queue.pop(0))
    work.review_all(work.concerned - controller.stuck)
    for name in _doomed(controller):
        if work.is_full:
            break
        work.delete_nodes(name)
    operations: tuple[Operation, ...] = ()
    after = controller.image
    if not draft.is_empty:
        operations, after = draft.finish()
    moving = {tp for tp in draft.touched if (p := after.find(tp)) and (p.adding or p.removing)}
    in_flight = InFlight(
        operations,
        after,
        tuple(work.taken),
        tuple(work.answers),
        work.rest,
        tuple(work.deletions),
        frozenset(work.reviewed & controller.waiting),
        frozenset(work.concerned - work.reviewed | moving),
        frozenset(work.doomed),
    )
    waiting = controller.waiting - work.reviewed
    return controller._replace(queue=tuple(queue), waiting=waiting), in_flight


# -- what became of a commit -----------------------------------------------------------------------


def _happened(controller: Controller) -> _Stepped:
    """The commit that is under way has happened: the image is what it made."""
    made = controller.in_flight
    assert made is not None
    rest = (made.rest,) if made.rest is not None else ()
    deletions = (*controller.deletions, *made.deletions)
    ended = [(name, tag) for name, tag in deletions if name not in made.after.topics]
    answers = [*made.answers, *(Answer(tag) for _, tag in ended)]
    controller = controller._replace(
        phase=Phase.READY,
        image=made.after,
        in_flight=None,
        queue=(*rest, *controller.queue),
        waiting=controller.waiting | made.concerned,
        deletions=tuple(row for row in deletions if row not in ended),
    )
    return controller, [answer for answer in answers if answer.tag is not None]


def _did_not_happen(controller: Controller) -> Controller:
    """All that was in the commit waits again."""
    made = controller.in_flight
    assert made is not None
    return controller._replace(
        phase=Phase.READY,
        in_flight=None,
        queue=(*made.taken, *controller.queue),
        waiting=controller.waiting | made.reviewed,
    )


def _commit_answered(controller: Controller, tag: int, answer: CommitAnswer) -> _Stepped:
    made = controller.in_flight
    if controller.phase is not Phase.COMMITTING or tag != controller.tag or made is None:
        return controller, []
    match answer:
        case Committed():
            return _happened(controller)
        case Unknown(ended=True):
            return _depose(controller, "its session with the metadata store has ended")
        case Unknown():
            return _read(controller, ())
        case Conflict(0, Reason.VERSION | Reason.MISSING):
            return _depose(controller, "another broker has become controller")
        case Conflict(index, Reason.EXISTS | Reason.MISSING | Reason.VERSION):
            path = made.operations[index].path
            return _read(controller, (path, parent_of(path)))
        case Conflict():
            return _store_refuses(controller, answer)


def _store_refuses(controller: Controller, conflict: Conflict) -> _Stepped:
    """The store will not take it, whoever asks: find out what it is, and leave it alone."""
    made = controller.in_flight
    assert made is not None
    controller = _did_not_happen(controller)
    if not controller.alone:
        return controller._replace(alone=True), []
    path = made.operations[conflict.index].path
    error = f"the metadata store does not take {path}: {conflict.detail or conflict.reason.value}"
    effects: list[Effect] = [Report(error)]
    if made.taken:
        (queued,) = made.taken
        controller = controller._replace(queue=controller.queue[1:])
        if queued.request.tag is not None:
            outcome = Outcome(Code.UNKNOWN_SERVER_ERROR, error)
            effects.append(Answer(queued.request.tag, outcome, queued.done))
        return controller, effects
    return controller._replace(stuck=controller.stuck | made.reviewed | made.doomed), effects


def _read(controller: Controller, more: tuple[str, ...]) -> _Stepped:
    """Read the marks of a commit, and what was in its way."""
    wanted = tuple(p for p in dict.fromkeys((paths.CONTROLLER_EPOCH, paths.CHANGES, *more)) if p)
    controller = controller._replace(phase=Phase.READING, reading=wanted, reading_lost=False)
    return controller, [Reread(wanted)]


def _read_again(controller: Controller) -> _Stepped:
    if controller.phase is not Phase.READING or not controller.reading_lost:
        return controller, []
    return controller._replace(reading_lost=False), [Reread(controller.reading)]


def _read_back(controller: Controller, answer: ReadAnswer) -> _Stepped:
    if controller.phase is not Phase.READING:
        return controller, []
    match answer:
        case Unknown(ended=True):
            return _depose(controller, "its session with the metadata store has ended")
        case Found(found):
            nodes = dict(zip(controller.reading, found, strict=True))
        case _:
            return controller._replace(reading_lost=True), []
    epoch, mark = nodes.pop(paths.CONTROLLER_EPOCH), nodes.pop(paths.CHANGES)
    if epoch is None or epoch.version != controller.image.epoch_version:
        return _depose(controller, "another broker has become controller")
    made = controller.in_flight
    if made is not None and mark is not None and _is_mark_of(made, mark):
        return _happened(controller)
    before = controller.image.versions.get(paths.CHANGES)
    if before != (mark.version if mark is not None else None):
        return _depose(controller, f"somebody else has written {paths.CHANGES}")
    if made is not None:
        controller = _did_not_happen(controller)
    known = controller.image.damaged
    image = absorb(controller.image, nodes)
    reread = {tp for path in nodes if (tp := paths.partition_of_state(path)) is not None}
    controller = controller._replace(
        phase=Phase.READY, image=image, waiting=controller.waiting | reread
    )
    return controller, [Report(str(e)) for p, e in image.damaged.items() if p not in known]


def _is_mark_of(made: InFlight, mark: Node) -> bool:
    """Is this the node as the commit was to write it?"""
    value = records.encode_changes(made.after.changes)
    return mark.version == made.after.versions[paths.CHANGES] and mark.value == value


# -- time ------------------------------------------------------------------------------------------


def _ticked(controller: Controller, now_ms: int) -> _Stepped:
    controller = controller._replace(stuck=frozenset())
    if controller.settings.rebalance and now_ms >= controller.rebalance_ms:
        percent = controller.settings.rebalance_percent
        rows = unbalanced(controller.image, controller.fleet, percent)
        due = now_ms + controller.settings.rebalance_interval_ms
        controller = controller._replace(rebalance_ms=due)
        if rows:
            request = ElectLeaders(None, ElectionKind.PREFERRED, rows)
            controller = controller._replace(queue=(*controller.queue, Queued(request)))
    if controller.phase is Phase.READING:
        return _read_again(controller)
    states = tuple(p for p in controller.image.damaged if paths.partition_of_state(p) is not None)
    if states and controller.phase is Phase.READY:
        return _read(controller, states)
    return controller, []


# -- the end ---------------------------------------------------------------------------------------


def _depose(controller: Controller, why: str) -> _Stepped:
    """Answer all that waits, and end."""
    made = controller.in_flight
    waiting = [*(made.taken if made is not None else ()), *controller.queue]
    answers = [_refused(queued.request, queued.done) for queued in waiting]
    answers += [_refused(request, ()) for request in controller.shutdowns]
    answers += [Answer(tag, _NOT_CONTROLLER) for _, tag in controller.deletions]
    effects: list[Effect] = [answer for answer in answers if answer.tag is not None]
    controller = controller._replace(
        phase=Phase.DEPOSED,
        queue=(),
        waiting=frozenset(),
        in_flight=None,
        deletions=(),
        shutdowns=(),
    )
    return controller, [*effects, Resign(why)]


_NOT_CONTROLLER = Outcome(Code.NOT_CONTROLLER, "this broker is not the controller")


def _refused(request: Any, done: tuple[Any, ...]) -> Answer:
    """What a request is answered by a broker that is not controller.  Its rows, too: those that
    were committed are answered as such."""
    rows = list(done)
    if isinstance(request, AlterInSync):
        rows += [InSyncAnswer(r.partition, Code.NOT_CONTROLLER) for r in request.rows[len(done) :]]
    elif isinstance(request, ElectLeaders):
        rows += [RowOutcome(tp, _NOT_CONTROLLER) for tp in (request.rows or ())[len(done) :]]
    elif isinstance(request, ReplicasFailed):
        rows += [RowOutcome(tp, _NOT_CONTROLLER) for tp in request.rows[len(done) :]]
    elif isinstance(request, Reassign):
        rows += [RowOutcome(r.partition, _NOT_CONTROLLER) for r in request.rows[len(done) :]]
    return Answer(request.tag, _NOT_CONTROLLER, tuple(rows))
