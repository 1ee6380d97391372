"""Writes one object: whole, or not at all.

Owns: how chunks become the writes of a store, what happens to an upload that is not finished, and
the temporary names beside files.

pyarrow ends a stream that is dropped as if it had been closed, and what was written so far would
appear as the object.  There is no call to abort it.  So a stream whose upload is given up is kept
for ever (`_never_close`), as if this process had been killed: the store drops what it has of it, or
a rule of the bucket does (docs/object-stores.md).  At S3 such a stream holds next to nothing,
because parts are handed over whole; at Google Cloud Storage some 0.3 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kdirect import blocks
from kdirect.errors import RemoteStorageError, UploadStoppedError
from kdirect.huge_pages import allocate_huge

# What pyarrow sends as one part.  What is smaller is a single PUT.
PART_BYTES = 10 << 20
PARTIAL = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.partial$")
# Nobody uploads for that long: the process that wrote it is gone.
STALE_PARTIAL_S = 24 * 3600

Chunks = Iterable[Any]
Stop = Callable[[], bool]


def pieces(chunks: Chunks, size: int, stop: Stop, what: str) -> Iterator[memoryview]:
    """The chunks as bytes.  `stop` is asked before each and at the end; RemoteStorageError when
    there are more or fewer bytes than `size`."""
    seen = 0
    for chunk in chunks:
        _check(stop, what)
        view = memoryview(chunk).cast("B")
        seen += len(view)
        if seen > size:
            raise RemoteStorageError(f"{what}: more than the {size} bytes that were announced")
        yield view
    if seen != size:
        raise RemoteStorageError(f"{what}: {seen} of the {size} bytes that were announced came")
    _check(stop, what)


def parts(chunks: Iterator[memoryview], size: int, stop: Stop, what: str) -> Iterator[memoryview]:
    """The `size` bytes of `chunks` in pieces of PART_BYTES, the last one shorter.  A piece is valid
    until the next one is asked for.  `stop` is asked in the middle of a chunk, too."""
    at = 0  # of all bytes
    gathered: blocks.Block | None = None
    for view in chunks:
        while len(view):
            begun = at % PART_BYTES
            if not begun and len(view) >= PART_BYTES:
                at += PART_BYTES
                yield view[:PART_BYTES]
                view = view[PART_BYTES:]
                if len(view):
                    _check(stop, what)
                continue
            length = min(PART_BYTES, size - at + begun)  # of this piece
            if gathered is None:
                gathered = blocks.take(length)
            taken = view[: length - begun]
            gathered.put(begun, taken)
            at += len(taken)
            view = view[len(taken) :]
            if at % PART_BYTES == 0:
                yield memoryview(gathered)[:length]
                gathered = None
    if gathered is not None:
        yield memoryview(gathered)[: at % PART_BYTES]


def _check(stop: Stop, what: str) -> None:
    if stop():
        raise UploadStoppedError(f"{what}: stopped before it was whole; no object appeared")


def to_stream(filesystem: Any, path: str, pieces: Iterator[memoryview], small: bool) -> None:
    """Where an object appears when its stream is closed: S3, Google Cloud Storage, Azure.  `small`:
    all of it is here before a stream is opened."""
    if small:
        pieces = iter(list(pieces))  # one piece, or none
    stream = filesystem.open_output_stream(path, compression=None)
    try:
        for piece in pieces:
            stream.write(piece)
        stream.close()
    except BaseException:
        if not stream.closed:
            _never_close(stream)
        raise


def to_renamed(filesystem: Any, path: str, pieces: Iterator[memoryview]) -> None:
    """Where a file is seen while it is written, and a rename is one step: HDFS."""
    partial = partial_name(path)
    filesystem.create_dir(path.rpartition("/")[0], recursive=True)
    try:
        with filesystem.open_output_stream(partial, compression=None) as stream:
            for piece in pieces:
                stream.write(piece)
        filesystem.move(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.delete_file(partial)
        raise


def to_file(path: str, pieces: Iterator[memoryview], size: int) -> None:
    """A file of this host, of `size` bytes: on disk with its name when this returns."""
    partial = partial_name(path)
    folder = os.path.dirname(path)
    _make_folder(folder)
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            allocate_huge(fd, size)  # where it gives no pages, the writes do
            for piece in pieces:
                view = piece
                while len(view):
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    _sync_folder(folder)


def partial_name(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(8)}.partial"


def is_partial(path: str) -> bool:
    return PARTIAL.search(path) is not None


def remove_if_stale(filesystem: Any, info: Any) -> None:
    """Remove what a killed process left of a file, when it is old enough to be sure."""
    modified = info.mtime_ns
    if modified is not None and time.time() - modified / 1e9 > STALE_PARTIAL_S:
        with contextlib.suppress(OSError):
            filesystem.delete_file(info.path)


def _make_folder(folder: str) -> None:
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        _sync_folder(os.path.dirname(path))


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _never_close(stream: Any) -> None:
    """A reference that nobody gives back, not even the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))
