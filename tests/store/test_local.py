"""The store over a single broker's files: what the files say, what they cannot keep, failing
disks."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kdirect.errors import ConfigError, CorruptLogError, LogError
from kdirect.store.contract import (
    Children,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Reason,
    Refused,
    Replace,
    SessionState,
    Unknown,
)
from kdirect.store.local import LocalStore
from kdirect.store.local_files import config_value, state_value, topic_value
from tests.store.conftest import WAIT_S, replace_plainly

CONNECTED, SUSPENDED, EXPIRED, CLOSED = SessionState
ID, OTHER_ID = "Jh_dXc6BTCuF0LZ3KAh5sw", "S62dXcqBTCuF0LZ3KAh5sw"
TOPICS_JSON = f"""{{
 "version": 1,
 "topics": {{
  "a": {{
   "id": "{ID}",
   "partitions": 2,
   "configs": {{
    "retention.ms": "1000"
   }}
  }},
  "b.c": {{
   "id": "{OTHER_ID}",
   "partitions": 1,
   "configs": {{}},
   "deleting": true
  }}
 }}
}}
"""
META = "#\ncluster.id=eyKdwsUKTrqATPqz87vFBA\ndirectory.id=x\nnode.id=7\nversion=1\n"
BLOCK = "/latest_producer_id_block"


class Local:
    """A store over a directory, and what it told."""

    def __init__(
        self, *directories: Path, replace: Callable[[Path, bytes], None] = replace_plainly,
        **options: Any,
    ) -> None:  # fmt: skip
        self.events: list[Any] = []
        self.store = LocalStore(list(directories), 7, replace=replace, **options)
        self.store.start(self.events.append)

    def _ask(self, request: Callable[[Callable[[Any], None]], None]) -> Any:
        answers: list[Any] = []
        request(answers.append)
        (answer,) = answers
        return answer

    def commit(self, *operations: Any) -> Any:
        return self._ask(lambda done: self.store.commit(operations, done))

    def values(self, *paths: str) -> list[bytes | None]:
        nodes = self._ask(lambda done: self.store.read(paths, done)).nodes
        return [None if node is None else node.value for node in nodes]

    def children(self, path: str) -> Any:
        return self._ask(lambda done: self.store.children([path], done)).names[0]

    def nodes(self, path: str) -> dict[str, bytes]:
        """All nodes below a path."""
        found: dict[str, bytes] = {}
        for name in self.children(path) or ():
            below = f"{path}/{name}"
            (value,) = self.values(below)
            assert value is not None
            found[below] = value
            found |= self.nodes(below)
        return found


def everything(local: Local) -> dict[str, bytes]:
    return local.nodes("/brokers/topics") | local.nodes("/config") | local.nodes("/admin")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log directory as a broker without a store leaves it."""
    (tmp_path / "topics.json").write_text(TOPICS_JSON)
    (tmp_path / "producer_ids").write_text("3000\n")
    (tmp_path / "meta.properties").write_text(META)
    return tmp_path


def _files(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in directory.iterdir()}


def test_the_files_of_a_broker_are_kafkas_nodes(directory: Path) -> None:
    before = _files(directory)
    local = Local(directory)
    assert json.loads(local.values("/brokers/topics/a")[0] or b"") == {
        "version": 3,
        "partitions": {"0": [7], "1": [7]},
        "adding_replicas": {},
        "removing_replicas": {},
        "topic_id": ID,
    }
    assert local.children("/brokers/topics/a/partitions") == ("0", "1")
    assert local.values("/brokers/topics/a/partitions/1/state") == [
        b'{"controller_epoch":0,"leader":7,"version":1,"leader_epoch":0,"isr":[7]}'
    ]
    assert local.values("/config/topics/a", "/config/topics/b.c") == [
        b'{"version":1,"config":{"retention.ms":"1000"}}',
        b'{"version":1,"config":{}}',
    ]
    assert local.children("/admin/delete_topics") == ("b.c",)
    assert local.values(BLOCK, "/cluster/id") == [
        b'{"version":1,"broker":7,"block_start":"2000","block_end":"2999"}',
        b'{"version":"1","id":"eyKdwsUKTrqATPqz87vFBA"}',
    ]
    local.commit(Create("/controller", ephemeral=True), Create("/controller_epoch", b"1"))
    local.store.close()
    assert _files(directory) == before, "nothing was changed, so nothing was written"


