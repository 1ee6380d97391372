"""What `ObjectStore` promises, over every kind of store that runs here."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from kdirect.errors import (
    ConfigError,
    ObjectNotFoundError,
    RemoteAccessError,
    RemoteStorageError,
    UploadStoppedError,
)
from kdirect.objects import ObjectStore, uploads
from kdirect.objects.store import _FORKED
from tests.object_servers import SECRET, Place

SMALL = os.urandom(300_000)
LARGE = os.urandom(2 * uploads.PART_BYTES + 12_345)
KEY = "cluster/topic-x_-y/0/00000000000000000000-aZ_-9.kseg"


def pieces(data: bytes, length: int) -> list[memoryview]:
    view = memoryview(data)
    return [view[i : i + length] for i in range(0, len(data), length)]


def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    return sorted(o.key for o in store.list(prefix))


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (SMALL, len(SMALL)),
        (SMALL, 70_001),
        (b"", 1),
        (LARGE, 1 << 20),
        (LARGE, len(LARGE)),
        (LARGE[: uploads.PART_BYTES], 3 << 20),
        (LARGE[: 2 * uploads.PART_BYTES], uploads.PART_BYTES),
    ],
    ids=["small", "small-chunks", "empty", "large", "large-at-once", "one-part", "two-parts"],
)
def test_an_object_is_read_as_it_was_put(place: Place, data: bytes, length: int) -> None:
    store = place.store()
    before = int(time.time() * 1000)
    store.put(KEY, len(data), iter(pieces(data, length)))
    assert store.size(KEY) == len(data)
    assert bytes(store.get(KEY, 0, len(data))) == data
    assert bytes(store.get_tail(KEY, len(data), 1000)) == data[-1000:]
    for position in (0, 1, len(data) // 2, len(data) - 5):
        if position + 5 <= len(data) and position >= 0:
            assert bytes(store.get(KEY, position, 5)) == data[position : position + 5]
    [found] = store.list("cluster/")
    assert (found.key, found.size) == (KEY, len(data))
    assert abs(found.modified_ms - before) < 120_000
    another = place.store()
    assert bytes(another.get(KEY, 0, min(10, len(data)))) == data[:10]


def test_bytes_past_the_end_are_an_error(place: Place) -> None:
    store = place.store()
    store.put(KEY, 100, [SMALL[:100]])
    for position, length in ((0, 101), (100, 1), (200, 5)):
        with pytest.raises(RemoteStorageError, match="damaged"):
            store.get(KEY, position, length)
    assert bytes(store.get(KEY, 100, 0)) == b""
    assert bytes(store.get_tail(KEY, 100, 5000)) == SMALL[:100]
    with pytest.raises(ConfigError):
        store.get(KEY, -1, 5)


def test_absent_objects(place: Place) -> None:
    store = place.store()
    assert store.size("no/such") is None
    with pytest.raises(ObjectNotFoundError, match="no/such"):
        store.get("no/such", 0, 10)
    store.delete("no/such")
    assert keys(store) == [] == keys(store, "no/")
    store.put(KEY, 10, [SMALL[:10]])
    assert store.size("cluster") is None  # a folder is no object


def test_a_deleted_object_is_gone(place: Place) -> None:
    store = place.store()
    store.put(KEY, 100, [SMALL[:100]])
    store.put(KEY + "2", 100, [SMALL[:100]])
    store.get(KEY, 0, 10)
    store.delete(KEY)
    store.delete(KEY)
    with pytest.raises(ObjectNotFoundError):
        store.get(KEY, 0, 10)
    assert keys(store) == [KEY + "2"]


def test_an_object_that_another_deleted_is_gone(place: Place) -> None:
    store = place.store()
    store.put(KEY, 100, [SMALL[:100]])
    store.get(KEY, 0, 10)  # from now on the store may have it open
    place.store().delete(KEY)
    with pytest.raises(ObjectNotFoundError, match=KEY.rpartition("/")[2]):
        store.get(KEY, 0, 10)


def test_lists_by_prefix(place: Place) -> None:
    store = place.store()
    names = ["a/b/1", "a/b/2", "a/bc/3", "a/4", "d/5"]
    for name in names:
        store.put(name, 3, [b"abc"])
    assert keys(store) == sorted(names)
    assert keys(store, "a/b/") == ["a/b/1", "a/b/2"]
    assert keys(store, "a/b") == ["a/b/1", "a/b/2", "a/bc/3"]
    assert keys(store, "a/b/2") == ["a/b/2"]
    assert keys(store, "e/") == [] == keys(store, "a/b/2/")


def test_keys_that_would_leave_the_prefix(place: Place) -> None:
    store = place.store()
    for key in ("", "/a", "a/", "a//b", "../a", "a/../../b", "./a"):
        with pytest.raises(ConfigError):
            store.put(key, 1, [b"x"])
        with pytest.raises(ConfigError):
            store.get(key, 0, 1)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_an_upload_that_is_stopped_leaves_no_object(place: Place, data: bytes) -> None:
    store = place.store()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    chunks = pieces(data, len(data) // 4 + 1)
    with pytest.raises(UploadStoppedError, match="no object appeared"):
        store.put(KEY, len(data), chunks, stop=lambda: stop())
    gc.collect()
    assert store.size(KEY) is None and keys(store) == []
    # Before the last byte, too: four chunks, and then once more.
    asked.clear()
    with pytest.raises(UploadStoppedError):
        store.put(KEY, len(data), chunks, stop=lambda: stop() and len(asked) > 4)
    assert len(asked) == 5 and keys(store) == []


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_chunks_that_fail_or_do_not_fit_leave_no_object(place: Place, data: bytes) -> None:
    store = place.store()

    def failing():
        yield data[:-1]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put(KEY, len(data), failing())
    with pytest.raises(RemoteStorageError, match="announced came"):
        store.put(KEY, len(data), [data[:-1]])
    with pytest.raises(RemoteStorageError, match="more than"):
        store.put(KEY, len(data), [data, b"x"])
    gc.collect()
    assert keys(store) == []


PUT = """
import os, sys
from kdirect.objects import ObjectStore
uri, key, config = sys.argv[1], sys.argv[2], dict(a.split("=") for a in sys.argv[3:])
block = os.urandom(1 << 20)
def chunks():
    for i in range(30):
        yield block
        if i == 24:
            print("in the middle", flush=True)
            sys.stdin.readline()
