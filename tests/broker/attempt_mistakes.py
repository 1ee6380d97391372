"""Mistakes that a coordinator of exactly-once writes could make, each of which the seeded schedules
have to find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kdirect.broker.attempts import AttemptReply, Attempts, Job, Named, WriteMany, _Identity
from kdirect.broker.marker_groups import place_in_group
from kdirect.broker.transactions import Markers, Write
from kdirect.format.attempt_records import NO_BATCH
from tests.broker.attempt_world import World


class OneByOne(World):
    """A new coordinator ends prepared attempts one after the other."""

    def restored(self, prepared: Sequence[Markers]) -> list[list[Markers]]:
        return [[markers] for markers in prepared]


class OldestFirst(World):
    """Markers of a group are appended in the order of their transactions."""

    place = staticmethod(lambda markers, first: -place_in_group(markers, first))


class Split(World):
    """A commit is several record batches."""

    splits = True


class GivesUp(World):
    """A decision of which nobody knows whether it is in the log is forgotten."""

    gives_up = True


class Early(World):
    """A commit is answered before its markers are there."""

    answers_early = True


def _with(changed: type[Attempts], doc: str) -> type[World]:
    return type(changed.__name__, (World,), {"machine": changed, "__doc__": doc})


class _NoNumber(Attempts):
    def _write(self, job: Job, record: Any, *more: Any, **how: Any) -> WriteMany:
        found = self._identity(job.identity).record
        if record is not None and found is not None and record.run == found.run:
            record = found
        return super()._write(job, record, *more, **how)


class _LeavesOthers(Attempts):
    def _ends(self, found: _Identity, committed: Iterable[str], now_ms: int) -> list[Write]:
        wanted = set(committed)
        if not wanted:
            return super()._ends(found, wanted, now_ms)
        names, found.names = found.names, {name for name in found.names if name in wanted}
        try:
            return super()._ends(found, wanted, now_ms)
        finally:
            found.names = names


class _SameEpoch(Attempts):
    def _ends(self, found: _Identity, committed: Iterable[str], now_ms: int) -> list[Write]:
        writes = super()._ends(found, committed, now_ms)
        out = []
        for write in writes:
            assert write.record is not None
            record = write.record._replace(epoch=write.record.epoch - 1)
            out.append(self.transactions.change(write.transactional_id, record, write.reply))
        return out


class _TakesAny(Attempts):
    def _not_open(self, one: Named, job: Job, batch: int) -> str:
        return ""


class _NoFence(Attempts):
    def _refused(self, found: _Identity, job: Job) -> AttemptReply | None:
        reply = super()._refused(found, job)
        return None if reply is not None and reply.message else reply


class _CommitsAgain(Attempts):
    def commit(self, job: Job, *more: Any) -> Any:
        found = self._identity(job.identity)
        record = found.record
        if record is not None:
            forgotten = tuple((query, NO_BATCH) for query, _ in record.queries)
            found.record = record._replace(queries=forgotten)
        made = super().commit(job, *more)
        found.record = record
        return made


class _ForgetsQueries(Attempts):
    def written(self, many: WriteMany) -> list[Markers]:
        told = super().written(many)
        found = self.identities.get(many.identity)
        if found is not None and found.record is not None:
            found.record = found.record._replace(queries=found.record.queries[-1:])
        return told


class _NewRunLeavesOld(Attempts):
    def _ends(self, found: _Identity, committed: Iterable[str], now_ms: int) -> list[Write]:
        return super()._ends(found, committed, now_ms) if set(committed) else []


class _JoinsWhileMarked(Attempts):
    def _is_committing(self, found: _Identity) -> bool:
        return False


class _CommitsWhileBusy(Attempts):
    def _is_busy(self, found: _Identity) -> bool:
        return False


class _CommitsBehindAborts(Attempts):
    def _is_held_back(self, found: _Identity, wanted: Iterable[Named]) -> bool:
        return False


class _LosesFormer(Attempts):
    def written(self, many: WriteMany) -> list[Markers]:
        told = super().written(many)
        found = self.identities.get(many.identity)
        if found is not None and found.record is not None:
            found.record = found.record._replace(former=())
        return told


MISTAKES: dict[str, type[World]] = {
    "one by one": OneByOne,
    "oldest first": OldestFirst,
    "split": Split,
    "gives up": GivesUp,
    "early": Early,
    "no number": _with(_NoNumber, "The batch of a commit is not remembered."),
    "leaves others": _with(_LeavesOthers, "A commit lets attempts live that it does not name."),
    "same epoch": _with(_SameEpoch, "An end does not raise the epoch."),
    "takes any": _with(_TakesAny, "A commit takes attempts that have ended."),
    "no fence": _with(_NoFence, "A former run is not refused."),
    "commits again": _with(_CommitsAgain, "A commit does not look whether there was one."),
    "forgets queries": _with(_ForgetsQueries, "Only the last query's batch is remembered."),
    "new run leaves old": _with(_NewRunLeavesOld, "A new run leaves open what the old one has."),
    "joins while marked": _with(_JoinsWhileMarked, "A batch is answered before it is marked."),
    "commits while busy": _with(_CommitsWhileBusy, "A commit overtakes a change of an attempt."),
    "commits behind aborts": _with(
        _CommitsBehindAborts, "A commit is answered while an abort before it hides it from readers."
    ),
    "loses former": _with(_LosesFormer, "Former runs are forgotten."),
}