def test_changes_are_written_as_a_broker_without_a_store_would(directory: Path) -> None:
    local = Local(directory)
    assert isinstance(
        local.commit(
            Create("/brokers/topics/new", topic_value(ID, 1, 7)),
            Create("/brokers/topics/new/partitions"),
            Create("/brokers/topics/new/partitions/0"),
            Create("/brokers/topics/new/partitions/0/state", state_value(7, 0)),
            Create("/config/topics/new", config_value({"retention.ms": "5"})),
        ),
        Committed,
    )
    # Deleted as a controller does it: everything of the topic in one commit.
    gone = [*local.nodes("/brokers/topics/b.c"), "/brokers/topics/b.c"]
    gone += ["/config/topics/b.c", "/admin/delete_topics/b.c"]
    assert isinstance(local.commit(*map(Delete, sorted(gone, reverse=True))), Committed)
    rows = json.loads(TOPICS_JSON)
    del rows["topics"]["b.c"]
    rows["topics"]["new"] = {"id": ID, "partitions": 1, "configs": {"retention.ms": "5"}}
    assert (directory / "topics.json").read_text() == json.dumps(rows, indent=1) + "\n"
    block = b'{"version":1,"broker":7,"block_start":"3000","block_end":"3999"}'
    assert isinstance(local.commit(Replace(BLOCK, block, 0)), Committed)
    assert (directory / "producer_ids").read_text() == "4000\n"


def test_what_the_rows_do_not_say_is_kept_too(directory: Path) -> None:
    local = Local(directory, plain_config=lambda name, value: name == "retention.ms")
    state = "/brokers/topics/a/partitions/0/state"
    config = config_value({"retention.ms": "2", "later.option": "x"})
    local.commit(
        Replace(state, state_value(7, 5)), Replace("/config/topics/a", config),
        Delete("/brokers/topics/a/partitions/1/state"),
        Create("/config/topics/only", b"\xff no JSON"),
    )  # fmt: skip
    row = json.loads((directory / "topics.json").read_text())["topics"]["a"]
    assert row["configs"] == {"retention.ms": "2"}, "what an older broker would not know is apart"
    again = Local(directory, plain_config=lambda name, value: name == "retention.ms")
    assert everything(again) == everything(local)
    assert again.values(state, "/config/topics/a") == [state_value(7, 5), config]
    # An older broker drops the two keys: then there is what the rows imply.
    document = json.loads((directory / "topics.json").read_text())
    del document["nodes"], document["absent"]
    (directory / "topics.json").write_text(json.dumps(document))
    older = Local(directory, epoch_of=lambda topic, partition: 9)
    assert older.values(state) == [state_value(7, 9)]
    assert older.values("/config/topics/a") == [config_value({"retention.ms": "2"})]


