"""`ObjectStore`: the objects below one URI.

Owns: keys, the file system of this process, the files that are open for reading, and that every
error of a store leaves as one of `kdirect.errors`, which names the object and the remedy.

Requests at S3: a put of less than 10 MiB is one PUT, a larger one a multipart upload with parts
of 10 MiB.  The first get of a key is a HEAD and a GET, because pyarrow asks how long an object is;
each further one is a GET, while the key is among the last `OPEN_FILES`.  A delete is HEAD, DELETE
and a PUT of an empty object with the folder's name.  None of them lists.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kdirect import blocks
from kdirect.errors import ConfigError, KdirectError, ObjectNotFoundError, RemoteStorageError
from kdirect.objects import failures, filesystems, uploads
from kdirect.objects.uri import StoreUri, parse

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
ATTEMPTS = 3
OPEN_FILES = 256
SHORTEST_SECRET = 6  # a shorter text is a part of innocent words
# Kinds of stores where opening a file is a request, and an open one holds nothing of the store's.
_KEPT_OPEN = frozenset({"s3", "gs", "abfs"})
# A file system of a process that forked this one: its end would wait for threads that are not here.
_FORKED: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object of a listing.  `modified_ms` is -1 where the store does not say."""

    key: str
    size: int
    modified_ms: int


