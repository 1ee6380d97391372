"""Mistakes to be planted, one at a time, that the schedules have to find.

Three of them are in the machines, and are those of `tests.cluster.mistakes`; what a machine that
has them does to real logs is what is found.  The others are of the datapath:

- *revoked after truncation*: the machine compares and cuts first, so a real key of the old leader
  still holds meanwhile, and the kernel commits what it writes;
- *completion counted*: the leader takes the completion of a real WRITE, perhaps one that has landed
  where nobody commits any more, for the follower's acknowledgement;
- *key kept*: a replica is fenced, and forgets to take the old leader's key away;
- *reading kept*: a replica is fenced, and goes on to READ the old leader's segments;
- *proposed by an old high watermark*: a follower is proposed by what the machine has heard, while
  the kernel shows more;
- *producers forgotten*: after a cut nobody knows what the producers sent last, and a record that is
  sent again is appended twice;
- *copying producer overlooked*: a head whose RDMA producer hangs in a copy is written on, and the
  late rest of the copy reaches committed bytes;
- *grant kept*: a deposed leader goes on committing what its producers have written;
- *acknowledged by the leader alone*: a producer that waits for all replicas is told too early;
- *cleaned beyond the high watermark*: compaction removes records for the sake of others that are
  not committed, and may be cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from kdirect.broker.head_access import HeadAccess
from kdirect.log import cleaning
from tests.cluster import mistakes
from tests.replication import producers
from tests.replication.broker import Broker
from tests.replication.led_head import LedHead
from tests.replication.run import Run

_work = Broker.work


def _work_and_count_completions(broker: Broker) -> int:
    done = _work(broker)
    for follower, ring in broker.rings.items():
        if broker.pushed is not None and ring.posted and ring.completed == ring.posted:
            base, position, offset = ring.pushed
            broker.worker.confirm(broker.pushed.pushing, follower, offset, position, base)
    return done


@contextmanager
def completion_counted() -> Iterator[None]:
    """A WRITE that is complete counts as if its follower had acknowledged it."""
    with mock.patch.object(Broker, "work", _work_and_count_completions):
        yield


def _fence_without_the_key(run: Run, number: int) -> None:
    broker = run.brokers[number]
    with mock.patch.object(broker, "end_grant", lambda: True):
        _fence(run, number)


_fence = Run._fence


@contextmanager
def key_kept() -> Iterator[None]:
    """A fenced replica leaves the old leader its key."""
    with mock.patch.object(Run, "_fence", _fence_without_the_key):
        yield


@contextmanager
def reading_kept() -> Iterator[None]:
    """A fenced replica goes on to READ segments."""
    with mock.patch.object(Run, "_stop_pull", lambda *_: None):
        yield


def _propose_whatever_the_kernel_shows(run: Run, number: int, *_: Any) -> None:
    return None


@contextmanager
def proposed_by_an_old_high_watermark() -> Iterator[None]:
    """A leader proposes a follower that lacks records which its kernel shows already."""
    with mock.patch.object(Run, "_withdraw_proposal", _propose_whatever_the_kernel_shows):
        yield


@contextmanager
def producers_forgotten() -> Iterator[None]:
    """A log that is cut does not look up what its producers sent last."""
    with mock.patch("kdirect.log.cutting.load_producers", lambda *_: None):
        yield


def _end_key_whoever_copies(access: HeadAccess, region: Any, *_: Any) -> bool:
    region.deregister()
    return True


@contextmanager
def copying_producer_overlooked() -> Iterator[None]:
    """The log goes on in a file into which a producer, which hangs in a copy, still writes."""
    with mock.patch.object(HeadAccess, "end_file_key", _end_key_whoever_copies):
        yield


@contextmanager
def grant_kept() -> Iterator[None]:
    """A deposed leader does not end what it has granted to producers."""
    with (
        mock.patch.object(LedHead, "resign", lambda *_: None),
        mock.patch.object(LedHead, "end", lambda *_: None),
    ):
        yield


def _wants_the_leader_alone(name: Any, **fields: Any) -> Any:
    return _build(name, **{**fields, "acks": 1})


_build = producers.build


@contextmanager
def acknowledged_by_the_leader_alone() -> Iterator[None]:
    """The leader takes no producer for one that waits for replicas."""
    with mock.patch.object(producers, "build", _wants_the_leader_alone):
        yield


def _look_beyond(segments: Any, rules: Any, **what: Any) -> Any:
    return _look_at(segments, rules, **{**what, "last_stable": segments[-1].end_offset})


_look_at = cleaning.look_at


@contextmanager
def cleaned_beyond_the_high_watermark() -> Iterator[None]:
    """A broker compacts all sealed segments of its copy."""
    with mock.patch.object(cleaning, "look_at", _look_beyond):
        yield


OF_READERS = {"reading_kept"}
OF_CLEANERS = {"cleaned_beyond_the_high_watermark"}
OF_PRODUCERS = {"copying_producer_overlooked", "grant_kept", "acknowledged_by_the_leader_alone"}
MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        mistakes.epoch_start_left_out,
        mistakes.smaller_in_sync_used,
        mistakes.answer_of_another_epoch_used,
        mistakes.revoked_after_truncation,
        mistakes.restarted_leader_leads_on,
        completion_counted,
        key_kept,
        reading_kept,
        proposed_by_an_old_high_watermark,
        producers_forgotten,
        copying_producer_overlooked,
        grant_kept,
        acknowledged_by_the_leader_alone,
        cleaned_beyond_the_high_watermark,
    )
}