@pytest.mark.parametrize("seed", range(5))
def test_random_changes_are_there_when_the_store_is_opened_again(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    local, reopened, happened = Local(tmp_path), 0, 0
    paths = []
    for name in ("t", "u"):
        topic = f"/brokers/topics/{name}"
        paths += [
            topic,
            f"{topic}/partitions",
            f"/config/topics/{name}",
            f"/config/topics/{name}/x",
        ]
        for number in range(2):
            below = f"{topic}/partitions/{number}"
            paths += [below, f"{below}/state", f"/admin/delete_topics/{name}"]
    for _ in range(400):
        path = chance.choice(paths)
        value = chance.choice(
            [b"", b"\xfe\xff", state_value(7, chance.randrange(3)), state_value(7, 0),
             config_value({"retention.ms": "1"}), config_value({})]
        )  # fmt: skip
        if path.count("/") == 3 and path.startswith("/brokers"):
            value = topic_value(ID, chance.choice((1, 2)), 7)
        operation: Any = chance.choice([Create(path, value), Replace(path, value), Delete(path)])
        answer = local.commit(operation)
        happened += isinstance(answer, Committed)
        if isinstance(answer, Committed) and chance.random() < 0.3:
            again = Local(tmp_path)
            assert everything(again) == everything(local)
            local, reopened = again, reopened + 1
    assert happened > 60
    assert reopened > 15


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ([Create("/brokers/topics/n", topic_value(ID, 2, 8))], "the only broker is 7"),
        ([Create("/brokers/topics/n", b"{}")], "no id of a topic"),
        ([Create("/brokers/topics/n", b"\xff")], "not JSON"),
        ([Create("/brokers/topics/n n", topic_value(ID, 1, 7))], "n n"),
        ([Replace("/config/topics/a", b'{"config":{"retention.ms":"\\ud800"}}')], "surrogates"),
        ([Delete(BLOCK)], "given twice"),
        ([Replace(BLOCK, b'{"block_end":"-7"}')], "not the last id of a block"),
        ([Replace("/cluster/id", b'{"version":"1","id":"another"}')], "/cluster/id stays"),
        ([Delete("/cluster/id")], "/cluster/id stays"),
        ([Replace(BLOCK, b'{"block_end":"1"}'), Replace("/config/topics/a", b"")], "two files"),
    ],
)  # fmt: skip
def test_what_the_files_cannot_keep_is_refused(
    directory: Path, operations: list[Any], said: str
) -> None:
    local = Local(directory)
    before, files = everything(local), _files(directory)
    answer = local.commit(Create("/memory"), *operations)
    assert isinstance(answer, Conflict)
    assert (answer.index, answer.reason) == (1, Reason.REFUSED)
    assert said in answer.detail
    assert everything(local) == before
    assert local.values("/memory") == [None]
    assert _files(directory) == files


def test_the_id_of_a_new_cluster_goes_into_every_log_directory(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    local = Local(one, two)
    assert local.values("/cluster/id") == [None]
    value = b'{"version":"1","id":"eyKdwsUKTrqATPqz87vFBA"}'
    assert local.commit(Create("/cluster/id", value)) == Committed((0,))
    for directory in (one, two):
        lines = (directory / "meta.properties").read_text().splitlines()
        assert {"cluster.id=eyKdwsUKTrqATPqz87vFBA", "node.id=7", "version=1"} < set(lines)
    (two / "meta.properties").unlink()  # as after a crash between the two
    assert Local(one, two).values("/cluster/id") == [value]
    assert Local(two, one).values("/cluster/id") == [value]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("topics.json", "{"),
        ("topics.json", '{"topics": {"a": {}}}'),
        ("topics.json", TOPICS_JSON.replace('"a"', '".."')),
        ("topics.json", TOPICS_JSON.replace('"partitions": 2', '"partitions": 1e99')),
        ("topics.json", TOPICS_JSON.replace(ID, ID[1:])),
        ("topics.json", '{"topics": {}, "nodes": {"/config/topics/a/b": ""}}'),
        ("topics.json", '{"topics": {}, "nodes": {"/elsewhere": ""}}'),
        ("topics.json", '{"topics": {}, "nodes": []}'),
        ("topics.json", TOPICS_JSON.replace('"1000"', '"\\ud800"')),
        ("producer_ids", "-1"),
        ("producer_ids", "x"),
        ("meta.properties", "no property"),
    ],
)
def test_a_damaged_file_is_told_with_its_name(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(text)
    local = Local(directory)
    refused, closed = local.events
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, CorruptLogError)
    assert str(directory / name) in str(refused.error)
    assert closed is CLOSED
    assert local.commit(Create("/a")) == Unknown(ended=True)


