"""Every file that a broker reads when it starts, damaged in every way: it goes on without the file,
or says which it is and what to do.

A traceback says neither.  What a start that succeeds has to be able to do: give out producer ids,
and take and return records.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import kdirect
from kdirect.errors import KdirectError
from kdirect.model import TopicPartition

REMEDIES = (
    "remove it",
    "remove ",
    "restore",
    "move it away",
    "set node.id",
    "use other log.dirs",
    "use log.dirs of one cluster",
)


def random_text(rng: random.Random) -> bytes:
    return "".join(
        rng.choice('{}[]":,=# \n0123456789abtrue-٣é\u2028') for _ in range(rng.randrange(1, 200))
    ).encode()


def other_number(rng: random.Random, data: bytes) -> bytes:
    """One of the numbers in a text becomes another."""
    words = data.split(b" ") if b" " in data else data.split(b"\n")
    numbers = [i for i, w in enumerate(words) if w.strip().lstrip(b"-").isdigit()]
    if numbers:
        words[rng.choice(numbers)] = rng.choice(
            [b"-1", b"99999999999", b"9" * 30, b"9" * 6000, b"1e999", b"0x10", b"\xd9\xa3"]
        )
    return (b" " if b" " in data else b"\n").join(words)


def flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.randrange(1, 5)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


DAMAGES = {
    "empty": lambda rng, data: b"",
    "not UTF-8": lambda rng, data: b"\xff\xfe" + rng.randbytes(100),
    "random bytes": lambda rng, data: rng.randbytes(rng.randrange(1, 400)),
    "zeros": lambda rng, data: bytes(max(1, len(data))),
    "random text": lambda rng, data: random_text(rng),
    "cut off": lambda rng, data: data[: rng.randrange(len(data) + 1)],
    "twice": lambda rng, data: data + data,
    "bits flipped": flipped,
    "another number": other_number,
    "deep": lambda rng, data: b"[" * 100_000,
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Log directories of a broker that stopped, and of one that was killed, with all files that
    there are."""
    path = tmp_path_factory.mktemp("whole") / "log"
    with kdirect.Broker(
        log_dirs=str(path), listeners="127.0.0.1:0", log_segment_bytes=16384
    ) as broker:
        session = kdirect.connect(broker.bootstrap_servers)
        session.admin.create_topic("t", 2, configs={"retention.ms": "123456789"})
        settings = {
            "bootstrap.servers": broker.bootstrap_servers,
            "transport": "tcp",
            "batch.bytes": 4096,
        }
        with kdirect.Producer(settings) as producer:
            for i in range(60):
                producer.produce("t", bytes(1000), partition=i % 2)
            producer.flush()
        session.admin.commit_offsets("g", {TopicPartition("t", 0): 3})
        session.close()
        killed = path.with_name("killed")
        shutil.copytree(path, killed)
    return {"stopped": path, "killed": killed}


def files_of(path: Path) -> list[str]:
    """The files that are read at the start, one of a kind."""
    kinds: dict[tuple[str, str], str] = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != ".lock":
            where = file.parent.name.split("-")[0] if file.parent != path else ""
            kinds.setdefault((where, file.suffix or file.name), str(file.relative_to(path)))
    return sorted(kinds.values())


def start_and_use(path: Path) -> None:
    """KdirectError when it does not start; any other failure fails the test."""
    broker = kdirect.Broker(log_dirs=str(path), listeners="127.0.0.1:0", log_segment_bytes=16384)
    broker.start()
    try:
        session = kdirect.connect(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        )
        try:
            if not session.admin.list_topics():
                session.admin.create_topic("t", 2)
            settings = {
                "bootstrap.servers": broker.bootstrap_servers,
                "transport": "tcp",
                "delivery.timeout.ms": 3000,
            }
            with kdirect.Producer(settings) as producer:
                producer.send("t", b"x", partition=0).result(20)
            kdirect.connect(producer.settings).close()
        finally:
            session.close()
    finally:
        broker.stop()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("state", ["stopped", "killed"])
@pytest.mark.timeout(600)
def test_a_damaged_file_is_named_with_the_remedy_or_done_without(logs, tmp_path, seed, state, how):
    rng = random.Random(seed)
    whole = logs[state]
    wrong = []
    for name in files_of(whole):
        path = tmp_path / "log"
        shutil.copytree(whole, path)
        victim = path / name
        victim.write_bytes(DAMAGES[how](rng, victim.read_bytes()))
        try:
            start_and_use(path)
        except KdirectError as e:
            # A number that is another node's, or a cluster that is another, is told of the whole
            # directory.
            where = victim.parent if victim.parent != path or "belongs to" in str(e) else victim
            if str(where) not in str(e) or not any(remedy in str(e) for remedy in REMEDIES):
                wrong.append(f"{name}: {type(e).__name__}: {e}")
        except Exception as e:
            wrong.append(f"{name}: {type(e).__name__}: {e}")
        shutil.rmtree(path)
    assert not wrong, "\n".join(wrong)
