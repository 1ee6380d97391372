"""The metadata store of a single broker: its own files, and no other process.

Owns: the tree in memory, and in the broker's log directories the files that `local_files` names:
what is at and below the nodes there is on disk before a commit is answered.  Everything else
(ephemeral nodes, who is controller, what has changed) is kept for the life of the process.

- **Directories stay what they are.**  A directory of a broker without a store is opened unchanged,
  nothing is written until something changes, and such a broker opens what was written.
- **All or nothing.**  A file is replaced whole, so a crash leaves it old or new.  A commit that
  would change two files is refused, for they cannot be replaced at one moment; so is a node that
  these files cannot keep (a replica on another broker), or whose loss they could not tell (a
  deleted block of producer ids, another id of the cluster).
- **A write that fails** leaves the old file, and the commit is refused.  If the disk does not even
  let it be put back, nobody knows what a crash would leave: the commit is `Unknown`, and the
  session ends with ``EXPIRED``.
- **Versions** count within the life of the store.  `first_change` is above all that came before,
  if `Node.created` must tell a broker's runs apart; the time in microseconds is.
- **Threads.**  None.  `deliver` carries out a call soon, one at a time and in order: a broker gives
  the `submit` of its one admin thread, on which its changes of topics run anyway, and files are
  written and answers given there.  Without `deliver` this is done by the thread that asks, before
  the call returns; what is asked from within an answer comes after it.

There is one session.  Nobody else writes the files: the lock of the log directories is held.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kdirect.errors import ConfigError, CorruptLogError, KdirectError
from kdirect.store import local_files as files
from kdirect.store.contract import (
    Changed,
    Check,
    ChildrenAnswer,
    CommitAnswer,
    Conflict,
    Event,
    MetadataStore,
    Operation,
    ReadAnswer,
    Reason,
    Refused,
    SessionState,
    Unknown,
    check_operations,
    check_path,
    check_process,
)
from kdirect.store.local_files import TopicNodes
from kdirect.store.own_files import IDS_FILE, TOPICS_FILE, next_id_text, read_file
from kdirect.store.tree import Touched, Tree, Watches

log = logging.getLogger("kdirect.store")

Deliver = Callable[[Callable[[], None]], object]
_SESSION = 1


class _BrokenDiskError(Exception):
    """A file is neither surely old nor surely new."""


class _OnCaller:
    """Carries out calls on the thread that makes one, one at a time and in order: what others ask
    meanwhile, and what is asked by the calls, is carried out by whoever is at it."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # for the two others; held for no call
        self._busy = False

    def __call__(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._calls.append(call)
            if self._busy:
                return
            self._busy = True
        while True:
            with self._lock:
                if not self._calls:
                    self._busy = False
                    return
                call = self._calls.popleft()
            call()


class LocalStore(MetadataStore):
    """The store of broker `node_id`, whose log directories exist.

    `replace(path, data)` puts `data` in place of a file, durably, and leaves the old or the new
    one whatever happens (`kdirect.log.checkpoint.replace_file`).  `epoch_of(topic, partition)`:
    leader epoch of a partition's log, for states that no file keeps.  `plain_config(name, value)`:
    do older brokers take this topic config?  One that they do not is hidden from them.
    """

    def __init__(
        self,
        log_dirs: Sequence[Path],
        node_id: int,
        *,
        replace: Callable[[Path, bytes], None],
        deliver: Deliver | None = None,
        epoch_of: files.EpochOf = lambda topic, partition: 0,
        plain_config: Callable[[str, str], bool] = lambda name, value: True,
        first_change: int = 0,
    ) -> None:
        self._log_dirs = list(log_dirs)
        self._node_id = node_id
        self._replace = replace
        self._deliver: Deliver = deliver if deliver is not None else _OnCaller()
        self._epoch_of = epoch_of
        self._plain_config = plain_config
        self._pid = os.getpid()
        self._on_event: Callable[[Event], None] = lambda event: None
        self._started = False
        self._ended: SessionState | None = None
        self._tree = Tree()
        self._tree.changes = first_change
        # What topics.json says, or would say if it were written now.
        self._topics: dict[str, TopicNodes] = {}
        self._topics_text = b""
        self._watches = Watches()

    # -- life --------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[Event], None]) -> None:
        check_process(self._pid)
        if self._started or self._ended is not None:
            raise ValueError("a store is started once, and not after it was closed")
        self._started = True
        self._on_event = on_event
        self._deliver(self._load)

    def close(self) -> None:
        if self._pid != os.getpid() or self._ended is not None:
            return
        self._ended = SessionState.CLOSED
        if self._started:
            self._deliver(lambda: self._tell(SessionState.CLOSED))

    def _load(self) -> None:
        if self._ended is not None:
            return
        try:
            for path, value in self._found():
                self._tree.plant(path, value)
        except KdirectError as e:
            self._refuse(e)
        except ValueError as e:
            path = str(self._log_dirs[0] / TOPICS_FILE)
            hint = "restore it, or remove its keys `nodes` and `absent`"
            self._refuse(CorruptLogError(f"{path} is damaged: {e}", hint=hint))
        else:
            self._tell(SessionState.CONNECTED)

    def _refuse(self, error: KdirectError) -> None:
        self._ended = SessionState.CLOSED
        self._tell(Refused(error))
        self._tell(SessionState.CLOSED)

    def _found(self) -> Iterator[tuple[str, bytes]]:
        """The nodes that the files stand for, parents first."""
        found = files.read_files(self._log_dirs)
        self._topics, self._topics_text = found.topics, files.topics_text(found.topics)
        for path in files.PARENTS:
            yield path, b""
        if found.cluster_id is not None:
            yield files.CLUSTER_ID, files.cluster_value(found.cluster_id)
        if found.next_id is not None:
            yield files.BLOCK, files.block_value(self._node_id, found.next_id)
        for name, kept in found.topics.items():
            nodes = dict(files.implied(name, kept.row, self._node_id, self._epoch_of))
            nodes |= kept.nodes
            for path in sorted(nodes.keys() - set(kept.absent)):
                yield path, nodes[path]

    def _tell(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            log.exception("what an event of the metadata store led to has failed")

    # -- requests ----------------------------------------------------------------------------------

    def read(
        self, paths: Sequence[str], done: Callable[[ReadAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]
        self._ask(lambda: self._watches.read(self._tree, _SESSION, wanted, watch=watch), done)

    def children(
        self, paths: Sequence[str], done: Callable[[ChildrenAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]
        self._ask(lambda: self._watches.children(self._tree, wanted, watch=watch), done)

    def commit(self, operations: Sequence[Operation], done: Callable[[CommitAnswer], None]) -> None:
        checked = check_operations(operations)

        def keep(touched: Touched) -> Conflict | None:
            return self._keep(touched, checked)

        def carry_out() -> CommitAnswer:
            try:
                answer, touched = self._tree.commit(checked, _SESSION, keep)
            except _BrokenDiskError as e:
                log.error("the metadata store ends: %s", e)
                self._ended = SessionState.EXPIRED
                return Unknown()
            self._tell_watchers(touched)
            return answer

        self._ask(carry_out, done)

    def _ask(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        check_process(self._pid)
        if not self._started and self._ended is None:
            raise ValueError("the store was not started")
        ended = self._ended is not None

        def answer() -> None:
            before = self._ended
            found: Any = Unknown(ended=ended)
            try:
                if before is None:
                    found = Unknown()
                    found = work()
            except Exception:
                log.exception("a request of the metadata store has failed")
            try:
                done(found)
            except Exception:
                log.exception("what an answer of the metadata store led to has failed")
            if before is None and self._ended is SessionState.EXPIRED:
                self._tell(SessionState.EXPIRED)

        self._deliver(answer)

    def _tell_watchers(self, touched: Touched) -> None:
        for path in self._watches.take(touched):
            self._tell(Changed(path))

    # -- files -------------------------------------------------------------------------------------

    def _keep(self, touched: Touched, operations: Sequence[Operation]) -> Conflict | None:
        """Write the one file that a commit concerns; why it cannot be kept, if it cannot."""
        topics = {name for path in touched.values if (name := files.topic_of(path)) is not None}
        others = touched.values & {files.BLOCK, files.CLUSTER_ID}
        if not topics and not others:
            return None
        try:
            if bool(topics) + len(others) > 1:
                raise ConfigError("it changes two files; make it two commits")
            if topics:
                self._keep_topics(topics)
            elif files.BLOCK in others:
                self._keep_block()
            else:
                self._keep_cluster_id()
            return None
        except ValueError as e:  # ConfigError, or text that is no Unicode
            detail = f"the files of a single broker cannot keep it: {e}"
        except OSError as e:
            detail = f"cannot write {e.filename}: {e.strerror}"
        except KdirectError as e:
            detail = str(e)
        index = next(
            place
            for place, operation in enumerate(operations)
            if not isinstance(operation, Check)
            and (operation.path in others or files.topic_of(operation.path) in topics)
        )
        return Conflict(index, Reason.REFUSED, detail)

    def _keep_topics(self, names: set[str]) -> None:
        topics = dict(self._topics)
        for name in sorted(names):
            there: dict[str, bytes] = {}
            for root in (files.TOPICS, files.CONFIGS, files.DELETIONS):
                there.update(self._persistent_below(f"{root}/{name}"))
            kept = files.kept_of_topic(
                name, there, self._node_id, self._epoch_of, self._plain_config
            )
            if kept == TopicNodes():
                topics.pop(name, None)
            else:
                topics[name] = kept
        text = files.topics_text(topics)
        if text != self._topics_text:
            self._write(self._log_dirs[0] / TOPICS_FILE, text)
        self._topics, self._topics_text = topics, text

    def _persistent_below(self, path: str) -> Iterator[tuple[str, bytes]]:
        """A node and all below it, but for ephemeral ones."""
        node = self._tree.get(path, _SESSION)
        if node is None or node.owned:
            return
        yield path, node.value
        for name in self._tree.children(path) or ():
            yield from self._persistent_below(f"{path}/{name}")

    def _keep_block(self) -> None:
        node = self._tree.get(files.BLOCK, _SESSION)
        if node is None or node.owned:
            raise ConfigError(f"without {files.BLOCK} producer ids would be given twice")
        text = next_id_text(files.read_block(node.value))
        self._write(self._log_dirs[0] / IDS_FILE, text)

    def _keep_cluster_id(self) -> None:
        """A crash in between leaves some directories with the id: it is the cluster's then."""
        node = self._tree.get(files.CLUSTER_ID, _SESSION)
        if node is None or node.owned:
            raise ConfigError(f"{files.CLUSTER_ID} stays")
        cluster_id = files.read_cluster_id(node.value)
        found = [files.read_meta(directory) for directory in self._log_dirs]
        if any(meta.get("cluster.id", cluster_id) != cluster_id for meta in found):
            raise ConfigError(f"{files.CLUSTER_ID} stays")
        for directory, meta in zip(self._log_dirs, found, strict=True):
            if "cluster.id" not in meta:
                text = files.meta_text(meta, cluster_id, self._node_id)
                self._write(directory / files.META_FILE, text)

    def _write(self, path: Path, data: bytes) -> None:
        """Replace a file; OSError if it is the old one, `_BrokenDiskError` if that is not sure."""
        before = read_file(path)
        try:
            self._replace(path, data)
            return
        except OSError as e:
            failed = OSError(e.errno, e.strerror, str(path))
        try:
            if read_file(path) != before:  # it was put in place, and is not surely there
                if before is None:
                    raise failed
                self._replace(path, before)
        except (OSError, KdirectError) as e:
            raise _BrokenDiskError(f"{path} may be old or new: {e}") from e
        raise failed
