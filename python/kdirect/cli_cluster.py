"""The commands ``kdirect cluster`` and ``kdirect partition``.

`kdirect.cli` owns the command line as a whole: its exit statuses, its common flags, its errors.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kdirect.errors import ConfigError, KdirectError
from kdirect.model import TopicPartition

if TYPE_CHECKING:
    from kdirect.client.admin import Admin

POLL_S = 0.2  # how often a move that is awaited is asked about

log = logging.getLogger("kdirect.cluster")

Connect = Callable[[argparse.Namespace], Any]
Pairs = Callable[[Sequence[str], str], dict[str, str]]


class _Ended(Exception):
    """A signal asks the command to end."""


def add_commands(
    commands: Any,
    client: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    *,
    connect: Connect,
    pairs: Pairs,
) -> None:
    """Add both commands.  `client` and `common` hold the flags that they share with others;
    `connect` makes the session that the flags of `client` name; `pairs` reads ``KEY=VALUE``."""
    cluster = commands.add_parser("cluster", help="start, describe and check a cluster")
    cluster.set_defaults(parser=cluster, run=None)
    verbs = cluster.add_subparsers(title="commands", metavar="COMMAND")
    _start_parser(verbs, common, pairs)
    describe = verbs.add_parser("describe", parents=[client], help="show brokers and controller")
    describe.set_defaults(run=lambda options: _describe(connect(options).admin))
    health = verbs.add_parser(
        "health",
        parents=[client],
        help="name the partitions that lack a leader or replicas in sync",
        description="Exit status 0 when there is a controller and every replica is in sync,"
        " else 1.",
    )
    health.set_defaults(run=lambda options: _health(connect(options).admin))
    _partition_parser(commands, client, connect)


def _start_parser(verbs: Any, common: argparse.ArgumentParser, pairs: Pairs) -> None:
    start = verbs.add_parser(
        "start",
        parents=[common],
        help="run several brokers on this machine",
        description="Each broker is a process of its own. Prints `broker N pid P` for each, and"
        " `kdirect cluster ready on HOST:PORT,...` when all serve; runs until SIGTERM or SIGINT,"
        " which end all of them. A broker that ends by itself is named and not started again; if"
        " the ZooKeeper that was started with them ends, or the last broker, so does the command,"
        " with an error. For trials: in production, start each broker where it runs.",
    )
    start.add_argument("--brokers", type=int, default=3, metavar="N", help="default 3")
    start.add_argument(
        "--directory", required=True, metavar="DIR", help="where logs and files are kept"
    )
    start.add_argument(
        "--zookeeper-connect",
        default="",
        metavar="HOST:PORT",
        help="a ZooKeeper that runs; default: one is started from PySpark's jars",
    )
    start.add_argument("--racks", default="", metavar="R1,R2,...", help="of each broker, in order")
    start.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="set a property of all brokers; repeat for more",
    )
    start.set_defaults(run=lambda options: _start(options, pairs(options.settings, "--set")))


def _partition_parser(commands: Any, client: argparse.ArgumentParser, connect: Connect) -> None:
    partition = commands.add_parser("partition", help="move partitions, elect their leaders")
    partition.set_defaults(parser=partition, run=None)
    verbs = partition.add_subparsers(title="commands", metavar="COMMAND")
    reassign = verbs.add_parser(
        "reassign",
        parents=[client],
        help="move partitions to other brokers",
        description="TOPIC:PARTITION=N,N,N names the brokers of a partition, the preferred leader"
        " first. Without arguments, lists the moves that go on.",
    )
    reassign.add_argument("moves", nargs="*", metavar="TOPIC:PARTITION=N,N,N")
    reassign.add_argument(
        "--cancel",
        action="append",
        default=[],
        metavar="TOPIC:PARTITION",
        help="take back a move that is not finished; repeat for more",
    )
    reassign.add_argument("--wait", action="store_true", help="until the moves are finished")
    reassign.set_defaults(run=lambda options: _reassign(options, connect(options).admin))
    elect = verbs.add_parser(
        "elect",
        parents=[client],
        help="give leadership to the preferred replicas",
        description="Of the partitions named; without any, of all.",
    )
    elect.add_argument("partitions", nargs="*", metavar="TOPIC:PARTITION")
    elect.add_argument(
        "--unclean",
        action="store_true",
        help="where no replica in sync is left, let any live one lead: ACKNOWLEDGED RECORDS ARE"
        " LOST; name the partitions",
    )
    elect.set_defaults(run=lambda options: _elect(options, connect(options).admin))


# -- cluster ---------------------------------------------------------------------------------------


def _start(options: argparse.Namespace, properties: Mapping[str, str]) -> int:
    from kdirect.local_cluster import Cluster

    def end(number: int, frame: object) -> None:
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    cluster = Cluster(
        options.brokers,
        options.directory,
        zookeeper_connect=options.zookeeper_connect,
        racks=[rack.strip() for rack in options.racks.split(",") if rack.strip()],
        properties=properties,
    )
    try:
        with cluster:
            for node_id in cluster.node_ids:
                print(f"broker {node_id} pid {cluster.pid(node_id)}", flush=True)
            print(f"kdirect cluster ready on {cluster.bootstrap_servers}", flush=True)
            _tell_of_ends(cluster)
    except _Ended:
        pass
    return 0


def _tell_of_ends(cluster: Any) -> None:
    """Until `_Ended`: name each broker whose process has ended.  None is started again.
    BrokerUnavailableError if the cluster cannot go on: its own ZooKeeper, or all brokers, ended."""
    there = set(cluster.running)

    def look(number: int, frame: object) -> None:
        for node_id in sorted(there - set(cluster.running)):
            there.discard(node_id)
            log.error("%s; nothing starts it again", cluster.describe_end(node_id))
        cluster.check()

    signal.signal(signal.SIGCHLD, look)
    try:
        look(signal.SIGCHLD, None)  # what has ended before
        while True:
            signal.pause()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _describe(admin: Admin) -> int:
    found = admin.describe_cluster()
    print(f"cluster\t{found.cluster_id}\ncontroller\t{found.controller}")
    for broker in found.brokers:
        print(f"broker {broker.node_id}\t{broker.host}:{broker.port}\track {broker.rack or '-'}")
    for broker in found.brokers:
        print(f"replicas of broker {broker.node_id}\t{_feeds(admin, broker.node_id)}")
    health = admin.health()
    print(f"offline partitions\t{len(health.offline)}")
    lacking = len(health.under_min_in_sync) + len(health.under_replicated)
    print(f"under-replicated partitions\t{lacking}")
    return 0


def _feeds(admin: Admin, node_id: int) -> str:
    """How many replicas a broker has, by how they get their records."""
    try:
        replicas = admin.describe_replicas(node_id).values()
    except KdirectError as e:  # it may be the one that has trouble
        return f"unknown: {e.message}"
    found = Counter(str(replace(x, reason="")) for x in replicas)
    return ", ".join(f"{how} {n}" for how, n in sorted(found.items())) or "-"


def _health(admin: Admin) -> int:
    found = admin.health()
    if found.controller < 0:
        print("no controller")
    for what, tps in (
        ("offline", found.offline),
        ("under min.insync.replicas", found.under_min_in_sync),
        ("under-replicated", found.under_replicated),
    ):
        for tp in tps:
            print(f"{what}\t{tp.topic}:{tp.partition}")
    if found.is_well:
        print("well")
    return 0 if found.is_well else 1


# -- partition -------------------------------------------------------------------------------------


def _reassign(options: argparse.Namespace, admin: Admin) -> int:
    wanted: dict[TopicPartition, list[int] | None] = {}
    for text in options.moves:
        name, _, brokers = text.rpartition("=")
        try:
            wanted[_partition(name)] = [int(broker) for broker in brokers.split(",")]
        except ValueError as e:
            raise ConfigError(
                f"{text!r} is not TOPIC:PARTITION=N,N,N", hint="write for example flights:0=2,3,1"
            ) from e
    wanted.update((_partition(text), None) for text in options.cancel)
    admin.reassign_partitions(wanted)
    while True:
        going_on = admin.list_reassignments()
        ours = {tp for tp in going_on if tp in wanted} if wanted else set(going_on)
        if not ours or not options.wait:
            break
        time.sleep(POLL_S)
    for tp, move in sorted(going_on.items()):
        adding, removing = _numbers(move.adding), _numbers(move.removing)
        print(
            f"{tp.topic}:{tp.partition}\treplicas {_numbers(move.replicas)}\tadding {adding}"
            f"\tremoving {removing}"
        )
    return 0


def _elect(options: argparse.Namespace, admin: Admin) -> int:
    if options.unclean and not options.partitions:
        raise ConfigError(
            "an unclean election loses acknowledged records",
            hint="name the partitions that it is to be held for",
        )
    tps = [_partition(text) for text in options.partitions] or None
    failed = 0
    for tp, error in sorted(admin.elect_leaders(tps, unclean=options.unclean).items()):
        if error is not None:
            failed += 1
            print(f"kdirect: {error}", file=sys.stderr)
        else:
            print(f"{tp.topic}:{tp.partition}\telected")
    return 1 if failed else 0


def _partition(text: str) -> TopicPartition:
    topic, _, number = text.rpartition(":")
    if not topic or not number.isascii() or not number.isdigit():
        raise ConfigError(f"{text!r} is not TOPIC:PARTITION", hint="write for example flights:0")
    return TopicPartition(topic, int(number))


def _numbers(brokers: Sequence[int]) -> str:
    return ",".join(map(str, brokers)) or "-"


def describe_partitions(session: Any, name: str, leaders: Sequence[Any]) -> None:
    """Print a line for each partition of a topic: offsets, leader, replicas, those in sync; and one
    for each replica that follows: how it gets its records."""
    led = [TopicPartition(name, p.partition) for p in leaders if p.leader >= 0]
    try:
        earliest, latest = session.earliest_offsets(led), session.latest_offsets(led)
    except KdirectError as e:
        # Replicas are worth knowing most when a broker does not answer.
        log.warning("the offsets of %s are not known: %s", name, e)
        earliest, latest = {}, {}
    alive = {broker.node_id for broker in session.admin.describe_cluster().brokers}
    following = {n for p in leaders for n in p.replicas if n != p.leader}
    feeds = _feeds_of(session.admin, name, following & alive)
    for p in leaders:
        tp = TopicPartition(name, p.partition)
        offsets = f"[{earliest[tp]}, {latest[tp]})" if tp in latest else "unknown"
        leader = f"leader {p.leader}\tepoch {p.leader_epoch}" if p.leader >= 0 else "no leader"
        print(
            f"partition {p.partition}\toffsets {offsets}\t{leader}"
            f"\treplicas {_numbers(p.replicas)}\tin sync {_numbers(p.in_sync_replicas)}"
        )
        for node_id in p.replicas:
            if node_id != p.leader and node_id in feeds:
                print(f"  replica {node_id}\t{feeds[node_id].get(tp, 'not there')}")


def _feeds_of(admin: Admin, name: str, brokers: set[int]) -> dict[int, Mapping[Any, Any]]:
    """By broker, how its replicas of a topic get their records.  One that does not answer is left
    out."""
    found: dict[int, Mapping[Any, Any]] = {}
    for node_id in sorted(brokers):
        try:
            found[node_id] = admin.describe_replicas(node_id, [name])
        except KdirectError as e:
            log.warning("broker %d does not say how its replicas are fed: %s", node_id, e)
    return found
