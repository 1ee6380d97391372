"""The command `kdirect workload`: writes the records of a benchmark's streams into topics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

# As kdirect.workloads.catalogue has them; its import would cost every other command its time.
NAMES = ("ysb", "nexmark", "cm", "ro", "zipf")


def add_command(
    commands: Any,
    client: argparse.ArgumentParser,
    *,
    connect: Callable[[argparse.Namespace], Any],
    pairs: Callable[[Sequence[str], str], dict[str, str]],
) -> None:
    """`connect` makes a session of the options, `pairs` a mapping of KEY=VALUE texts."""
    workload = commands.add_parser(
        "workload",
        parents=[client],
        help="write the records of a benchmark into topics",
        description="Record number i goes to partition i mod P; the same seed gives the same"
        " records. A workload of several streams writes TOPIC-STREAM for each, in the ratio of its"
        " events. Prints what was written as JSON.",
    )
    workload.add_argument("name", choices=NAMES)
    workload.add_argument("--topic", required=True, help="created if it is not there")
    workload.add_argument("--records", type=int, required=True, help="of all streams together")
    workload.add_argument("--partitions", type=int, help="of each topic; default 1, or what it has")
    workload.add_argument(
        "--first", type=int, default=0, help="number of the first record (or event), to go on"
    )
    workload.add_argument("--stream", help="write this stream only")
    workload.add_argument(
        "--compression", default="none", choices=("none", "gzip", "snappy", "lz4", "zstd")
    )
    workload.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an option of the workload, e.g. keys=1000, zipf=1.2, disorder_us=5000, seed=7",
    )
    workload.set_defaults(run=lambda options: _write(options, connect, pairs))


def _write(
    options: argparse.Namespace,
    connect: Callable[[argparse.Namespace], Any],
    pairs: Callable[[Sequence[str], str], dict[str, str]],
) -> int:
    from kdirect.errors import ConfigError
    from kdirect.workloads.catalogue import named
    from kdirect.workloads.writing import write

    settings = {name: _value(text) for name, text in pairs(options.settings, "--set").items()}
    workload = named(options.name, **settings)
    streams = workload.streams
    if options.stream is not None:
        if options.stream not in streams:
            raise ConfigError(
                f"the workload {options.name} has no stream {options.stream!r}",
                hint="it has " + ", ".join(streams),
            )
        streams = {options.stream: streams[options.stream]}
    report = {}
    session = connect(options)
    for name, stream in streams.items():
        topic = options.topic if len(workload.streams) == 1 else f"{options.topic}-{name}"
        first = stream.among(options.first)
        written = write(
            session,
            stream,
            topic,
            records=stream.among(options.first + options.records) - first,
            first=first,
            partitions=options.partitions,
            compression_type=options.compression,
        )
        report[topic] = {
            "records": written.records,
            "value_bytes": written.value_bytes,
            "seconds": round(written.seconds, 3),
            "layout": stream.layout.to_json(),
        }
    json.dump(report, sys.stdout)
    print()
    return 0


def _value(text: str) -> Any:
    """A number, true or false if the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
