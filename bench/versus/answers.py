"""The same requests to Apache Kafka and to kdirect, and their answers compared field by field.

    make versus-kafka            (writes the table of differences into docs/broker.md)
    .venv/bin/python bench/versus/answers.py --check        (changes nothing, compares the table)

Every API that both brokers advertise is called, in every version that both speak, with the calls of
`versus.answer_calls*`; the run fails for one that has no calls.  What differs has a reason in
`versus.answer_reasons`, or the run fails; so it does in a full run for a reason that nothing needs
any more.  What no two brokers have in common (ids that are drawn, addresses, times, the words of a
message) is compared by its kind only.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # where PYTHONSAFEPATH keeps it out
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from versus import systems
from versus.answer_calls import Call, Told
from versus.answer_calls_admin import CALLS
from versus.answer_reasons import REASONS, Reason

from kdirect.errors import ProtocolError
from kdirect.format import protocol as p
from kdirect.format.schema import build

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "broker.md"
BEGIN, END = "<!-- differences: make versus-kafka -->", "<!-- end of differences -->"
TIMEOUT_S = 15
WARM_UP_S = 60
ABSENT = "absent"
CLOSED = {"the connection": "closed"}
# A small Kafka, whose topics appear only by CreateTopics, as ours; and which does not delete the
# test's records, which are years old, in the middle of a run.
KAFKA = {
    "auto.create.topics.enable": "false",
    "log.segment.bytes": "67108864",
    "log.initial.task.delay.ms": "3600000",
}
KDIRECT = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "log.segment.bytes": "67108864",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "node.id": "1",
    "num.io.threads": "8",
    "num.network.threads": "3",
}
SMALL_JVM = ["-Xms256m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]

# The words, ids and times that are compared by their kind.
_TEXTS = {"error_message", "message", "cluster_id", "host", "documentation", "log_dir"}
_TEXTS |= {"member_id", "leader", "value_of_a_directory"}
_NUMBERS = {"port", "producer_id", "total_bytes", "usable_bytes", "partition_size"}
_NUMBERS |= {"log_append_time_ms", "last_caught_up_timestamp", "last_fetch_timestamp"}
_NUMBERS |= {"transaction_start_time_ms"}
_NUMBERS |= {"high_watermark_of_the_quorum", "finalized_features_epoch", "leader_epoch"}
_LEFT_OUT = {"throttle_time_ms"}
# What tells the elements of a list apart, so that their order does not matter.
_KEYS = (
    ("api_key",),
    ("resource_type", "resource_name"),
    ("topic_name",),
    ("topic",),
    ("name",),
    ("feature",),
    ("group_id",),
    ("transactional_id",),
    ("partition_index",),
    ("partition_id",),
    ("partition",),
    ("index",),
    ("node_id",),
    ("broker_id",),
    ("replica_id",),
    ("user",),
    ("key",),
)
_NAMED = ("api_keys", "configs", "supported_features", "finalized_features")


class Difference(NamedTuple):
    """Where the answers to one call differ, and in which versions."""

    api: str
    case: str
    path: str
    kafka: str
    kdirect: str
    versions: tuple[int, ...]


class Asker:
    """Calls of one broker, each on a connection that the one before has left open, if it has."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = (host, int(port))
        self._socket: socket.socket | None = None
        self.number = 0
        self.told: Told = {}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, call: Call, version: int) -> dict[str, Any]:
        """The answer as plain values; CLOSED if there is none."""
        api = p.API_NAMES[call.api]
        message = build(api.request, **_filled(call.fields, version, self.told))
        self.number += 1
        frame = p.encode_request(message, version, self.number, "answers")
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, TIMEOUT_S)
            self._socket.sendall(frame)
            size = struct.unpack(">i", self._exactly(4))[0]
            _, answer = p.decode_by_schema(api.key, version, self._exactly(size))
        except OSError:
            self.close()
            return CLOSED
        except ProtocolError as e:
            return {"an answer that cannot be read": str(e)}
        if call.keep is not None:
            call.keep(answer, self.told)
        found: dict[str, Any] = answer.to_dict(json=False)  # bytes as they came
        return found

    def _exactly(self, n: int) -> bytes:
        assert self._socket is not None
        out = b""
        while len(out) < n:
            piece = self._socket.recv(n - len(out))
            if not piece:
                raise ConnectionError("closed")
            out += piece
        return out

    def versions(self) -> dict[str, range]:
        """The APIs that it advertises, by name."""
        answer = self.ask(Call("ApiVersions", "", {}), 0)
        return {
            p.APIS[a["api_key"]].name: range(a["min_version"], a["max_version"] + 1)
            for a in answer["api_keys"]
            if a["api_key"] in p.APIS
        }


