"""The command line: ``kdirect broker`` and a few tools.

Standard output carries what a script may want to read; everything else goes to standard error.
Exit status: 0 well, 1 the thing failed, 2 the command or its configuration is wrong.  A
KdirectError is one line, never a stack.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import kdirect
from kdirect import cli_cluster, cli_remote, cli_workload
from kdirect.errors import ConfigError, KdirectError
from kdirect.options import BROKER
from kdirect.remote_options import BROKER_CREDENTIALS, store_properties

DEFAULT_BROKER = "127.0.0.1:9092"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        options.parser.print_help(sys.stderr)
        return 2
    logging.basicConfig(
        level=getattr(logging, options.log_level.upper()),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        return int(options.run(options))
    except ConfigError as e:
        print(f"kdirect: {e}", file=sys.stderr)
        return 2
    except KdirectError as e:
        print(f"kdirect: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Otherwise the interpreter complains when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


# What `add_subparsers` returns; argparse has no public name for it.
_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdirect", description="A Kafka-compatible log, read and written with one-sided RDMA."
    )
    parser.set_defaults(run=None, parser=parser, log_level="info")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    client = _client_parser()
    _broker_parser(commands, _log_level_parser("info"))
    _topic_parser(commands, client)
    _produce_parser(commands, client)
    _consume_parser(commands, client)
    cli_cluster.add_commands(
        commands,
        client,
        _log_level_parser("info"),
        connect=lambda options: kdirect.connect(_settings(options)),
        pairs=_pairs,
    )
    cli_remote.add_commands(
        commands,
        client,
        _log_level_parser("warning"),
        connect=lambda options: kdirect.connect(_settings(options)),
        pairs=_pairs,
    )
    cli_workload.add_command(
        commands,
        client,
        connect=lambda options: kdirect.connect(_settings(options)),
        pairs=_pairs,
    )
    _doctor_parser(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def _client_parser() -> argparse.ArgumentParser:
    """The flags that all commands share which talk to a broker."""
    client = argparse.ArgumentParser(add_help=False, parents=[_log_level_parser("warning")])
    client.add_argument(
        "--broker",
        "--bootstrap-servers",
        default=DEFAULT_BROKER,
        metavar="HOST:PORT",
        help=f"default {DEFAULT_BROKER}",
    )
    client.add_argument(
        "--transport",
        default="auto",
        choices=("auto", "verbs", "shm", "tcp"),
        help="how records travel",
    )
    return client


def _topic_parser(commands: _Commands, client: argparse.ArgumentParser) -> None:
    topic = commands.add_parser("topic", help="create, list, describe, delete topics")
    topic.set_defaults(parser=topic, run=None)
    verbs = topic.add_subparsers(title="commands", metavar="COMMAND")
    create = verbs.add_parser("create", parents=[client], help="create a topic")
    create.add_argument("name")
    create.add_argument("--partitions", type=int, default=1)
    create.add_argument(
        "--replication-factor",
        type=int,
        default=-1,
        metavar="N",
        help="replicas of each partition; default: default.replication.factor of the broker",
    )
    create.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a property of the topic, e.g. retention.ms=60000",
    )
    create.add_argument("--if-not-exists", action="store_true")
    create.set_defaults(run=_topic_create)
    listing = verbs.add_parser("list", parents=[client], help="list topics, one a line")
    listing.add_argument("--internal", action="store_true", help="the broker's own too")
    listing.set_defaults(run=_topic_list)
    describe = verbs.add_parser(
        "describe", parents=[client], help="show a topic's partitions, offsets and properties"
    )
    describe.add_argument("name")
    describe.set_defaults(run=_topic_describe)
    delete = verbs.add_parser("delete", parents=[client], help="delete a topic")
    delete.add_argument("name")
    delete.add_argument("--if-exists", action="store_true")
    delete.set_defaults(run=_topic_delete)


def _produce_parser(commands: _Commands, client: argparse.ArgumentParser) -> None:
    produce = commands.add_parser(
        "produce", parents=[client], help="produce the lines of standard input"
    )
    produce.add_argument("topic")
    produce.add_argument("--partition", type=int, help="default: by key, or spread")
    produce.add_argument(
        "--key-separator",
        metavar="TEXT",
        help="what stands between key and value in a line; default: lines have no key",
    )
    produce.set_defaults(run=_produce)


def _consume_parser(commands: _Commands, client: argparse.ArgumentParser) -> None:
    consume = commands.add_parser(
        "consume", parents=[client], help="print a topic's values, one a line"
    )
    consume.add_argument("topic")
    consume.add_argument("--partition", type=int, action="append", help="default: all")
    consume.add_argument(
        "--from", dest="start", default="earliest", metavar="earliest|latest|OFFSET"
    )
    consume.add_argument("--count", type=int, help="stop after so many records")
    consume.add_argument("--follow", action="store_true", help="wait for more at the end")
    consume.add_argument(
        "--show",
        default="value",
        choices=("value", "all"),
        help="all: partition, offset, timestamp, key, value, separated by tabs",
    )
    consume.set_defaults(run=_consume)


def _doctor_parser(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        parents=[_log_level_parser("warning")],
        help="say step by step whether RDMA would be used, and why not",
        description="Looks at the whole path and ends with a real data READ."
        " Exit status 0 when RDMA would be used, else 1.",
    )
    doctor.add_argument(
        "--broker",
        "--bootstrap-servers",
        "--bootstrap",
        default="",
        metavar="HOST:PORT",
        help="default: this host alone",
    )
    doctor.add_argument(
        "--transport",
        default="auto",
        choices=("auto", "verbs", "shm"),
        help="which one the exit status is about; auto: verbs",
    )
    doctor.add_argument(
        "--log-dirs",
        default="",
        metavar="DIRS",
        help="a broker's log directories, separated by commas",
    )
    doctor.add_argument(
        "--bind-address", default="", metavar="ADDRESS", help="as rdma.bind.address"
    )
    doctor.add_argument("--device", default="", help="as rdma.device")
    doctor.add_argument("--gid-index", type=int, default=-1, help="as rdma.gid.index")
    doctor.add_argument(
        "--remote-storage",
        default="",
        metavar="URI",
        help="an object store: put, read, list and delete an object there",
    )
    doctor.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="a broker's properties file, whose rsm.config.* go with --remote-storage"
        " (default: credentials of the environment)",
    )
    doctor.set_defaults(run=_doctor)


def _log_level_parser(default: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--log-level",
        default=default,
        choices=("debug", "info", "warning", "error"),
        help=f"for standard error, default {default}",
    )
    return parser


# -- broker ----------------------------------------------------------------------------------------
def _broker_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    broker = commands.add_parser(
        "broker",
        parents=[common],
        help="run a broker",
        description="Runs until SIGTERM or SIGINT; prints `kdirect broker ready on HOST:PORT` when"
        " it serves. Flags beat the file.",
    )
    broker.add_argument(
        "--config", metavar="FILE", help="a Java properties file, such as Kafka's server.properties"
    )
    broker.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="set a property; repeat for more",
    )
    properties = broker.add_argument_group("properties (see docs/options.md)")
    for row in BROKER.rows:
        if row.is_prefix:  # by --set, or better in the file: a command line is no secret
            continue
        flags = ["--" + name.replace(".", "-") for name in (row.name, *row.aliases)]
        text = row.help.split(". ")[0].replace("%", "%%")
        properties.add_argument(
            *flags, dest=f"property:{row.name}", metavar=row.kind.upper(), help=text
        )
    broker.set_defaults(run=_broker)


def _broker(options: argparse.Namespace) -> int:
    from kdirect.broker.config import BrokerConfig, read_properties
    from kdirect.broker.server import BrokerServer

    properties: dict[str, Any] = dict(read_properties(options.config)) if options.config else {}
    flags = {
        name.removeprefix("property:"): value
        for name, value in vars(options).items()
        if name.startswith("property:") and value is not None
    }
    settings = _pairs(options.settings, "--set")
    for given in (settings, flags):
        for name in given:
            row = BROKER.find(name)
            for other in (row.name, *row.aliases):
                properties.pop(other, None)
        properties.update(given)
    status = asyncio.run(_serve(BrokerServer(BrokerConfig(properties))))
    _leave_a_silent_store(status)
    return status


def _leave_a_silent_store(status: int) -> None:
    """The broker has stopped.  pyarrow lets no process end before the requests that it has under
    way, for minutes if a store is silent: then end without its farewell."""
    if any(thread.name.startswith("kdirect-remote-") for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _serve(server: Any) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = logging.getLogger("kdirect.broker")
    log.info(
        "kdirect %s, log directories: %s",
        kdirect.__version__,
        ", ".join(str(d) for d in server.logs.log_dirs),
    )
    starting = asyncio.ensure_future(server.start())
    if server.member is not None:
        # It may wait for the metadata store, or for a node of its own name to go, without end.
        ending = asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not starting.done():
            log.info("stopping before it has joined its cluster")
            starting.cancel()
            await asyncio.wait((starting,))
            if starting.cancelled():
                return 0
    await starting
    # What there is by now stays: a collector that walked it again and again would hold everybody up
    # for 20 ms each time.
    gc.collect()
    gc.freeze()
    print(f"kdirect broker ready on {server.bootstrap_servers.split(',')[0]}", flush=True)
    works = await server.directories.until_told(stop)
    log.info("stopping")
    try:
        await server.stop()
    except (kdirect.KdirectError, OSError) as e:
        if works:
            raise
        log.error("stopping failed: %s", e)
    log.info("stopped")
    return 0 if works else 1


def _pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    out = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(
                f"{flag} {text!r} is not KEY=VALUE",
                hint=f"write for example {flag} num.partitions=3",
            )
        out[key.strip()] = value.strip()
    return out


# -- tools -----------------------------------------------------------------------------------------
def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "bootstrap.servers": options.broker,
        "transport": options.transport,
        "client.id": "kdirect-cli",
    }


def _topic_create(options: argparse.Namespace) -> int:
    admin = kdirect.connect(_settings(options)).admin
    created = admin.create_topic(
        options.name,
        options.partitions,
        options.replication_factor,
        configs=_pairs(options.config, "--config"),
        if_not_exists=options.if_not_exists,
    )
    print(f"created {options.name}" if created else f"{options.name} exists")
    return 0


def _topic_list(options: argparse.Namespace) -> int:
    for name, info in sorted(
        kdirect.connect(_settings(options)).admin.list_topics(internal=options.internal).items()
    ):
        print(f"{name}\t{info.partitions}")
    return 0


def _topic_describe(options: argparse.Namespace) -> int:
    session = kdirect.connect(_settings(options))
    info = session.admin.describe_topic(options.name)
    print(f"topic\t{info.name}\nid\t{info.topic_id or '-'}\npartitions\t{info.partitions}")
    cli_cluster.describe_partitions(session, info.name, info.leaders)
    for name, entry in sorted(session.admin.describe_configs(options.name).items()):
        if not entry.is_default:
            print(f"config {name}\t{entry.value}")
    return 0


def _topic_delete(options: argparse.Namespace) -> int:
    deleted = kdirect.connect(_settings(options)).admin.delete_topic(
        options.name, if_exists=options.if_exists
    )
    print(f"deleted {options.name}" if deleted else f"{options.name} does not exist")
    return 0


def _produce(options: argparse.Namespace) -> int:
    count = 0
    separator = options.key_separator.encode() if options.key_separator else None
    with kdirect.Producer(_settings(options)) as producer:
        for line in sys.stdin.buffer:
            value, key = line.rstrip(b"\r\n"), None
            if separator is not None:
                key, found, rest = value.partition(separator)
                key, value = (key, rest) if found else (None, value)
            producer.produce(options.topic, value, key=key, partition=options.partition)
            count += 1
        producer.flush()
    print(f"{count} records", file=sys.stderr)
    return 0


def _consume(options: argparse.Namespace) -> int:
    from kdirect.model import EARLIEST_OFFSET, LATEST_OFFSET, TopicPartition

    session = kdirect.connect(_settings(options))
    try:
        start = {"earliest": EARLIEST_OFFSET, "latest": LATEST_OFFSET}.get(options.start)
        start = int(options.start) if start is None else start
    except ValueError as e:
        raise ConfigError(
            f"--from {options.start!r} is no offset", hint="give earliest, latest or a number"
        ) from e
    indexes = (
        options.partition
        if options.partition is not None
        else range(session.admin.describe_topic(options.topic).partitions)
    )
    tps = [TopicPartition(options.topic, i) for i in indexes]
    ends = session.latest_offsets(tps)
    left = options.count if options.count is not None else -1
    out = sys.stdout.buffer
    with kdirect.Consumer(_settings(options), session=session) as consumer:
        consumer.assign(dict.fromkeys(tps, start))
        while left != 0 and (options.follow or any(consumer.position(tp) < ends[tp] for tp in tps)):
            message = consumer.poll(0.5)
            if message is None:
                out.flush()
                continue
            if options.show == "all":
                key = b"" if message.key() is None else message.key()
                out.write(
                    b"%d\t%d\t%d\t%s\t"
                    % (message.partition(), message.offset(), message.timestamp()[1], key)
                )
            out.write((message.value() or b"") + b"\n")
            left -= 1
    out.flush()
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from kdirect import doctor

    directories = [d.strip() for d in options.log_dirs.split(",") if d.strip()]
    remote: dict[str, str] = {}
    if options.config:
        from kdirect.broker.config import read_properties

        remote = store_properties(read_properties(options.config), BROKER_CREDENTIALS)
    questions = doctor.Questions(
        options.broker,
        options.transport,
        options.bind_address,
        options.device,
        options.gid_index,
        directories,
        options.remote_storage,
        remote,
    )
    return doctor.run(questions)


def _version(options: argparse.Namespace) -> int:
    print(f"kdirect {kdirect.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