def test_directories_of_two_clusters_are_refused(directory: Path, tmp_path_factory: Any) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "meta.properties").write_text(META.replace("eyK", "xyK"))
    (refused, _) = Local(directory, other).events
    assert isinstance(refused.error, LogError)
    assert "of one cluster" in str(refused.error)


class Disk:
    """Fails as told: before or after the file was put in place; and then for good."""

    def __init__(self) -> None:
        self.fails: list[str] = []

    def __call__(self, path: Path, data: bytes) -> None:
        how = self.fails.pop(0) if self.fails else ""
        if how == "before":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        replace_plainly(path, data)
        if how == "after":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


CHANGE = Replace("/config/topics/a", config_value({"retention.ms": "9"}))


@pytest.mark.parametrize("fails", [["before"], ["after"]])
def test_a_write_that_failed_leaves_everything_as_it_was(directory: Path, fails: list[str]) -> None:
    disk = Disk()
    local = Local(directory, replace=disk)
    before, text = everything(local), (directory / "topics.json").read_bytes()
    disk.fails = fails
    answer = local.commit(CHANGE)
    assert isinstance(answer, Conflict)
    assert answer.reason is Reason.REFUSED
    assert "cannot write" in answer.detail
    assert "topics.json" in answer.detail
    assert everything(local) == before
    assert (directory / "topics.json").read_bytes() == text
    assert local.commit(CHANGE) == Committed((1,))
    assert local.events == [CONNECTED]


def test_a_disk_that_cannot_say_what_it_has_ends_the_session(directory: Path) -> None:
    disk = Disk()
    local = Local(directory, replace=disk)
    disk.fails = ["after", "before"]
    assert local.commit(CHANGE) == Unknown()
    assert local.events == [CONNECTED, EXPIRED]
    assert local.commit(CHANGE) == Unknown(ended=True)
    local.store.close()
    assert local.events == [CONNECTED, EXPIRED]


def test_work_and_answers_are_on_the_thread_that_is_given(directory: Path) -> None:
    threads = threading.active_count()
    Local(directory)
    assert threading.active_count() == threads, "no thread of its own"
    came: list[Any] = []

    def replace(path: Path, data: bytes) -> None:
        came.append(threading.current_thread().name)
        replace_plainly(path, data)

    answered = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="admin") as admin:
        store = LocalStore([directory], 7, replace=replace, deliver=admin.submit)
        store.start(came.append)
        store.commit([CHANGE], lambda answer: came.append(threading.current_thread().name))
        store.read([], lambda answer: answered.set())
        assert answered.wait(WAIT_S)
        store.close()
    assert came == [CONNECTED, "admin_0", "admin_0", CLOSED]


def test_what_is_asked_from_an_answer_comes_after_it(directory: Path) -> None:
    local = Local(directory)
    came: list[Any] = []

    def first(answer: Any) -> None:
        local.store.read(["/none"], lambda answer: came.append(answer))
        came.append("first")

    local.store.read([], first)
    assert came == ["first", Found((None,))]
    local.store.children(["/cluster"], lambda answer: came.append(answer))
    assert came[-1] == Children((("id",),))


def test_requests_of_many_threads_are_carried_out_one_at_a_time(tmp_path: Path) -> None:
    local = Local(tmp_path)
    local.commit(Create("/n", b"0"))
    inside: list[int] = []
    answers: list[Any] = []

    def done(answer: Any) -> None:
        inside.append(1)
        assert len(inside) == 1
        answers.append(answer)
        inside.pop()

    def ask() -> None:
        for _ in range(200):
            local.store.commit([Replace("/n", b"1")], done)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    local.values("/n")
    assert [answer.versions[0] for answer in answers] == list(range(1, 1601))


def test_a_child_process_cannot_write_its_parents_files(directory: Path) -> None:
    local = Local(directory)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            local.commit(CHANGE)
        except ConfigError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