def _filled(value: Any, version: int, told: Told) -> Any:
    """The fields of a call, for one version."""
    if callable(value):
        return value(told)
    if isinstance(value, str) and "{v" in value:
        later = {f"v{n}": version + n for n in (1, 2)}
        return value.format(v=version, **later)
    if isinstance(value, Mapping):
        return {k: _filled(v, version, told) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(v, version, told) for v in value]
    return value


# -- comparing -------------------------------------------------------------------------------------
def plain(value: Any, name: str = "") -> Any:
    """`value` with what differs between any two brokers replaced by its kind."""
    if isinstance(value, Mapping):
        return {k: plain(v, k) for k, v in value.items() if k not in _LEFT_OUT}
    if name == "records" and value is not None:
        return f"{len(value)} bytes"
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if name == "topic_id" and value is not None:
        return "an id"
    if name in _TEXTS and isinstance(value, str):
        return "text" if value else ""
    if name in _NUMBERS and isinstance(value, int) and not isinstance(value, bool):
        return "a number" if value >= 0 else value
    return value


def compare(kafka: Any, ours: Any, path: str = "") -> Iterable[tuple[str, str, str]]:
    """(path, Kafka's value, ours) of each leaf that differs."""
    if isinstance(kafka, dict) and isinstance(ours, dict):
        for name in sorted(kafka.keys() | ours.keys(), key=str):
            inner = f"{path}.{name}" if path else str(name)
            yield from compare(kafka.get(name, ABSENT), ours.get(name, ABSENT), inner)
    elif isinstance(kafka, list) and isinstance(ours, list):
        yield from _compare_lists(kafka, ours, path)
    elif kafka != ours:
        yield path, _shown(kafka), _shown(ours)


def _compare_lists(kafka: list[Any], ours: list[Any], path: str) -> Iterable[tuple[str, str, str]]:
    rows = [x for x in (*kafka, *ours) if isinstance(x, dict)]
    if not rows:
        if kafka != ours:
            yield f"{path}[]", _shown(kafka), _shown(ours)
        return
    theirs, mine = _by_key(kafka), _by_key(ours)
    named = path.rpartition(".")[2] in _NAMED
    for key in sorted(theirs.keys() | mine.keys(), key=str):
        inner = f"{path}[{key[0][-1]}]" if named else f"{path}[]"
        yield from compare(theirs.get(key, ABSENT), mine.get(key, ABSENT), inner)


def _by_key(rows: list[Any]) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for row in rows:
        names = next((k for k in _KEYS if all(row.get(n) is not None for n in k)), ())
        value = tuple(row[n] for n in names)
        times = sum(k[0] == value for k in out)
        out[value, times] = row
    return out


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "there"
    text = repr(value) if isinstance(value, str) and value not in (ABSENT, "text") else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def differences(kafka: Asker, ours: Asker, calls: Iterable[Call] = CALLS) -> list[Difference]:
    """Every difference between the two brokers, by call; equal ones of several versions are one."""
    theirs, mine = kafka.versions(), ours.versions()
    found: dict[tuple[str, ...], list[int]] = {}
    for call in calls:
        if call.api not in theirs or call.api not in mine:
            continue
        both = range(
            max(theirs[call.api].start, mine[call.api].start, call.low),
            min(theirs[call.api].stop, mine[call.api].stop, call.high + 1),
        )
        time.sleep(call.after_s)
        for version in both:
            answers = [plain(asker.ask(call, version)) for asker in (kafka, ours)]
            for path, *values in compare(*answers):
                found.setdefault((call.api, call.case, path, *values), []).append(version)
    return [Difference(*key, tuple(versions)) for key, versions in found.items()]  # type: ignore


def explained(
    found: Iterable[Difference],
) -> tuple[dict[Reason, list[Difference]], list[Difference]]:
    """Differences by their reason, and those without one."""
    by_reason: dict[Reason, list[Difference]] = {}
    without = []
    for one in found:
        reason = next((r for r in REASONS if r.covers(*one[:5])), None)
        if reason is None:
            without.append(one)
        else:
            by_reason.setdefault(reason, []).append(one)
    return by_reason, without