class ObjectStore:
    """The objects below `uri`; keys are relative to it.  Any thread may use it, and a process that
    was forked opens its own connections.

    `config`: the properties of the kind of store, credentials among them (docs/object-stores.md).
    `connect_timeout_s`, `request_timeout_s`: how long a store may not answer, or send and take no
    byte, before a request fails; S3's are tried `attempts` times, with pauses.  `filesystem`: a
    pyarrow FileSystem to use instead of the one that the URI says; of the URI only the path counts
    then.
    """

    def __init__(
        self,
        uri: str,
        config: Mapping[str, str] | None = None,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        attempts: int = ATTEMPTS,
        filesystem: Any = None,
    ) -> None:
        self._parsed = parse(uri, config or {})
        self._given = filesystem
        self._limits = filesystems.Limits(
            connect_timeout_s=connect_timeout_s,
            request_timeout_s=request_timeout_s,
            attempts=attempts,
        )
        self._opened: _Opened | None = None

    @property
    def uri(self) -> str:
        """Without credentials, for messages."""
        return self._parsed.text

    @property
    def parsed(self) -> StoreUri:
        return self._parsed

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    def put(
        self,
        key: str,
        size: int,
        chunks: uploads.Chunks,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Store `size` bytes under a key that nobody has used.  The object appears whole, or not.

        `stop` is asked before each chunk; when it says True, `UploadStoppedError` is raised and no
        object appears.  A chunk may be of any size and is done with when the next one is asked for:
        who yields chunks slowly makes the upload slow.

        After any other error the object may be there: the store may have stored it and the answer
        have been lost.  A call that hangs may be left to its thread, which takes no more chunks
        when `stop` says True.  At S3 it ends by itself when the store has been silent for
        `request_timeout_s`, and seven seconds more for the answer to a PUT, in each of `attempts`;
        at Google Cloud Storage after its own stall limit of two minutes; a file system of this
        host, or HDFS, has no limit.
        """
        path = self._path(key)
        kind = self._kind
        try:
            what = f"put of {self._name(key)}"
            pieces = uploads.pieces(chunks, size, stop, what)
            if kind == "file":
                uploads.to_file(path, pieces, size)
            elif kind == "hdfs":
                uploads.to_renamed(self._filesystem, path, pieces)
            else:
                small = size < uploads.PART_BYTES
                parts = uploads.parts(pieces, size, stop, what)
                uploads.to_stream(self._filesystem, path, parts, small)
        except OSError as e:
            raise self._named(e, "put", key) from None

    def get(self, key: str, position: int, length: int) -> memoryview:
        """`length` bytes from `position` on; RemoteStorageError if the object ends before."""
        if position < 0 or length < 0:
            raise ConfigError(f"get of {self._name(key)}: {length} bytes at {position}")
        path = self._path(key)
        read = self._read_file if self._kind == "file" else self._read
        try:
            size, data = read(path, position, length)
        except OSError as e:
            self._in_process.files.drop(path)
            raise self._named(e, "get", key) from None
        if position + length > size:
            raise RemoteStorageError(
                f"get of {self._name(key)}: bytes {position} to {position + length} of {size}",
                hint="the object is shorter than its metadata says: it is damaged",
            )
        if len(data) != length:
            self._in_process.files.drop(path)
            raise RemoteStorageError(
                f"get of {self._name(key)}: {len(data)} of {length} bytes at {position} came"
            )
        return data

    def _read(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        """How large the object is, and, where it is as large as that, these bytes of it."""
        file = self._open(path)
        size: int = file.size()
        if not 0 < length <= size - position:
            return size, memoryview(b"")
        return size, memoryview(file.read_at(length, position))

    def _read_file(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        """The same of a file of this host, without pyarrow, which would allocate memory for it."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"path '{path}' is a directory, or something else that is no file")
            size = status.st_size
            if not 0 < length <= size - position:
                return size, memoryview(b"")
            data = memoryview(blocks.take(length))[:length]
            came = 0
            while came < length and (n := os.preadv(fd, [data[came:]], position + came)):
                came += n
            return size, data[:came].toreadonly()
        finally:
            os.close(fd)

    def get_tail(self, key: str, object_bytes: int, length: int) -> memoryview:
        """The last `length` bytes of an object of `object_bytes`, or all of it."""
        length = min(length, object_bytes)
        return self.get(key, object_bytes - length, length)

    def size(self, key: str) -> int | None:
        """None when there is no such object."""
        try:
            info = self._filesystem.get_file_info(self._path(key))
        except OSError as e:
            raise self._named(e, "find", key) from None
        return info.size if filesystems.is_file(info) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects whose keys begin with `prefix`.  One that ends in a slash is cheapest: the
        store is asked for the whole folder."""
        folder = prefix.rpartition("/")[0]
        base = f"{self._root}/{folder}" if folder else self._root
        try:
            found = self._filesystem.get_file_info(filesystems.folder_selector(base or "/"))
        except NotADirectoryError:
            return  # an object has the name
        except OSError as e:
            raise self._named(e, "list", prefix) from None
        above = len(self._root) + 1
        for info in found:
            key = info.path[above:]
            if not filesystems.is_file(info) or not key.startswith(prefix):
                continue
            if self._kind in ("file", "hdfs") and uploads.is_partial(key):
                uploads.remove_if_stale(self._filesystem, info)
                continue
            modified = info.mtime_ns
            yield ObjectInfo(
                key=key,
                size=info.size,
                modified_ms=-1 if modified is None else modified // 1_000_000,
            )

    def delete(self, key: str) -> None:
        """An object that is absent is fine."""
        path = self._path(key)
        try:
            self._filesystem.delete_file(path)
        except FileNotFoundError as e:
            error = self._named(e, "delete", key)
            if not isinstance(error, ObjectNotFoundError):
                raise error from None
        except OSError as e:
            raise self._named(e, "delete", key) from None
        finally:
            self._in_process.files.drop(path)

    def presign(self, key: str, expiry_s: int) -> str:
        """A URL by which anybody may read the object for `expiry_s`; S3 only, by botocore.  It is a
        credential: it may enter no log."""
        from kdirect.objects.presigned import Signer

        opened = self._in_process
        if opened.signer is None:
            opened.signer = Signer(self._parsed)
        url: str = opened.signer.sign(self._path(key), self._name(key), expiry_s)
        return url

    # -- names -------------------------------------------------------------------------------------
    @property
    def _kind(self) -> str:
        kind = self._parsed.scheme.name
        return "given" if self._given is not None and kind == "file" else kind

    @property
    def _root(self) -> str:
        root = self._parsed.root
        return "" if root == "/" else root

    def _path(self, key: str) -> str:
        if not key or any(part in ("", ".", "..") for part in key.split("/")):
            raise ConfigError(f"{key!r} is no key of an object", hint="write folder/name")
        return f"{self._root}/{key}"

    def _name(self, key: str) -> str:
        """The URI of an object, for messages."""
        base = self.uri.partition("?")[0].rstrip("/")
        return f"{base}/{key}" if base.partition("://")[2] else f"{base}//{key}"

    # -- this process ------------------------------------------------------------------------------
    @property
    def _in_process(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            if opened is not None:
                _FORKED.append(opened)
            # Two threads may both come here: one of the two file systems is dropped unused.
            try:
                filesystem = self._given or filesystems.open_filesystem(self._parsed, self._limits)
            except KdirectError:
                raise
            except (OSError, ValueError) as e:
                answer = failures.parse(OSError(f"{e}"))
                found = failures.named(answer, "open", self.uri, self._parsed.bucket)
                raise self._without_secrets(found) from None
            opened = self._opened = _Opened(filesystem)
        return opened

    @property
    def _filesystem(self) -> Any:
        return self._in_process.filesystem

    def _open(self, path: str) -> Any:
        if self._kind not in _KEPT_OPEN or self._given is not None:
            return self._filesystem.open_input_file(path)
        return self._in_process.files.open(path)

    def _named(self, error: OSError, doing: str, key: str) -> KdirectError:
        thing = self._name(key) if key else self.uri
        bucket = self._parsed.bucket
        answer = failures.parse(error)
        if answer.operation == failures.GET and answer.code == failures.CUT_SHORT:
            answer = self._reason_of_get(key) or answer
        if answer.operation == failures.BODILESS and answer.code not in failures.UNAVAILABLE:
            answer = self._reason(key) or answer
        found = failures.named(answer, doing, thing, bucket)
        if isinstance(found, ObjectNotFoundError) and bucket and self._has_no_bucket():
            return failures.no_bucket(f"{doing} of {thing}", bucket)
        return self._without_secrets(found)

    def _reason_of_get(self, key: str) -> failures.Answer | None:
        """Why S3 refuses a GET: pyarrow has the answer written to a buffer of as many bytes as were
        asked for, and an error that is longer is lost."""
        try:
            self._filesystem.open_input_file(self._path(key)).close()
        except OSError as e:
            return failures.parse(e)
        return None

    def _reason(self, key: str) -> failures.Answer | None:
        """Why S3 refuses the HEAD of an object: the answer to a HEAD says no more than its status,
        that to a LIST does."""
        try:
            self._filesystem.get_file_info(filesystems.folder_selector(self._path(key)))
        except OSError as e:
            reason = failures.parse(e)
            return reason if reason.code in failures.ACCESS else None
        return None

    def _has_no_bucket(self) -> bool:
        try:
            return filesystems.is_absent(self._filesystem.get_file_info(self._parsed.bucket))
        except OSError:
            return False

    def _without_secrets(self, error: KdirectError) -> KdirectError:
        """Stores do not repeat credentials in their answers, but nothing obliges them."""
        message = error.message
        for secret in self._parsed.secrets.values():
            if len(secret) >= SHORTEST_SECRET:
                message = message.replace(secret, "***")
        return type(error)(message, hint=error.hint)


class _Opened:
    """What a process has of a store."""

    def __init__(self, filesystem: Any) -> None:
        self.pid = os.getpid()
        self.filesystem = filesystem
        self.files = _Files(filesystem)
        self.signer: Any = None


class _Files:
    """The files that were read last, open.  Reads at positions may be made by several threads."""

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._files: OrderedDict[str, Any] = OrderedDict()

    def open(self, path: str) -> Any:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = self._filesystem.open_input_file(path)
        with self._lock:
            self._files[path] = file
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)
        return file

    def drop(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)
