"""Kafka Connect's file connectors against our broker: a file, a topic, a file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kdirect
from tests.java.conftest import class_path
from tests.support import die_with_parent, wait_until

pytestmark = pytest.mark.slow
END_S = 30
STRINGS = "org.apache.kafka.connect.storage.StringConverter"


def write_properties(path: Path, **values: object) -> str:
    path.write_text("".join(f"{k.replace('_', '.')}={v}\n" for k, v in values.items()))
    return str(path)


@contextmanager
def standalone(jars: list[Path], files: list[str], log: Path) -> Iterator[None]:
    """connect-standalone with the properties of a worker, a source and a sink; stopped with
    SIGTERM, as an administrator would."""
    command = ["java", "-cp", class_path(jars), "-Xmx256m", "-XX:TieredStopAtLevel=1",
               "-XX:+UseSerialGC", "-Dlog4j2.level=off",
               "org.apache.kafka.connect.cli.ConnectStandalone", *files]  # fmt: skip
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with_parent)
    try:
        yield
        process.terminate()
        process.wait(END_S)
    finally:
        process.kill()
        process.wait(END_S)


def wait_for_lines(file: Path, count: int, said: Path) -> None:
    """Until the file has so many lines; `said`: what the worker has printed, for the failure."""
    wait_until(
        lambda: file.exists() and file.read_bytes().count(b"\n") >= count,
        lambda: said.read_text()[-3000:],
        END_S,
    )


def test_lines_go_from_file_to_file(broker, connect_jars, tmp_path: Path):
    """And go on after a restart where they stopped: the source by the worker's file of offsets, the
    sink by what its group has committed to the broker."""
    source, sink, said = (tmp_path / name for name in ("in.txt", "out.txt", "said"))
    files = [
        write_properties(
            tmp_path / "worker.properties",
            bootstrap_servers=broker.bootstrap_servers,
            key_converter=STRINGS,
            value_converter=STRINGS,
            offset_storage_file_filename=tmp_path / "offsets",
            offset_flush_interval_ms=200,
            listeners="http://127.0.0.1:0",
            plugin_discovery="service_load",
        ),
        write_properties(
            tmp_path / "source.properties",
            name="source",
            connector_class="FileStreamSource",
            file=source,
            topic="lines",
        ),
        write_properties(
            tmp_path / "sink.properties",
            name="sink",
            connector_class="FileStreamSink",
            file=sink,
            topics="lines",
        ),
    ]
    wanted: list[str] = []
    for turn in range(2):
        with standalone(connect_jars, files, said):
            for part in range(2):
                lines = [f"line {turn} {part} {i}" for i in range(500)]
                with source.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
                wanted += lines
                wait_for_lines(sink, len(wanted), said)
    assert sink.read_text().splitlines() == wanted
    with kdirect.connect(broker.bootstrap_servers) as session:
        place = kdirect.TopicPartition("lines", 0)
        assert session.admin.committed_offsets("connect-sink", [place])[place] == len(wanted)
