"""The memory of GETs: nobody gets what another one can see; what nobody sees is used again."""

from __future__ import annotations

import itertools
import os
import random
import threading
import uuid
from pathlib import Path

import pytest

from kdirect import blocks
from kdirect.errors import RemoteStorageError
from tests.object_servers import directory_place

MIB = 1 << 20


def test_a_block_is_used_again_when_nobody_sees_it() -> None:
    first = blocks.take(MIB)
    where = first.address
    part = memoryview(first)[10:20].toreadonly()
    del first
    others = [blocks.take(MIB) for _ in range(40)]
    assert where not in {x.address for x in others}, "a part of it is still held"
    del part  # the others are still held: they would be given first
    assert blocks.take(MIB - 5).address == where


def test_bytes_are_put_where_they_fit() -> None:
    block = blocks.take(1024)
    block.put(0, b"0123456789")
    block.put(4, memoryview(b"xyz"))
    block.put(1024, b"")
    assert bytes(block)[:10] == b"0123xyz789"
    for position, data in ((-1, b"a"), (1024, b"a"), (0, bytes(1025)), (2**62, b"a")):
        with pytest.raises(ValueError, match="of 1024"):
            block.put(position, data)


def test_threads_and_a_child_have_their_own(seed: int) -> None:
    wrong: list[str] = []

    def use(number: int) -> None:
        chance = random.Random(seed + number)
        for _ in range(400):
            length = chance.randrange(1, 300_000)
            view = memoryview(blocks.take(length))[:length]
            view[:] = bytes([number]) * length
            part = view[chance.randrange(length) :]
            del view
            if bytes(part) != bytes([number]) * len(part):
                wrong.append(f"thread {number}")
        done.append(number)

    def is_right() -> bool:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not wrong and sorted(done) == list(range(6)) and bytes(held) == b"p" * MIB

    done: list[int] = []
    held = memoryview(blocks.take(MIB))
    held[:] = b"p" * MIB
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if is_right() else 1
        finally:
            os._exit(status)
    assert is_right()
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_directory_brings_stays_as_it_is(tmp_path: Path) -> None:
    store = directory_place(tmp_path).store()
    data = os.urandom(3 * MIB)
    store.put("a/b", len(data), [data])
    views = [store.get("a/b", at, 100_000) for at in range(0, len(data) - 100_000, 100_000)]
    with pytest.raises(RemoteStorageError, match="directory") as caught:
        store.get("a", 0, 5)
    assert "damaged" not in str(caught.value)
    assert all(bytes(view) == data[i * 100_000 : (i + 1) * 100_000] for i, view in enumerate(views))
    with pytest.raises(TypeError):
        views[0][0] = 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs here")
def test_objects_on_a_tmpfs_are_what_was_put_whatever_their_pages_are(seed: int) -> None:
    """The file is allocated before its bytes come."""
    chance = random.Random(seed)
    directory = Path("/dev/shm") / f"kdirect-test-{uuid.uuid4().hex}"
    directory.mkdir()
    try:
        store = directory_place(directory).store()
        for size in (0, 1, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB - 3):
            data = chance.randbytes(size)
            cuts = sorted(chance.randrange(size + 1) for _ in range(3))
            ends = [0, *cuts, size]
            chunks = [data[a:b] for a, b in itertools.pairwise(ends)]
            store.put(f"a/{size}", size, chunks)
            assert store.size(f"a/{size}") == size
            assert bytes(store.get(f"a/{size}", 0, size)) == data
            for _ in range(5):
                at = chance.randrange(size + 1)
                length = chance.randrange(size - at + 1)
                assert bytes(store.get(f"a/{size}", at, length)) == data[at : at + length]
    finally:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        directory.rmdir()
