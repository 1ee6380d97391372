"""What an executor keeps on its host from process to process: mapped state, and its last output.

This file maps memory and writes files.  Owns: the names of these files, and the rule that a header
counts only with what belongs to it: the output of a batch that is done is there, whole, and of that
batch.  What may not enter: what the state means (`kdirect.state.backend`).

Nothing here is synced: the memory directory need not outlive the host.  Files are replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from kdirect.errors import FormatError, StateDirectoryError, StateError, StateLimitError
from kdirect.state.arena import StateMemory
from kdirect.state.batches import Phase, Progress, StateHeader
from kdirect.state.header import read_header
from kdirect.state.locks import FileLock, holder_of
from kdirect.state.mapped import MappedDirectory, Owner
from kdirect.state.plan import Plan

_BATCH, _AFTER = b"kdirect.batch", b"kdirect.after"


LOCK_TIMEOUT_S = 5.0  # for a process that is about to end


class KeptState:
    """The files of one executor of a job.  One thread, one process at a time: a lock keeps a
    successor out while the process before it lives, also when that one is stopped."""

    def __init__(self, directory: Path, executor: int, executors: int, limit: int) -> None:
        self._path = directory / f"state-{executor}"
        self._output = directory / f"output-{executor}.arrow"
        self._limit = limit
        self._executor = executor
        self._executors = executors
        self._memory: StateMemory | None = None
        self._lock: FileLock | None = None
        self.header: StateHeader | None = None
        self._mapped = MappedDirectory(directory)
        self._let_go = self._mapped.close
        try:
            self._lock = _locked(directory / f"lock-{executor}", executor)
            self.header = self._found()
        except BaseException:
            self.close()
            raise

    def begin(self, *, fresh: bool) -> StateMemory:
        """The memory to go on with, or new memory where what was found is of no use."""
        if fresh:
            self._drop()
        if self._memory is None:
            self._memory = StateMemory.open(str(self._path), self._limit)
        return self._memory

    def keep_output(
        self, plan: Plan, batch: int, after: Progress, output: Sequence[pa.RecordBatch]
    ) -> None:
        """Keep the rows of a batch, in place of those of the one before.  StateLimitError where
        there is no room for both."""
        metadata = {_BATCH: str(batch), _AFTER: json.dumps(after.to_json())}
        schema = plan.output_schema.with_metadata(metadata)
        new = self._output.with_suffix(".new")
        try:
            with pa.OSFile(str(new), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                for rows in output:
                    writer.write_batch(rows.replace_schema_metadata(metadata))
            os.replace(new, self._output)
        except OSError as e:
            new.unlink(missing_ok=True)
            raise StateLimitError(
                f"{new}: the output of batch {batch} cannot be kept: {e}",
                hint="make room on this file system, name another place (option state_memory), or "
                "make batches smaller (option batch_records)",
            ) from e

    @contextlib.contextmanager
    def output(self, batch: int) -> Iterator[memoryview]:
        """The kept rows of `batch`, as an Arrow stream."""
        self._check_kept(batch)
        with open(self._output, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()
            mapped.close()

    def rows(self, batch: int) -> pa.RecordBatchReader:
        """The kept rows of `batch`, mapped for as long as any of them is held: what replaces or
        removes the file changes nothing of them."""
        self._check_kept(batch)
        return pa.ipc.open_stream(pa.memory_map(str(self._output)))

    def belong(self, owner: Owner) -> None:
        """Say whose files these are, where the coordinator has not, and remove those that no
        executor of the job has any more."""
        self._mapped.belong(owner)
        self._mapped.keep_only(self._executors)

    def end(self, *, forget: bool) -> None:
        """The job has ended for this process: what nobody can use any more goes at `close`; with
        `forget`, all does, once no other process of this host uses the directory."""
        self._let_go = self._mapped.remove if forget else self._mapped.leave

    def close(self) -> None:
        """Unmap, and let another process in; the files stay, unless `end` said otherwise."""
        self._unmap()
        if self._lock is not None:
            self._lock.close()
        self._let_go()

    def _unmap(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _drop(self) -> None:
        self._unmap()
        for path in (self._path, self._output):
            path.unlink(missing_ok=True)

    def _found(self) -> StateHeader | None:
        """What the files say, if it can be believed."""
        if not self._path.exists():
            return None
        try:
            self._memory = StateMemory.open(str(self._path), self._limit)
        except StateError:
            return None
        found = read_header(self._memory)
        if found is None:
            return None
        header = found[0]
        if header.phase is Phase.DONE and self._kept_output() != (header.batch, header.after):
            return None
        return header

    def _check_kept(self, batch: int) -> None:
        found = self._kept_output()
        if found is None or found[0] != batch:
            raise StateError(f"executor {self._executor} does not keep the output of batch {batch}")

    def _kept_output(self) -> tuple[int, Progress] | None:
        try:
            with pa.OSFile(str(self._output), "rb") as file:
                metadata = pa.ipc.open_stream(file).schema.metadata or {}
            return int(metadata[_BATCH]), Progress.from_json(json.loads(metadata[_AFTER]))
        except (OSError, KeyError, ValueError, pa.ArrowInvalid, FormatError):
            return None


def _locked(path: Path, executor: int) -> FileLock:
    """Hold the lock of an executor's files.  StateDirectoryError when another process does."""
    try:
        return FileLock(path, timeout_s=LOCK_TIMEOUT_S)
    except BlockingIOError:
        raise StateDirectoryError(
            f"{path.parent}: process {holder_of(path)} still holds the state of executor"
            f" {executor}",
            hint="end that process (it may be stopped), then run the job again",
        ) from None