def uncalled(kafka: Asker, ours: Asker, calls: Iterable[Call] = CALLS) -> list[str]:
    """The APIs of both brokers that no call asks."""
    return sorted((kafka.versions().keys() & ours.versions().keys()) - {c.api for c in calls})


# -- the table -------------------------------------------------------------------------------------
def table(by_reason: Mapping[Reason, list[Difference]]) -> str:
    """The differences in Markdown, a row for each reason, in the order of the reasons."""
    rows = ["| API | where | Kafka | here | why |", "|---|---|---|---|---|"]
    for reason in REASONS:
        these = by_reason.get(reason)
        if not these:
            continue
        apis = ", ".join(dict.fromkeys(d.api for d in these))
        values = [{d.kafka for d in these}, {d.kdirect for d in these}]
        if reason.varies:
            values = [{"a number" if x.isdigit() else x for x in v} for v in values]
        shown = [v.pop() if len(v) == 1 else "various" for v in values]
        shown = ["a directory" if "/" in v else v for v in shown]  # another one in each run
        cells = [apis, reason.where, *shown, reason.why]
        rows.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(dict.fromkeys(rows))  # several reasons may have the same row


def missing(text: str) -> list[str]:
    """The rows of the table that docs/broker.md does not have."""
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    kept = set(rest.partition(END)[0].splitlines())
    return [row for row in text.splitlines() if row not in kept]


def write(text: str) -> None:
    """Put the table between its marks in docs/broker.md."""
    whole = DOCUMENT.read_text()
    before, _, rest = whole.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


# -- running ---------------------------------------------------------------------------------------
def run(stack: ExitStack, calls: Iterable[Call] = CALLS) -> tuple[list[Difference], int, list[str]]:
    """Start both brokers, ask them, stop them with `stack`: the differences, how many calls each
    has answered, and the APIs that were not called."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(dir=systems.tmpfs()))
    ours = systems.Kdirect(directory, **KDIRECT)
    stack.callback(ours.stop)
    kafka = systems.Kafka(directory, KAFKA, jvm=SMALL_JVM)
    stack.callback(kafka.stop)
    askers = [Asker(kafka.address), Asker(ours.address)]
    for asker in askers:
        stack.callback(asker.close)
        _warm_up(asker)
    return differences(*askers, calls), askers[0].number, uncalled(*askers, calls)


def _warm_up(asker: Asker) -> None:
    """Wait until the broker has what its first groups and producers make: Kafka answers them with
    errors until then."""
    finding = {"key": "warm", "key_type": 0, "coordinator_keys": ["warm"]}
    for call, version in (
        (Call("FindCoordinator", "", finding), 3),
        (Call("OffsetFetch", "", {"group_id": "warm", "topics": None, "groups": []}), 5),
        (Call("InitProducerId", "", {"transactional_id": None, "transaction_timeout_ms": 1}), 3),
        (Call("FindCoordinator", "", {**finding, "key_type": 1}), 3),
        (Call("InitProducerId", "", {"transactional_id": "warm", "transaction_timeout_ms": 1}), 3),
    ):
        deadline = time.monotonic() + WARM_UP_S
        while asker.ask(call, version).get("error_code") != 0:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer to {call.api}")
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--idle-reasons", action="store_true", help="reasons that nothing needs are no failure"
    )
    given = parser.parse_args()
    with ExitStack() as stack:
        found, calls, left = run(stack)
    by_reason, without = explained(found)
    for d in without:
        versions = f"{d.versions[0]}-{d.versions[-1]}"
        print(f"{d.api} {versions} ({d.case}): {d.path}: Kafka {d.kafka}, here {d.kdirect}")
    unused = [r for r in REASONS if r not in by_reason]
    for reason in unused:
        print(f"a reason that nothing needs: {reason.api} {reason.case} {reason.path}")
    for api in left:
        print(f"{api} is an API of both, and nothing calls it: add calls to answer_calls*.py")
    if without or left or (unused and not given.idle_reasons):
        return 1
    if not given.check:
        write(table(by_reason))
    elif rows := missing(table(by_reason)):
        print("\n".join(rows))
        print(f"{DOCUMENT.name} does not have these rows: run make versus-kafka")
        return 1
    count = sum(map(len, by_reason.values()))
    print(f"answers: {calls} calls, {count} differences, each with a reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
