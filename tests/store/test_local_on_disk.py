"""The store over a broker's files with the broker's own file functions: what a crash leaves, and
that brokers with and without a store open each other's directories."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdirect.log import checkpoint
from kdirect.store.contract import Committed, Create, Delete, Replace
from kdirect.store.local_files import (
    cluster_value,
    config_value,
    state_value,
    topic_value,
)
from tests.store.conftest import WAIT_S
from tests.store.test_local import BLOCK, CHANGE, ID, META, TOPICS_JSON, Local, everything

CLUSTER = cluster_value("eyKdwsUKTrqATPqz87vFBA")


class _Killed(BaseException):
    """The process ends here."""


class DyingOs:
    """The `os` of `kdirect.log.checkpoint`: dies before its call number `last`, and does nothing
    more after that."""

    def __init__(self, last: int) -> None:
        self.calls = 0
        self._last = last

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("open", "write", "fsync", "rename", "close"):
            return real

        def call(*args: Any) -> Any:
            if name != "close":
                self.calls += 1
                if self.calls >= self._last:
                    raise _Killed
            return real(*args)

        return call


@pytest.mark.parametrize(
    "operation",
    [
        CHANGE,
        Create("/config/topics/only", b"1"),
        Replace(BLOCK, b'{"block_end":"9999"}'),
        Create("/brokers/topics/n", topic_value(ID, 3, 7)),
    ],
    ids=lambda operation: operation.path,
)
def test_a_crash_at_any_call_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Any
) -> None:
    outcomes, last = [], 1
    while True:
        directory = tmp_path / str(last)
        directory.mkdir()
        (directory / "topics.json").write_text(TOPICS_JSON)
        (directory / "producer_ids").write_text("3000\n")
        (directory / "meta.properties").write_text(META)

        def nodes(local: Local) -> Any:
            block = json.loads(local.values(BLOCK)[0] or b"")
            return everything(local), block["block_end"]

        local = Local(directory, replace=checkpoint.replace_file)
        old = nodes(local)
        dying = DyingOs(last)
        monkeypatch.setattr(checkpoint, "os", dying)
        try:
            answer = local.commit(operation)
        except _Killed:
            answer = None
        monkeypatch.setattr(checkpoint, "os", os)
        found = nodes(Local(directory, replace=checkpoint.replace_file))
        if answer is not None:
            assert isinstance(answer, Committed)
            assert found == nodes(local) != old, "answered, so it is there"
            break
        outcomes.append(found == old)
        last += 1
    # open, write, fsync; rename; open, fsync of the directory
    assert outcomes == [True, True, True, True, False, False]


_WRITER = """
import sys
from pathlib import Path
from kdirect.log.checkpoint import replace_file
from kdirect.store.contract import Replace
from kdirect.store.local import LocalStore
store = LocalStore([Path(sys.argv[1])], 7, replace=replace_file)
store.start(lambda event: None)
number = int(sys.argv[2])
while True:
    number += 1
    value = b'{"version":1,"config":{"retention.ms":"%d"}}' % number
    store.commit([Replace("/config/topics/a", value)], lambda answer: None)
    print(number, flush=True)
"""


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "topics.json").write_text(TOPICS_JSON)
    chance, reached = random.Random(13), 0
    for _ in range(8):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(reached)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 40)):
                answered = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            said = process.stdout.read().splitlines()
        answered = int(said[-1]) if said else answered
        (value,) = Local(tmp_path).values("/config/topics/a")
        found = int(json.loads(value or b"")["config"]["retention.ms"])
        assert found in (answered, answered + 1)
        reached = found


def _registry(directory: Path) -> Any:
    from kdirect.broker.cluster_view import ClusterView
    from kdirect.broker.topics import Registry
    from kdirect.log.manager import LogManager
    from kdirect.wire.environment import SYSTEM

    logs = LogManager([directory], node_id=7)
    logs.open()
    view = ClusterView(7, cluster_id=lambda: logs.cluster_id, local_epoch=lambda tp: 0)
    registry = Registry(logs, view, SYSTEM)
    registry.open()
    return logs, registry


def test_a_broker_without_a_store_and_one_with_open_each_others_directories(
    tmp_path: Path,
) -> None:
    logs, registry = _registry(tmp_path)
    made = registry.create("a", 2, {"retention.ms": "60000"})
    registry.create("b", 1, {})
    first = registry.next_producer_id()
    logs.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*") if path.is_file()}

    local = Local(tmp_path, replace=checkpoint.replace_file)
    a_id = checkpoint.encode_id(made.topic_id)
    assert local.values("/brokers/topics/a", "/config/topics/a", "/cluster/id") == [
        topic_value(a_id, 2, 7),
        config_value({"retention.ms": "60000"}),
        cluster_value(logs.cluster_id),
    ]
    local.store.close()
    assert before == {p.name: p.read_bytes() for p in tmp_path.glob("*") if p.is_file()}

    local = Local(
        tmp_path, replace=checkpoint.replace_file, plain_config=lambda n, value: n != "later"
    )
    local.commit(
        Create("/brokers/topics/c", topic_value(ID, 3, 7)),
        Create("/config/topics/c", config_value({"later": "1", "retention.ms": "7"})),
        Replace("/brokers/topics/a/partitions/0/state", state_value(7, 4)),
        Delete("/config/topics/b"),
    )  # fmt: skip
    block = json.loads(local.values(BLOCK)[0] or b"")
    start = int(block["block_end"]) + 1
    taken = json.dumps({"version": 1, "block_end": str(start + 999)}).encode()
    assert isinstance(local.commit(Replace(BLOCK, taken)), Committed)
    local.store.close()

    logs, registry = _registry(tmp_path)
    assert {t.name: (t.partition_count, t.configs) for t in registry} == {
        "a": (2, {"retention.ms": "60000"}),
        "b": (1, {}),
        "c": (3, {"retention.ms": "7"}),
    }
    assert registry.get("a").topic_id == made.topic_id
    assert first < start + 1000 <= registry.next_producer_id()
    logs.close()


def test_a_directory_whose_cluster_the_store_made_is_opened(tmp_path: Path) -> None:
    local = Local(tmp_path, replace=checkpoint.replace_file)
    assert isinstance(local.commit(Create("/cluster/id", CLUSTER)), Committed)
    logs, _ = _registry(tmp_path)
    assert logs.cluster_id == "eyKdwsUKTrqATPqz87vFBA"
    logs.close()