ObjectStore(uri, config).put(key, 30 << 20, chunks())
print("stored", flush=True)
"""


def start_put(place: Place) -> subprocess.Popen[str]:
    config = [f"{name}={value}" for name, value in place.config.items()]
    process = subprocess.Popen(
        [sys.executable, "-c", PUT, place.uri, KEY, *config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    return process


def test_a_writer_that_is_killed_leaves_no_object(place: Place) -> None:
    process = start_put(place)
    store = place.store()
    assert keys(store) == []
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert keys(store) == [] and store.size(KEY) is None
    store.put(KEY, 100, [SMALL[:100]])  # what is left of it is in nobody's way
    assert keys(store) == [KEY]


def test_a_process_that_ends_with_an_upload_given_up_leaves_no_object(place: Place) -> None:
    """Neither the collector nor the end of the interpreter closes its stream."""
    give_up = PUT.replace("sys.stdin.readline()", "raise SystemExit(7)")
    config = [f"{name}={value}" for name, value in place.config.items()]
    run = subprocess.run(
        [sys.executable, "-c", give_up, place.uri, KEY, *config], capture_output=True, timeout=60
    )
    assert run.returncode == 7, run.stderr
    assert keys(place.store()) == []


def test_a_process_that_was_forked_has_connections_of_its_own(place: Place) -> None:
    store = place.store()
    store.put("parent", 100, [SMALL[:100]])
    store.get("parent", 0, 10)
    mine = store._in_process
    child = os.fork()
    if not child:
        try:
            assert bytes(store.get("parent", 0, 100)) == SMALL[:100]
            assert store._in_process is not mine and mine in _FORKED
            store.put("child", 5, [b"child"])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(store.get("child", 0, 5)) == b"child"
    assert bytes(store.get("parent", 90, 10)) == SMALL[90:100]


def test_threads_share_a_store(place: Place) -> None:
    store = place.store()
    store.put(KEY, len(SMALL), [SMALL])
    wrong: list[object] = []

    def use(number: int) -> None:
        try:
            for i in range(5):
                at = (number * 5 + i) * 1000
                if bytes(store.get(KEY, at, 777)) != SMALL[at : at + 777]:
                    wrong.append(at)
            store.put(f"t/{number}", 5, [b"%05d" % number])
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(keys(store, "t/")) == 8


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_bucket_that_does_not_exist(object_stores, kind: str) -> None:
    store = object_stores[kind].fresh().within(bucket="no-such-bucket").store()
    for size in (100, len(LARGE)):
        with pytest.raises(RemoteStorageError, match="no bucket 'no-such-bucket'"):
            store.put(KEY, size, [LARGE[:size]])
    with pytest.raises(RemoteStorageError, match="no bucket 'no-such-bucket'"):
        store.get(KEY, 0, 5)
    with pytest.raises(RemoteStorageError, match="no bucket 'no-such-bucket'"):
        store.delete(KEY)


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        ({"secret_key": "wrong-but-secret-99"}, "secret_key"),
        ({"access_key": "nobody-77"}, "access_key"),
    ],
    ids=["secret", "key-id"],
)
def test_wrong_credentials_are_named_and_not_shown(
    s3: Place, config: dict, hint: str, caplog: pytest.LogCaptureFixture, capfd
) -> None:
    given = {**s3.config, **config}
    s3.store().put(KEY, 10, [SMALL[:10]])
    store = ObjectStore(s3.uri, given)
    said = [repr(store), store.uri, repr(store.parsed)]
    for call in (
        lambda: store.put("a", 5, [b"hello"]),
        lambda: store.put("a", len(LARGE), [LARGE]),
        lambda: store.get(KEY, 0, 5),
        lambda: list(store.list()),
        lambda: store.delete(KEY),
        lambda: store.size(KEY),
    ):
        with pytest.raises(RemoteAccessError) as caught:
            call()
        assert hint in caught.value.hint and "s3://tiers/" in caught.value.message
        assert caught.value.__cause__ is None and not caught.value.retriable
        said.append(f"{caught.value} {caught.value!r}")
    said += [*caplog.messages, *capfd.readouterr()]
    for secret in (SECRET, given["secret_key"]):
        assert not [s for s in said if secret in s]


# -- a directory -----------------------------------------------------------------------------------
@pytest.fixture
def directory(object_stores) -> Place:
    return object_stores["directory"].fresh()


def files(place: Place) -> list[Path]:
    root = Path(unquote(urlsplit(place.uri).path))
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_remains_in_a_directory_are_no_objects_and_go_after_a_day(directory: Place) -> None:
    process = start_put(directory)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = directory.store()
    [partial] = files(directory)
    assert uploads.is_partial(str(partial)) and partial.stat().st_size >= 20 << 20
    assert keys(store) == [] and files(directory) == [partial]
    os.utime(partial, (time.time() - uploads.STALE_PARTIAL_S - 60,) * 2)
    assert keys(store) == [] == files(directory)


def test_a_file_is_on_disk_with_its_name(directory: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def watched(name: str, path_of):
        real = getattr(os, name)

        def call(*arguments):
            done.append(f"{name} {path_of(arguments[0])}")
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    watched("fsync", lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    watched("rename", lambda path: Path(path).name)
    directory.store().put("a/b", 5, [b"hello"])
    [stored] = files(directory)
    assert stored.name == "b"  # and nothing else is left
    partial = done[-2].removeprefix("rename ")
    assert uploads.is_partial(f"/{partial}")
    root = Path(urlsplit(directory.uri).path)
    # The folders that were made, each in its parent; the file; its name.
    assert done == [
        f"fsync {root.parent.name}",
        f"fsync {root.name}",
        f"fsync {partial}",
        f"rename {partial}",
        "fsync a",
    ]


def test_a_put_into_a_directory_that_fails_removes_what_it_wrote(directory: Place) -> None:
    store = directory.store()
    with pytest.raises(RemoteStorageError):
        store.put(KEY, 10, [b"short"])
    assert files(directory) == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    store = ObjectStore((tmp_path / "file").as_uri())
    with pytest.raises(RemoteStorageError, match="put of file:///"):
        store.put("a/b", 1, [b"x"])
    store = ObjectStore("file:///proc/kdirect")
    with pytest.raises(RemoteStorageError):
        store.put("a", 1, [b"x"])


def test_a_full_directory_says_so() -> None:
    # /dev/full takes nothing; the store's own write is what meets it.
    from kdirect.objects import failures

    try:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")
        raise AssertionError("it was written")
    except OSError as e:
        error = failures.named(failures.parse(e), "put", "file:///full/a", "")
    assert type(error) is RemoteStorageError and "full" in error.message and "room" in error.hint


def test_files_that_are_renamed_into_place(tmp_path: Path) -> None:
    """HDFS is written like this; its file system is played by that of this host."""
    from pyarrow.fs import LocalFileSystem

    store = ObjectStore(f"hdfs://name:8020{tmp_path}/up", filesystem=LocalFileSystem())
    store.put("a/b.kseg", len(LARGE), pieces(LARGE, 1 << 20))
    assert (tmp_path / "up/a/b.kseg").read_bytes() == LARGE
    seen: list[str] = []

    def chunks():
        for chunk in pieces(LARGE, uploads.PART_BYTES):
            yield chunk
            seen.extend(p.name for p in (tmp_path / "up/c").iterdir())

    store.put("c/d.kseg", len(LARGE), chunks())
    assert seen and all(uploads.is_partial(f"/{name}") for name in seen)
    with pytest.raises(UploadStoppedError):
        store.put("c/e.kseg", len(LARGE), pieces(LARGE, 1 << 20), stop=lambda: len(seen) > 0)
    assert keys(store) == ["a/b.kseg", "c/d.kseg"]
    assert sorted(p.name for p in (tmp_path / "up/c").iterdir()) == ["d.kseg"]
