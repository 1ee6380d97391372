"""The memory of state: blocks, limits, pages, and what another process makes of a mapped file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import ConfigError, StateError, StateLimitError
from kdirect.state import Tumbling
from kdirect.state.arena import Log, StateMemory
from kdirect.state.backend import Backend
from kdirect.state.batches import Phase
from kdirect.state.header import read_header
from tests.state.state_model import backend_of, page_memory, plan_of, rows_of, update

LIMIT = 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(12, 18), st.booleans()), max_size=60))
def test_blocks_never_overlap_and_the_last_freed_comes_first(steps: list) -> None:
    memory = StateMemory.anonymous(LIMIT)
    used: dict[int, int] = {}
    for log, free in steps:
        if free and used:
            position, freed = used.popitem()
            memory.release(position, freed)
            if freed == log:
                assert memory.allocate(log) == position
                used[position] = log
            continue
        try:
            position = memory.allocate(log)
        except StateLimitError:
            # Scattered blocks cannot be joined, so half of the limit may be out of reach; below a
            # quarter in use, a block of this size must be found.
            assert sum(1 << x for x in used.values()) + (1 << log) > LIMIT // 4 or len(used) > 2
            continue
        assert position >= 4096 and position + (1 << log) <= LIMIT
        for other, size in used.items():
            assert position + (1 << log) <= other or other + (1 << size) <= position
        used[position] = log
    assert memory.allocated == sum(1 << log for log in used.values())


def test_freed_blocks_of_other_sizes_are_joined_before_the_limit_is_met() -> None:
    memory = StateMemory.anonymous(LIMIT)
    small = [memory.allocate(12) for _ in range(200)]
    for position in small:
        memory.release(position, 12)
    assert memory.allocate(19) == 4096


def test_the_limit_names_itself_the_need_and_the_option() -> None:
    memory = StateMemory.anonymous(LIMIT)
    memory.allocate(19)
    with pytest.raises(StateLimitError, match=rf"{LIMIT} bytes.*{1 << 19}.*state_limit"):
        memory.allocate(19)
    memory.allocate(12)


def test_a_full_file_system_is_an_error_and_no_signal(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs takes root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this system does not let us mount a tmpfs")
    try:
        memory = StateMemory.open(tmp_path / "state", 1 << 24)
        with pytest.raises(StateLimitError, match="file system"):
            for _ in range(64):
                memory.allocate(20)
        memory.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_memory_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_limit"):
        StateMemory.anonymous(1000)


def test_a_log_keeps_what_was_appended_where_it_was() -> None:
    memory = StateMemory.anonymous(1 << 22)
    log = Log(memory)
    places = [(log.append(bytes([i % 256]) * (i % 90)), i) for i in range(5000)]
    view = memoryview(memory)
    for position, i in places:
        assert bytes(view[position : position + i % 90]) == bytes([i % 256]) * (i % 90)
        assert position % 8 == 0
    assert log.used == sum((i % 90 + 7) // 8 * 8 for i in range(5000))
    log.clear()
    assert memory.allocated == 0


def test_pages_are_registered_before_use_and_come_back() -> None:
    seen = []
    pages = page_memory(chunk_bytes=1 << 18, limit=1 << 19, on_chunk=lambda n, c: seen.append(n))
    plan = plan_of([("time", "int64"), ("k", "int64")], ["k"], Tumbling(size_us=10), ["count"])
    memory = StateMemory.anonymous(1 << 24)
    backend = Backend(plan, executor=0, executors=2, owners=[1] * 256, memory=memory, pages=pages,
                      adaptive_ratio=0)  # fmt: skip
    rows = [{"time": 0, "k": i} for i in range(12_000)]
    update(backend, rows)
    delta = backend.flush(1)
    assert seen == [0, 1] and delta.entries == 12_000
    assert all(p.length <= (1 << 16) - 32 and p.position % (1 << 16) == 0 for p in delta.pages)
    with pytest.raises(StateLimitError, match=r"fragment_limit"):
        update(backend, rows)
    backend.release(delta.pages)
    again = Backend(plan, executor=0, executors=2, owners=[1] * 256, pages=pages,
                    memory=StateMemory.anonymous(1 << 24), adaptive_ratio=0)  # fmt: skip
    update(again, rows)
    assert again.flush(1).entries == 12_000
    with pytest.raises(ValueError, match="no page"):
        pages.release(delta.pages[0].address + 8)


PLAN = plan_of(
    [("time", "int64"), ("k", "int64"), ("s", "string"), ("x", "float64")], ["k", "s"],
    Tumbling(size_us=100), ["count", ("avg", "x"), ("max", "k")],
)  # fmt: skip
ROWS = [{"time": i % 400, "k": i % 50, "s": "n" * (i % 9), "x": i / 7} for i in range(3000)]

CHILD = """
import os, signal, sys
from kdirect.state.arena import StateMemory
from kdirect.state.batches import Phase
from tests.state.state_model import backend_of, update
from tests.state.test_arena import PLAN, ROWS
backend = backend_of(PLAN, memory=StateMemory.open(sys.argv[1], 1 << 24))
backend.mark(Phase.DIRTY, attempt=1, batch=4)
update(backend, ROWS[:2000])
if sys.argv[2] == "clean":
    backend.mark(Phase.CLEAN, attempt=1, batch=4)
