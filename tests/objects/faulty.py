"""An object store in memory that fails as real ones do, by a seed and in virtual time.

Owns: `FaultyHandler`, which pyarrow's `PyFileSystem` takes, so that the `ObjectStore` that is
tested is the real one.  What it inflicts, each with a probability of its own (`Chances`):

==============  ===================================================================================
`unavailable`   503: nothing is done
`lost`          the request is carried out and its answer lost
`half`          an upload breaks in the middle: nothing appears
`missing`       404 for an object that is there
`silent`        nothing happens for `silence_s` of the clock that is passed in, then it goes on
`stale`         a listing is that of an earlier moment
==============  ===================================================================================

An object appears when its stream is closed, whole.  Nothing else may enter: no thread, no real
clock, no chance but that of the seed.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import fs

from kdirect.objects import ObjectStore

BUCKET = "sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """Of each fault, for each request."""

    unavailable: float = 0.0
    lost: float = 0.0
    half: float = 0.0
    missing: float = 0.0
    silent: float = 0.0
    stale: float = 0.0


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FaultyHandler(fs.FileSystemHandler):
    """`objects`: the bytes of each path, as they are.  `log`: every request and what became of it,
    so that two runs of one seed can be compared.  `chances` may be set at any time.  `upload`: the
    class of streams."""

    upload: type[Upload]

    def __init__(
        self,
        seed: int,
        chances: Chances | None = None,
        *,
        clock: VirtualClock | None = None,
        silence_s: float = 30.0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.modified_s: dict[str, float] = {}
        self.chances = chances or Chances()
        self.clock = clock or VirtualClock()
        self.log: list[tuple[str, str, str]] = []
        self._sleep = sleep or self.clock.sleep
        self.silence_s = silence_s
        self._random = random.Random(seed)
        self._before: list[list[tuple[str, int, float]]] = []

    # -- faults ------------------------------------------------------------------------------------
    def draw(self, chance: float) -> bool:
        return self._random.random() < chance

    def request(self, verb: str, path: str) -> None:
        """Before a request is carried out."""
        if self.draw(self.chances.silent):
            self.note(verb, path, "silent")
            self._sleep(self.silence_s)
        if self.draw(self.chances.unavailable):
            self.note(verb, path, "unavailable")
            raise unavailable(verb, path)

    def answer(self, verb: str, path: str) -> None:
        """After it was carried out."""
        if self.draw(self.chances.lost):
            self.note(verb, path, "lost")
            raise OSError(errno.ECONNRESET, f"the answer to {verb} of {path} was lost")
        self.note(verb, path, "done")

    def note(self, verb: str, path: str, outcome: str) -> None:
        self.log.append((verb, path, outcome))

    def put(self, path: str, data: bytes) -> None:
        self._remember()
        self.objects[path] = data
        self.modified_s[path] = self.clock.now_s

    def remove(self, path: str) -> None:
        self._remember()
        del self.objects[path], self.modified_s[path]

    def _remember(self) -> None:
        self._before.append(self._listing())

    def _listing(self) -> list[tuple[str, int, float]]:
        return [(p, len(d), self.modified_s[p]) for p, d in sorted(self.objects.items())]

    def _found(self, verb: str, path: str) -> bytes:
        if path not in self.objects or self.draw(self.chances.missing):
            self.note(verb, path, "missing")
            raise FileNotFoundError(errno.ENOENT, f"no object {path}")
        return self.objects[path]

    # -- what pyarrow asks -------------------------------------------------------------------------
    def get_type_name(self) -> str:
        return "faulty"

    def normalize_path(self, path: str) -> str:
        return path

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        self.request("open", path)
        return pa.PythonFile(self.upload(self, path), mode="w")

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.request("get", path)
        data = self._found("get", path)
        self.answer("get", path)
        return pa.PythonFile(_Download(data), mode="r")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        found = []
        for path in paths:
            self.request("find", path)
            if path == BUCKET:
                found.append(fs.FileInfo(path, fs.FileType.Directory))
            elif path in self.objects and not self.draw(self.chances.missing):
                found.append(self._info(path, len(self.objects[path]), self.modified_s[path]))
            else:
                found.append(fs.FileInfo(path, fs.FileType.NotFound))
            self.note("find", path, "done")
        return found

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = selector.base_dir.rstrip("/") + "/"
        self.request("list", folder)
        listing = self._listing()
        if self._before and self.draw(self.chances.stale):
            back = self._random.randrange(1, min(5, len(self._before)) + 1)
            listing = self._before[-back]
            self.note("list", folder, "stale")
        self.answer("list", folder)
        return [self._info(*row) for row in listing if row[0].startswith(folder)]

    @staticmethod
    def _info(path: str, size: int, modified_s: float) -> fs.FileInfo:
        return fs.FileInfo(path, fs.FileType.File, size=size, mtime_ns=int(modified_s * 1e9))

    def delete_file(self, path: str) -> None:
        self.request("delete", path)
        if path not in self.objects:
            self.note("delete", path, "missing")
            raise FileNotFoundError(errno.ENOENT, f"no object {path}")
        self.remove(path)
        self.answer("delete", path)

    def _refuse(self, *args: object, **named: object) -> None:
        raise NotImplementedError("an object store has puts, gets, lists and deletes only")

    open_append_stream = create_dir = delete_dir = delete_dir_contents = _refuse
    delete_root_dir_contents = move = copy_file = _refuse

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


def unavailable(verb: str, path: str) -> OSError:
    """As pyarrow tells of a 503 of S3."""
    return OSError(f"{path}: AWS Error SLOW_DOWN during {verb} operation: reduce your rate")


class Upload:
    """The stream of an upload."""

    closed = False

    def __init__(self, handler: FaultyHandler, path: str) -> None:
        self._handler = handler
        self._path = path
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        handler = self._handler
        handler.request("write", self._path)
        if handler.draw(handler.chances.half):
            handler.note("write", self._path, "half")
            raise OSError(errno.ECONNRESET, f"the upload of {self._path} broke")
        self._data += data
        return len(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return len(self._data)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._handler.request("put", self._path)
        self._handler.put(self._path, bytes(self._data))
        self._handler.answer("put", self._path)


FaultyHandler.upload = Upload


class _Download:
    """An object as it was when it was opened."""

    closed = False

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def read(self, count: int = -1) -> bytes:
        end = len(self._data) if count < 0 else self._at + count
        found = self._data[self._at : end]
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return len(self._data)

    def close(self) -> None:
        self.closed = True


def faulty_store(handler: FaultyHandler, prefix: str = "prefix") -> ObjectStore:
    """The real `ObjectStore` over the handler; as S3 is, but for the requests."""
    return ObjectStore(f"s3://{BUCKET}/{prefix}", filesystem=fs.PyFileSystem(handler))
