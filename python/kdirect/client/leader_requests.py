"""One question to the leaders of many partitions: a request for each broker, asked again of those
that fail for a passing reason.

What may not enter: what is asked, and what an answer means beyond its error codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kdirect.client.lost_broker import LOST, concerning
from kdirect.errors import CorruptLogError, KdirectError, ProtocolError
from kdirect.format.error_codes import ErrorCode, error_kind
from kdirect.model import TopicPartition
from kdirect.wire.broker_errors import read_error
from kdirect.wire.cluster import Cluster
from kdirect.wire.connection import Pending

T = TypeVar("T")


def at_leaders(
    cluster: Cluster,
    tps: Iterable[TopicPartition],
    build: Callable[[list[TopicPartition]], Any],
    read: Callable[[Any], T],
    doing: str,
) -> dict[TopicPartition, T]:
    """Ask the leaders of `tps`, all at the same time, and ask again about partitions that
    failed for a transient reason.  `build` makes a leader's request; `read` takes the value out
    of one partition of a response; `doing` begins the text of an error.  A leader that cannot
    be asked does not keep the others from being asked."""
    left = dict.fromkeys(tps)
    out: dict[TopicPartition, T] = {}
    backoff = cluster.backoff(cluster.timeout_ms)
    while True:
        failed = _ask_leaders(cluster, left, build, read, doing, out)
        left = {tp: None for tp in left if tp not in out}
        if not left:
            return out
        if not backoff.wait():
            first = next(iter(left))
            error = failed.get(first) or ProtocolError(
                f"{doing} {first}: the broker's answer does not hold it",
                hint="look for the reason in the broker's log",
            )
            if isinstance(error, LOST):
                raise concerning([tp for tp in left if failed.get(tp) is error], error)
            raise error
        for topic in by_topic(left):
            cluster.forget(topic)


def _ask_leaders(
    cluster: Cluster,
    tps: Iterable[TopicPartition],
    build: Callable[[list[TopicPartition]], Any],
    read: Callable[[Any], T],
    doing: str,
    out: dict[TopicPartition, T],
) -> dict[TopicPartition, KdirectError]:
    """One request to each leader; values go to `out`.  The errors that may pass, by partition;
    raises any other."""
    try:
        groups, failed = cluster.leaders(tps)
    except KdirectError as e:
        _passing(e)
        return dict.fromkeys(tps, e)
    for error in failed.values():
        _passing(error)
    sent: list[tuple[list[TopicPartition], Pending]] = []
    for node, group in groups.items():
        try:
            sent.append((group, cluster.connection_to(node).submit(build(group))))
        except KdirectError as e:
            _passing(e)
            failed.update(dict.fromkeys(group, e))
    for group, pending in sent:
        try:
            response = pending.result()
        except KdirectError as e:
            _passing(e)
            failed.update(dict.fromkeys(group, e))
            continue
        asked = set(group)
        for topic, p in ((t.name, p) for t in response.topics for p in t.partitions):
            tp = TopicPartition(topic, p.partition_index)
            if tp in asked and p.error_code == ErrorCode.NONE:
                out[tp] = read(p)
            elif tp in asked:
                failed[tp] = error = read_error(p.error_code, f"{doing} {tp}")
                passes = error_kind(p.error_code).retriable
                if not passes or isinstance(error, CorruptLogError):
                    raise error
    return failed


def _passing(error: KdirectError) -> None:
    """Raise `error` unless it may pass."""
    if not error.retriable:
        raise error


def by_topic(tps: Iterable[TopicPartition]) -> dict[str, list[TopicPartition]]:
    """The same partitions, topic by topic."""
    out: dict[str, list[TopicPartition]] = {}
    for tp in tps:
        out.setdefault(tp.topic, []).append(tp)
    return out