print("ready", flush=True)
signal.pause()
"""


def killed(path: Path, phase: str) -> None:
    """A process that fills the file and is killed with -9."""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path), phase], stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(root)}) as child:  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)


def attached(path: Path, **options: int) -> Backend:
    given = {"executor": 0, "executors": 1, "owners": [0] * 256, **options}
    return Backend.attach(
        PLAN, memory=StateMemory.open(path, 1 << 24), pages=page_memory(), **given
    )


def test_another_process_goes_on_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "state"
    killed(path, "clean")
    backend, fresh = attached(path), backend_of(PLAN)
    update(backend, ROWS[2000:])
    update(fresh, ROWS)
    assert sorted(map(repr, rows_of(backend.trigger(1000)))) == sorted(
        map(repr, rows_of(fresh.trigger(1000)))
    )


def test_a_file_does_not_grow_each_time_that_a_process_goes_on_with_it(tmp_path: Path) -> None:
    """What was free in it was used only when the limit, or the end of the file system, was met."""
    path, tops = tmp_path / "state", []
    backend = backend_of(PLAN, memory=StateMemory.open(path, 1 << 24))
    for batch in range(8):
        for window in (4 * batch, 4 * batch + 1):
            update(backend, [row | {"time": 100 * window} for row in ROWS])
            backend.trigger(100 * window)
        backend.mark(Phase.CLEAN, attempt=1, batch=batch)
        tops.append(backend.memory.top)
        backend.memory.close()
        backend = attached(path)
    assert len(set(tops[1:])) == 1


def test_a_full_file_system_is_met_only_when_nothing_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = StateMemory.anonymous(1 << 25)
    small = [memory.allocate(12) for _ in range(1023)]  # the file has memory up to here

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StateLimitError, match="has no room"):
        memory.allocate(16)
    for position in small[:32]:
        memory.release(position, 12)
    assert memory.allocate(16) == 4096


def test_a_batch_that_was_cut_off_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state"
    killed(path, "dirty")
    with pytest.raises(StateError, match="midst of batch 4"):
        attached(path)
    found = read_header(StateMemory.open(path, 1 << 24))
    assert found is not None and found[0].phase is Phase.DIRTY and found[0].attempt == 1


def test_the_state_of_others_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state"
    killed(path, "clean")
    with pytest.raises(StateError, match="another plan or executor"):
        attached(path, executors=2)
    with pytest.raises(StateError, match="holds no state"):
        attached(tmp_path / "new")


def test_bytes_of_a_file_are_not_trusted(tmp_path: Path) -> None:
    """Any one damaged byte of header or catalogue is noticed; lengths in the log are checked."""
    path = tmp_path / "state"
    killed(path, "clean")
    whole = path.read_bytes()
    found = read_header(StateMemory.open(path, 1 << 24))
    assert found is not None
    catalogue = found[1]["catalogue"]
    rng = np.random.default_rng(1)
    for at in [*rng.choice(128, 20, replace=False), *(catalogue + rng.choice(200, 20))]:
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        path.write_bytes(damaged)
        with pytest.raises(StateError):
            attached(path)
    segment = found[1]["tables"][0]["segments"][0][0]
    damaged = bytearray(whole)
    state_words = backend_of(PLAN).layout.words
    damaged[segment + 8 * state_words : segment + 8 * state_words + 8] = b"\xff" * 8
    path.write_bytes(damaged)
    with pytest.raises(StateError, match="damaged"):
        attached(path)
