"""Keys whose hashes collide on purpose: in the index slot, in the tag, in both; and what else a
block of rows can do to a table at once."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from kdirect.state import NoWindow
from kdirect.state.arena import StateMemory
from kdirect.state.keys import KeyShape
from kdirect.state.table import Table
from tests.state.state_model import backend_of, cluster_of, exchange, plan_of, rows_of

SHAPE = KeyShape([("k", pa.int64())], nullable=False)
SCHEMA = [("time", "int64"), ("k", "int64"), ("x", "int64")]
WORD = 1 << 64
FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # of kd_mix in table_run.h


def key_of(hash_: int) -> int:
    """The int64 whose hash is `hash_`: the inverse of kd_mix."""
    word = hash_ ^ hash_ >> 32
    word = word * pow(SECOND, -1, WORD) % WORD
    word = (word ^ word >> 32) * pow(FIRST, -1, WORD) % WORD
    return word - WORD if word >> 63 else word


def hashes(kind: str) -> list[int]:
    """1,500 hashes.  Bits 0 to 39 choose the slot, 40 to 55 are the tag, 56 to 63 the virtual
    partition."""
    numbers = range(1500)
    if kind == "one slot":
        return [n << 40 | 0x1234 for n in numbers]
    if kind == "one slot and one tag":
        return [(n & 0xFF) << 56 | 0xABCD << 40 | n >> 8 << 30 | 6 for n in numbers]
    if kind == "the tag of empty slots":
        return [(n & 0xFF) << 56 | n >> 8 << 7 | n & 1 for n in numbers]
    assert kind == "one pair"
    return [n >> 1 << 40 | 0x1FE | n & 1 for n in numbers]


KINDS = ["one slot", "one slot and one tag", "the tag of empty slots", "one pair"]


@pytest.mark.parametrize("kind", KINDS)
def test_colliding_keys_keep_their_own_states(kind: str) -> None:
    wanted = hashes(kind)
    keys = np.array([key_of(h) for h in wanted])
    assert SHAPE.encode([pa.array(keys)]).hashes().tolist() == wanted
    assert len(set(keys.tolist())) == 1500 and (keys < 0).any()
    table = Table(StateMemory.anonymous(1 << 24), 1, 1)
    rng = np.random.default_rng(1)
    for _ in range(2):  # the second time in the memory and the index of the first
        model: dict[int, int] = {}
        # The first block makes the table grow in its midst, several times.
        for block in (rng.integers(0, 1500, 40_000), rng.permutation(1500)):
            found = table.find(SHAPE.encode([pa.array(keys[block])])).tolist()
            for key, position in zip(block.tolist(), found, strict=True):
                assert model.setdefault(key, position) == position
        assert len(table) == len(set(model.values())) == 1500
        table.clear()
    assert not table.scan().size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["slash", "uppar"])
def test_colliding_keys_through_updates_and_deltas(kind: str, mode: str) -> None:
    """A leader and a helper count and sum them as a dict does."""
    plan = plan_of(SCHEMA, ["k"], NoWindow(), ["count", ("sum", "x")])
    leader, helper = cluster_of(plan, 2, mode=mode, adaptive_ratio=0)
    keys = np.array([key_of(h) for h in hashes(kind)])
    rng = np.random.default_rng(2)
    model: dict[int, list[int]] = {}
    for backend in (leader, helper, helper):
        block, values = keys[rng.integers(0, 1500, 10_000)], rng.integers(-9, 9, 10_000)
        columns = {"k": pa.array(block), "x": pa.array(values)}
        backend.update(columns, len(block), time_us=np.zeros(len(block), np.int64))
        for key, value in zip(block.tolist(), values.tolist(), strict=True):
            cell = model.setdefault(key, [0, 0])
            cell[0] += 1
            cell[1] += value
    exchange([leader, helper])
    rows = [r for b in (leader, helper) for r in rows_of(b.trigger())]
    assert {r["k"]: [r["count"], r["sum(x)"]] for r in rows} == model and len(rows) == len(model)


def test_other_threads_run_during_an_update() -> None:
    """One call of update, of rows that make the table grow again and again."""
    backend = backend_of(
        plan_of(SCHEMA, ["k"], NoWindow(), ["count"]), memory=StateMemory.anonymous(1 << 29)
    )
    n = 3_000_000
    columns = {"k": pa.array(np.random.default_rng(1).permutation(n))}
    times = np.zeros(n, np.int64)
    progress, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            progress[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = progress[0]
    backend.update(columns, n, time_us=times)
    after = progress[0]
    done.set()
    thread.join()
    assert after - before > 1000
