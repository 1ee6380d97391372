"""Tables: find or insert, growth, clearing and recycling, against a dict."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdirect.errors import StateLimitError
from kdirect.state.arena import StateMemory
from kdirect.state.keys import KeyShape, gather
from kdirect.state.table import Table

SHAPE = KeyShape([("k", pa.int64())], nullable=False)


def find(table: Table, keys: Any, rows: Any = None) -> np.ndarray:
    return table.find(SHAPE.encode([pa.array(keys, pa.int64())]), rows)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(-40, 40), max_size=60)), max_size=8))
def test_positions_are_those_of_a_dict(steps: list) -> None:
    memory = StateMemory.anonymous(1 << 22)
    table, model = Table(memory, 1, 1), {}
    for clear, keys in steps:
        if clear:
            table.clear()
            model = {}
        for key, position in zip(keys, find(table, keys).tolist(), strict=True):
            assert model.setdefault(key, position) == position
        assert len(table) == len(model) and table.scan().tolist() == list(model.values())


@pytest.mark.parametrize("spread", [1, 1 << 20, 1 << 40])
def test_tables_grow_and_keep_every_key(spread: int) -> None:
    memory = StateMemory.anonymous(1 << 28)
    table = Table(memory, 1, 2, initial=b"\x07" + bytes(15))
    rng = np.random.default_rng(spread)
    keys = rng.integers(0, 300_000, 500_000) * spread
    first = np.concatenate([find(table, part) for part in np.array_split(keys, 9)])
    unique, at = np.unique(keys, return_index=True)
    assert len(table) == len(unique)
    assert (find(table, keys) == first).all()
    scanned = table.scan()
    assert set(scanned.tolist()) == set(first[at].tolist())
    assert (gather(memory.address, scanned, 0) == 7).all()
    assert (gather(memory.address, first, 2).view(np.int64) == keys).all()


def test_some_rows_of_a_block() -> None:
    memory = StateMemory.anonymous(1 << 22)
    table = Table(memory, 1, 1)
    keys = SHAPE.encode([pa.array([5, 6, 5, 7])])
    a, b, c, d = table.find(keys).tolist()
    assert a == c and len({a, b, d}) == 3
    assert table.find(keys, np.array([3, 0], np.uint32)).tolist() == [d, a]
    with pytest.raises(IndexError):
        table.find(keys, np.array([4], np.uint32))
    with pytest.raises(ValueError, match="another shape"):  # its keys have a bucket before them
        Table(memory, 1, 1, prefix=1).find(keys)


def test_dropped_tables_are_recycled_while_they_are_warm() -> None:
    memory = StateMemory.anonymous(1 << 26)
    keys = np.arange(100_000)
    tops = []
    for _ in range(4):
        table = Table(memory, 1, 1)
        find(table, keys)
        tops.append(memory.top)
        table.drop()
        assert memory.allocated == 0
    assert len(set(tops)) == 1


def test_a_table_at_its_limit_says_so_and_stays_whole() -> None:
    memory = StateMemory.anonymous(1 << 20)
    table = Table(memory, 1, 1)
    with pytest.raises(StateLimitError):
        for begin in range(0, 1 << 20, 1000):
            find(table, np.arange(begin, begin + 1000))
    n = len(table)
    assert n > 1000 and len(set(table.scan().tolist())) == n


def test_other_threads_run_while_keys_are_found() -> None:
    """A thread makes progress during one call of find: the GIL is not held."""
    memory = StateMemory.anonymous(1 << 29)
    table = Table(memory, 1, 1)
    keys = SHAPE.encode([pa.array(np.random.default_rng(1).permutation(3_000_000))])
    find(table, np.arange(10))
    inside, progress, done = threading.Event(), [0], threading.Event()

    def count() -> None:
        inside.wait()
        while not done.is_set():
            progress[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    inside.set()
    before = progress[0]
    table.find(keys)
    after = progress[0]
    done.set()
    thread.join()
    assert after - before > 1000
