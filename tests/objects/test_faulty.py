"""The faulty store itself: each fault happens, as it is described, and a seed repeats a run."""

from __future__ import annotations

import gc
import random

import pytest

from kdirect.errors import (
    ObjectNotFoundError,
    RemoteStorageError,
    RemoteUnavailableError,
    UploadStoppedError,
)
from kdirect.objects import uploads
from tests.objects.faulty import Chances, FaultyHandler, VirtualClock, faulty_store

LARGE = bytes(range(256)) * (uploads.PART_BYTES // 128)


def test_without_faults_it_is_a_store() -> None:
    handler = FaultyHandler(1)
    store = faulty_store(handler)
    store.put("a/b", 5, [b"he", b"llo"])
    store.put("a/c", len(LARGE), [LARGE])
    assert handler.objects["sim/prefix/a/b"] == b"hello"
    assert bytes(store.get("a/b", 1, 3)) == b"ell"
    assert bytes(store.get_tail("a/c", len(LARGE), 10)) == LARGE[-10:]
    assert [(o.key, o.size) for o in store.list("a/")] == [("a/b", 5), ("a/c", len(LARGE))]
    assert next(store.list("a/")).modified_ms == 1_000_000_000
    assert store.size("a/b") == 5 and store.size("a/d") is None
    store.delete("a/b")
    store.delete("a/b")
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b", 0, 1)


def test_unavailable_does_nothing() -> None:
    handler = FaultyHandler(1, Chances(unavailable=1.0))
    store = faulty_store(handler)
    for call in (
        lambda: store.put("a", 1, [b"a"]),
        lambda: store.get("a", 0, 1),
        lambda: store.delete("a"),
        lambda: store.size("a"),
        lambda: list(store.list()),
    ):
        with pytest.raises(RemoteUnavailableError) as caught:
            call()
        assert caught.value.retriable
    assert not handler.objects and {o for _, _, o in handler.log} == {"unavailable"}


def test_a_lost_answer_comes_after_the_deed() -> None:
    handler = FaultyHandler(1, Chances(lost=1.0))
    store = faulty_store(handler)
    with pytest.raises(RemoteUnavailableError):
        store.put("a", 1, [b"a"])
    assert handler.objects == {"sim/prefix/a": b"a"}
    with pytest.raises(RemoteUnavailableError):
        store.delete("a")
    assert not handler.objects


@pytest.mark.parametrize("seed", range(5))
def test_half_an_upload_never_appears(seed: int) -> None:
    handler = FaultyHandler(seed, Chances(half=0.4))
    store = faulty_store(handler)
    whole = 0
    for i in range(20):
        try:
            store.put(f"{i}", len(LARGE), [LARGE])
            whole += 1
        except RemoteUnavailableError:
            pass
    gc.collect()
    assert 0 < whole < 20 and len(handler.objects) == whole
    assert all(data == LARGE for data in handler.objects.values())


def test_a_stopped_upload_never_appears() -> None:
    handler = FaultyHandler(1, Chances(silent=1.0))  # each request leaves a line
    store = faulty_store(handler)
    chunks = [LARGE[: uploads.PART_BYTES], LARGE[uploads.PART_BYTES :]]
    with pytest.raises(UploadStoppedError):
        store.put("a", len(LARGE), chunks, stop=lambda: len(handler.log) > 1)
    assert [verb for verb, _, _ in handler.log] == ["open", "write"]
    gc.collect()
    assert not handler.objects


def test_missing_and_silent() -> None:
    clock = VirtualClock()
    handler = FaultyHandler(1, clock=clock, silence_s=45.0)
    store = faulty_store(handler)
    store.put("a", 1, [b"a"])
    handler.chances = Chances(missing=1.0)
    with pytest.raises(ObjectNotFoundError):
        store.get("a", 0, 1)
    assert store.size("a") is None
    handler.chances = Chances(silent=1.0)
    before = clock.now_s
    assert bytes(store.get("a", 0, 1)) == b"a"
    assert clock.now_s == before + 45.0


def test_a_stale_listing_is_an_earlier_one() -> None:
    handler = FaultyHandler(3)
    store = faulty_store(handler)
    truth: list[list[str]] = [[]]
    for i in range(6):
        store.put(f"{i}", 1, [b"x"])
        truth.append(sorted(p.rpartition("/")[2] for p in handler.objects))
    store.delete("0")
    handler.chances = Chances(stale=1.0)
    seen = [[o.key for o in store.list()] for _ in range(20)]
    assert all(listing in truth for listing in seen)
    assert len({tuple(listing) for listing in seen}) > 1
    handler.chances = Chances()
    assert [o.key for o in store.list()] == ["1", "2", "3", "4", "5"]


def run(seed: int) -> tuple[list, dict]:
    handler = FaultyHandler(
        seed, Chances(unavailable=0.1, lost=0.1, half=0.1, missing=0.05, silent=0.1, stale=0.3)
    )
    store = faulty_store(handler)
    chance = random.Random(seed)
    for _ in range(100):
        key = f"k{chance.randrange(10)}"
        try:
            match chance.randrange(4):
                case 0:
                    store.put(key, 3, [b"abc"])
                case 1:
                    assert bytes(store.get(key, 0, 3)) == b"abc"
                case 2:
                    store.delete(key)
                case 3:
                    assert all(o.size == 3 for o in store.list())
        except RemoteStorageError:
            pass
    return handler.log, handler.objects


def test_a_seed_repeats_a_run() -> None:
    assert run(7) == run(7)
    assert run(7)[0] != run(8)[0]
    assert {o for seed in range(5) for _, _, o in run(seed)[0]} == {
        "done", "unavailable", "lost", "half", "missing", "silent", "stale",
    }  # fmt: skip
