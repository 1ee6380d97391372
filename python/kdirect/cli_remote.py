"""The commands ``kdirect remote`` and ``kdirect inspect``: what lies in an object store.

``ls``, ``verify`` and ``sweep`` read the metadata topic through a broker, as any consumer may, and
the store by themselves: what they need of it they are given as the broker is, by
``rsm.config.*`` properties or the environment.  ``rebuild`` needs no broker, and must not have one.

`kdirect.cli` owns the command line as a whole: its exit statuses, its common flags, its errors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kdirect.errors import ConfigError, KdirectError, NotOwnerError
from kdirect.remote_options import BROKER_CREDENTIALS, store_properties

Connect = Callable[[argparse.Namespace], Any]
Pairs = Callable[[Sequence[str], str], dict[str, str]]

METADATA_TOPIC = "__remote_log_metadata"


def add_commands(
    commands: Any,
    client: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    *,
    connect: Connect,
    pairs: Pairs,
) -> None:
    """Add the commands.  `client` and `common` hold the flags that they share with others;
    `connect` makes the session that the flags of `client` name; `pairs` reads ``KEY=VALUE``."""
    remote = commands.add_parser("remote", help="look at, check, sweep and rebuild remote storage")
    remote.set_defaults(parser=remote, run=None)
    verbs = remote.add_subparsers(title="commands", metavar="COMMAND")
    ls = verbs.add_parser("ls", parents=[client], help="list the remote segments of a topic")
    ls.add_argument("topic")
    ls.set_defaults(run=lambda options: _ls(options, connect(options)))
    verify = _verify_parser(verbs, client)
    verify.set_defaults(run=lambda options: _verify(options, connect(options), pairs))
    sweep = _sweep_parser(verbs, client)
    sweep.set_defaults(run=lambda options: _sweep(options, connect(options), pairs))
    rebuild = _rebuild_parser(verbs, common)
    rebuild.set_defaults(run=lambda options: _rebuild(options, pairs))
    inspect = _inspect_parser(commands, common)
    inspect.set_defaults(run=lambda options: _inspect(options, pairs))
    for parser in (ls, verify):
        parser.add_argument("--partition", type=int)
    for parser in (verify, sweep):
        parser.add_argument("--store", metavar="URI", help="default: the broker's")
    for parser in (verify, sweep, rebuild, inspect):
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
            help="a property, such as rsm.config.access_key; repeat for more",
        )  # fmt: skip
    for parser in (ls, verify, sweep, rebuild, inspect):
        parser.add_argument("--json", action="store_true", help="one JSON object a line")


def _verify_parser(verbs: Any, client: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "verify",
        parents=[client],
        help="check every object against metadata, checksums and batches",
        description="Reads every byte. Exit status 1 when something is damaged or missing.",
    )
    parser.add_argument("topic", nargs="?", help="default: all topics")
    return parser


def _sweep_parser(verbs: Any, client: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "sweep", parents=[client], help="delete objects of this cluster that nobody owns"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list them")
    parser.add_argument("--age-ms", type=int, help="default: remote.orphan.age.ms of the broker")
    parser.add_argument(
        "--owner",
        metavar="INCARNATION",
        help="the incarnation of another broker in whose stead this cluster owns the objects",
    )
    return parser


def _rebuild_parser(verbs: Any, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "rebuild",
        parents=[common],
        help="make the log directories of a broker that has lost everything",
        description="Reads the broker's properties, lists the store and reads the footers. The"
        " broker must not run, and its log directories must be empty. The objects are taken over"
        " from whichever broker had them.",
    )
    parser.add_argument("--config", metavar="FILE", help="the broker's properties file")
    parser.add_argument("--cluster-id", help="default: the only one in the store")
    return parser


def _inspect_parser(commands: Any, common: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        parents=[common],
        help="show and check one object of remote storage",
        description="Exit status 1 when it is damaged.",
    )
    parser.add_argument("uri", help="the URI of the object, or the path of a file")
    parser.add_argument("--no-check", action="store_true", help="read the footer only")
    return parser


# -- what the metadata says ------------------------------------------------------------------------


def _partitions(session: Any) -> dict[Any, Any]:
    """(topic id, partition) -> its metadata, as the topic says now."""
    from kdirect.client.consumer import Consumer
    from kdirect.format.remote_metadata import parse_record
    from kdirect.model import EARLIEST_OFFSET, TopicPartition
    from kdirect.storage.segment_states import PartitionMetadata

    topics = session.admin.list_topics(internal=True)
    if METADATA_TOPIC not in topics:
        return {}
    tps = [TopicPartition(METADATA_TOPIC, i) for i in range(topics[METADATA_TOPIC].partitions)]
    ends = session.latest_offsets(tps)
    found: dict[Any, Any] = {}
    with Consumer(dict(session.settings), session=session) as consumer:
        consumer.assign(dict.fromkeys(tps, EARLIEST_OFFSET))
        while any(consumer.position(tp) < ends[tp] for tp in tps):
            message = consumer.poll(0.2)
            value = None if message is None else message.value()
            if value is None:
                continue
            record = parse_record(value)
            key = (record.topic_id, record.partition)
            found.setdefault(key, PartitionMetadata()).apply(record)
    return found


def _segments(options: argparse.Namespace, session: Any) -> Iterator[Any]:
    """The remote segments that the options name, by topic, partition and offset."""
    known = _partitions(session)
    if options.topic is not None:
        session.admin.describe_topic(options.topic)  # it says so when there is none
    every = [segment for metadata in known.values() for segment in metadata.segments.values()]
    for segment in sorted(every, key=lambda s: (s.topic, s.partition, s.base_offset)):
        if options.topic in (None, segment.topic):
            if options.partition in (None, segment.partition):
                yield segment


def _show(options: argparse.Namespace, **values: Any) -> None:
    if options.json:
        print(json.dumps(values))
    else:
        print("\t".join("-" if v is None else str(v) for v in values.values()))


def _ls(options: argparse.Namespace, session: Any) -> int:
    for segment in _segments(options, session):
        _show(
            options,
            topic=segment.topic,
            partition=segment.partition,
            base_offset=segment.base_offset,
            end_offset=segment.end_offset,
            bytes=segment.size,
            max_timestamp_ms=segment.max_timestamp_ms,
            state=segment.state.name,
            segment_id=str(segment.segment_id),
        )
    return 0


# -- the store -------------------------------------------------------------------------------------


def _credentials(given: dict[str, str]) -> dict[str, str]:
    for name in given:
        if not name.startswith(BROKER_CREDENTIALS):
            raise ConfigError(
                f"--set {name}: only properties of the store are taken here",
                hint="they begin with rsm.config.",
            )
    return store_properties(given, BROKER_CREDENTIALS)


def _store(options: argparse.Namespace, session: Any, pairs: Pairs) -> Any:
    from kdirect.objects.store import ObjectStore

    uri = options.store or _broker_config(session, "remote.log.storage.uri")
    if not uri:
        raise ConfigError(
            "the broker has no remote.log.storage.uri", hint="give the store with --store"
        )
    return ObjectStore(uri, _credentials(pairs(options.settings, "--set")))


def _broker_config(session: Any, name: str) -> str | None:
    info = session.admin.describe_cluster()
    entry = session.admin.describe_configs(broker=info.brokers[0].node_id).get(name)
    return None if entry is None else entry.value


def _verify(options: argparse.Namespace, session: Any, pairs: Pairs) -> int:
    from kdirect.format.remote_metadata import SegmentState
    from kdirect.format.segment_object import object_key

    store, cluster_id = _store(options, session, pairs), session.admin.describe_cluster().cluster_id
    damaged = checked = 0
    for segment in _segments(options, session):
        if segment.state is not SegmentState.COPY_SEGMENT_FINISHED:
            continue
        key = object_key("", _identity(segment, cluster_id), segment.base_offset)
        findings = _findings(store, segment, key)
        checked += 1
        damaged += bool(findings)
        for finding in findings:
            _show(options, key=key, finding=finding)
        if options.json and not findings:
            _show(options, key=key, finding=None)
    gaps = 0
    for named, finding in _gaps(options, session, store, cluster_id):
        gaps += 1
        _show(options, key=named, finding=finding)
    said = f"{checked} objects, {damaged} damaged"
    print(said + (f", {gaps} gaps" if gaps else ""), file=sys.stderr)
    return 1 if damaged or gaps else 0


def _gaps(
    options: argparse.Namespace, session: Any, store: Any, cluster_id: str
) -> Iterator[tuple[str | None, str]]:
    """Offsets that no remote segment has, between two that are there; with the key of an object
    that begins there and that the metadata does not name, if there is one."""
    from kdirect.format.remote_metadata import SegmentState
    from kdirect.format.segment_object import object_key, parse_key
    from kdirect.storage.remote_segments import RemoteSegments

    logs: dict[tuple[Any, int], list[Any]] = {}
    for segment in _segments(options, session):
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED:
            logs.setdefault((segment.topic_id, segment.partition), []).append(segment)
    for some, *more in logs.values():
        segments = RemoteSegments()
        segments.load([some, *more])
        for start, end in segments.gaps():
            folder = object_key("", _identity(some, cluster_id), 0).rpartition("/")[0]
            there = [(i.key, parse_key("", i.key)) for i in store.list(f"{folder}/")]
            keys = [k for k, parsed in there if parsed is not None and start <= parsed[1] < end]
            missing = f"{some.topic}-{some.partition} lacks offsets {start} to {end - 1}"
            if not keys:
                yield None, f"{missing}: there is no object"
            for key in keys:
                yield key, f"{missing}: the metadata does not name the object, or it is damaged"


def _findings(store: Any, segment: Any, key: str) -> list[str]:
    """What is wrong with the object of a segment."""
    from kdirect.format.object_check import check_object
    from kdirect.format.segment_object import parse_custom_metadata

    custom = parse_custom_metadata(segment.custom)
    try:
        tail = None if custom is None else custom.tail
        size = store.size(key) if tail is None else tail.object_bytes
        if size is None:
            return ["there is no such object"]
        return [str(x) for x in check_object(lambda p, n: store.get(key, p, n), size)]
    except KdirectError as e:
        return [str(e)]


def _identity(segment: Any, cluster_id: str) -> Any:
    from kdirect.format.segment_object import SegmentIdentity

    return SegmentIdentity(
        cluster_id=cluster_id,
        topic=segment.topic,
        topic_id=segment.topic_id,
        partition=segment.partition,
        segment_id=segment.segment_id,
    )


def _sweep(options: argparse.Namespace, session: Any, pairs: Pairs) -> int:
    from kdirect.storage.sweep import Known, Sweep

    store = _store(options, session, pairs)
    age_ms = options.age_ms
    if age_ms is None:
        age_ms = int(_broker_config(session, "remote.orphan.age.ms") or 86_400_000)
    known = _known(session)
    sweep = Sweep(store, Known(*known), time.time_ns() // 1_000_000, age_ms)
    found = sweep.find()
    if found and not options.dry_run:
        _require_owner(store, known[0], session, options.owner)
        segments = _known(session)[2]  # what was copied meanwhile is nobody's orphan
        found = sweep.delete(found, lambda segment_id: segment_id not in segments)
    for orphan in found:
        _show(options, key=orphan.key, bytes=orphan.size, modified_ms=orphan.modified_ms)
    verb = "would be deleted" if options.dry_run else "deleted"
    print(f"{len(found)} objects {verb}", file=sys.stderr)
    return 0


def _require_owner(store: Any, cluster_id: str, session: Any, owner: str | None) -> None:
    """NotOwnerError unless the objects are of the brokers that were asked what they know."""
    from kdirect.storage.ownership import FOLDER, newest_marker, owner_address

    newest = newest_marker(store, f"{cluster_id}/{FOLDER}/")
    if newest is None or newest.incarnation == owner:
        return
    where = owner_address(store, newest)
    brokers = {f"{b.host}:{b.port}" for b in session.admin.describe_cluster().brokers}
    if brokers.isdisjoint(where.split(",")):
        raise NotOwnerError(
            f"the objects of cluster {cluster_id} belong to a broker at"
            f" {where or 'an unknown address'} (incarnation {newest.incarnation}), which is none of"
            f" {', '.join(sorted(brokers))}",
            hint="ask that one, by --broker; if it is the same, or is gone for good, give"
            f" --owner {newest.incarnation}",
        )


def _known(session: Any) -> tuple[str, set[Any], set[Any]]:
    """Cluster id, topic ids and segment ids."""
    metadata = _partitions(session)
    topics = {topic_id for topic_id, _ in metadata}
    topics |= {info.topic_id for info in session.admin.list_topics().values()}
    segments = {i for found in metadata.values() for i in found.segments}
    return session.admin.describe_cluster().cluster_id, topics, segments


# -- rebuild and inspect ---------------------------------------------------------------------------


def _rebuild(options: argparse.Namespace, pairs: Pairs) -> int:
    from kdirect.broker.config import BrokerConfig, read_properties
    from kdirect.broker.rebuilding import rebuild
    from kdirect.objects.store import ObjectStore

    properties: dict[str, Any] = dict(read_properties(options.config)) if options.config else {}
    properties.update(pairs(options.settings, "--set"))
    config = BrokerConfig(properties)
    if not config["remote.log.storage.system.enable"]:
        raise ConfigError(
            "these properties switch tiered storage off",
            hint="give those of the broker: remote.log.storage.system.enable=true and the URI",
        )
    store = ObjectStore(
        config["remote.log.storage.uri"], store_properties(config, BROKER_CREDENTIALS)
    )
    reports: list[str] = []
    cluster_id = options.cluster_id or _only_cluster(store)
    topics, records = rebuild(config, cluster_id, store, reports.append)
    for report in reports:
        print(f"kdirect: {report}", file=sys.stderr)
    for topic in topics:
        for number, found in topic.partitions.items():
            _show(
                options,
                topic=topic.name,
                partition=number,
                log_start_offset=found.log_start_offset,
                end_offset=found.end_offset,
                segments=len(found.segments),
            )
    print(f"{len(topics)} topics, {records} offsets", file=sys.stderr)
    return 0


def _only_cluster(store: Any) -> str:
    from kdirect.format.segment_object import parse_key

    parsed = (parse_key("", info.key) for info in store.list())
    clusters = sorted({found[0].cluster_id for found in parsed if found is not None})
    if len(clusters) != 1:
        raise ConfigError(
            f"{store.uri} has objects of {len(clusters)} clusters",
            hint="name one with --cluster-id" + (": " + ", ".join(clusters) if clusters else ""),
        )
    return clusters[0]


def _inspect(options: argparse.Namespace, pairs: Pairs) -> int:
    from pathlib import Path

    from kdirect.format.object_check import check_object, read_footer
    from kdirect.format.segment_object import Section
    from kdirect.objects.store import ObjectStore

    uri = options.uri if "://" in options.uri else Path(options.uri).absolute().as_uri()
    folder, _, name = uri.partition("?")[0].rpartition("/")
    query = uri.partition("?")[2]
    store = ObjectStore(
        folder + (f"?{query}" if query else ""), _credentials(pairs(options.settings, "--set"))
    )
    size = store.size(name)
    if size is None:
        raise ConfigError(f"there is no object {uri}", hint="check the URI and its credentials")

    def read(position: int, length: int) -> memoryview:
        return store.get(name, position, length)  # type: ignore[no-any-return]

    found = read_footer(read, size)
    values = {
        "cluster_id": found.identity.cluster_id,
        "topic": found.identity.topic,
        "topic_id": str(found.identity.topic_id),
        "partition": found.identity.partition,
        "segment_id": str(found.identity.segment_id),
        "base_offset": found.base_offset,
        "end_offset": found.end_offset,
        "min_timestamp_ms": found.min_timestamp_ms,
        "max_timestamp_ms": found.max_timestamp_ms,
        "broker_id": found.broker_id,
        "leader_epoch": found.leader_epoch,
        "bytes": size,
    }
    sections = {s.name.lower(): found.sections[s].length for s in Section}
    if options.json:
        print(json.dumps({**values, "sections": sections}))
    else:
        for label, value in (*values.items(), *((f"section {n}", v) for n, v in sections.items())):
            print(f"{label}\t{value}")
    findings = [] if options.no_check else list(check_object(read, size))
    for finding in findings:
        print(f"kdirect: {finding}", file=sys.stderr)
    return 1 if findings else 0


__all__ = ["add_commands"]
