"""S3 behind a gate: which requests a call makes, and what becomes of faults."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from kdirect.errors import (
    ConfigError,
    KdirectError,
    ObjectNotFoundError,
    RemoteAccessError,
    RemoteStorageError,
    RemoteUnavailableError,
    UploadStoppedError,
)
from kdirect.objects import ObjectStore, store, uploads
from tests.object_servers import CUT, LOST, SECRET, SILENT, Gate, Place, Request
from tests.support import wait_until

KEY = "topic/0/a.kseg"
SMALL = os.urandom(100_000)
LARGE = os.urandom(3 * uploads.PART_BYTES + 5)


def impatient(place: Place) -> ObjectStore:
    return place.store(connect_timeout_s=1, request_timeout_s=1, attempts=1)


def chunks(data: bytes) -> list[bytes]:
    return [data[i : i + (1 << 20)] for i in range(0, len(data), 1 << 20)]


# -- how many --------------------------------------------------------------------------------------
def test_a_small_object_is_one_put(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    size = uploads.PART_BYTES - 1
    place.store().put(KEY, size, chunks(LARGE[:size]))
    assert gate.lines == ["PUT"]


def test_a_large_object_is_one_upload_of_whole_parts(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    place.store().put(KEY, len(LARGE), chunks(LARGE))
    assert gate.lines == ["POST ?uploads", *["PUT ?partNumber"] * 4, "POST ?uploadId"]


def test_a_get_is_one_ranged_get_and_a_head_for_the_first(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = place.store()
    opened.put(KEY, len(SMALL), [SMALL])
    gate.requests.clear()
    assert bytes(opened.get(KEY, 10, 100)) == SMALL[10:110]
    assert gate.lines == ["HEAD", "GET"]
    for position in (0, 5000, len(SMALL) - 7):
        assert bytes(opened.get(KEY, position, 7)) == SMALL[position : position + 7]
    assert gate.lines == ["HEAD", *["GET"] * 4]
    assert [r.range for r in gate.requests[1:3]] == ["bytes=10-109", "bytes=0-6"]


def test_files_are_kept_open_up_to_a_number(
    gated: tuple[Gate, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, place = gated
    monkeypatch.setattr(store, "OPEN_FILES", 2)
    opened = place.store()
    for name in "abc":
        opened.put(name, 3, [b"abc"])
    gate.requests.clear()
    for name in "abacb":  # b goes when c comes, as a was read since
        opened.get(name, 0, 3)
    assert [r.path[-1] for r in gate.requests if r.method == "HEAD"] == ["a", "b", "c", "b"]


def test_a_delete_and_a_size(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = place.store()
    opened.put(KEY, len(SMALL), [SMALL])
    gate.requests.clear()
    assert opened.size(KEY) == len(SMALL)
    assert gate.lines == ["HEAD"]
    gate.requests.clear()
    opened.delete(KEY)
    # What pyarrow makes of it: the last one is an empty object for the folder.
    assert gate.lines == ["HEAD", "DELETE", "PUT"]
    assert list(opened.list()) == []


def test_a_process_that_only_imports_the_room_loads_no_arrow() -> None:
    code = (
        "import sys; from kdirect.objects import ObjectStore, get_presigned;"
        " ObjectStore('s3://bucket/prefix', {'access_key': 'a', 'secret_key': 'b'});"
        " sys.exit(any(m.split('.')[0] in ('pyarrow', 'botocore') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_checksums_of_the_environment_are_left_alone(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are set for a store with an endpoint of its own only; what is set already stays, and
    the error says what to do."""
    names = ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(ConfigError, match="seconds"):
        ObjectStore("s3://tiers", s3.config).presign("a", 0)
    assert not any(name in os.environ for name in names)
    s3.store().put("b", 1, [b"b"])
    assert [os.environ[name] for name in names] == ["when_required"] * 2
    for name in names:
        monkeypatch.setenv(name, "when_supported")
    strict = s3.store(attempts=1)
    with pytest.raises(RemoteStorageError) as caught:
        strict.put("c", 1, [b"c"])
    assert names[0] in caught.value.hint
    with pytest.raises(RemoteStorageError) as caught:
        strict.get("b", 0, 1)
    assert names[1] in caught.value.hint
    assert [os.environ[name] for name in names] == ["when_supported"] * 2


# -- faults ----------------------------------------------------------------------------------------
def only(method: str, fault: object):
    return lambda request: fault if request.method == method else None


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ((403, "AccessDenied"), RemoteAccessError, "s3:PutObject"),
        ((403, "InvalidAccessKeyId"), RemoteAccessError, "access_key"),
        ((403, "SignatureDoesNotMatch"), RemoteAccessError, "secret_key"),
        ((403, "RequestTimeTooSkewed"), RemoteAccessError, "clock"),
        ((400, "AuthorizationHeaderMalformed"), RemoteAccessError, "region"),
        ((301, "PermanentRedirect"), RemoteAccessError, "region"),
        ((400, "ExpiredToken"), RemoteAccessError, "session_token"),
        ((404, "NoSuchBucket"), RemoteStorageError, "create it"),
        ((507, "InsufficientStorage"), RemoteStorageError, "make room"),
        ((403, "QuotaExceeded"), RemoteStorageError, "quota"),
        ((501, "NotImplemented"), RemoteStorageError, "AWS_REQUEST_CHECKSUM_CALCULATION"),
        ((400, "InvalidRequest"), RemoteStorageError, "AWS_REQUEST_CHECKSUM_CALCULATION"),
        ((503, "SlowDown"), RemoteUnavailableError, "tried again"),
        ((500, "InternalError"), RemoteUnavailableError, "tried again"),
        (CUT, RemoteUnavailableError, "tried again"),
    ],
    ids=lambda x: x[1] if isinstance(x, tuple) else None,
)
def test_an_answer_has_an_error_and_a_remedy(
    gated: tuple[Gate, Place], fault: object, error: type[KdirectError], says: str
) -> None:
    gate, place = gated
    gate.fault = lambda request: fault  # type: ignore[return-value]
    opened = impatient(place)
    for call in (
        lambda: opened.put(KEY, 5, [b"hello"]),
        lambda: opened.put(KEY, len(LARGE), chunks(LARGE)),
    ):
        with pytest.raises(KdirectError) as caught:
            call()
        assert type(caught.value) is error, caught.value
        assert says in caught.value.hint
        assert f"/{KEY}" in caught.value.message and "s3://tiers/" in caught.value.message
        assert caught.value.retriable == (error is RemoteUnavailableError)
    for call in (
        lambda: opened.get(KEY, 0, 5),
        lambda: opened.size(KEY),
        lambda: list(opened.list()),
        lambda: opened.delete(KEY),
    ):
        if fault == (404, "NoSuchBucket"):
            continue
        with pytest.raises(RemoteStorageError) as caught:
            call()
        if error is not RemoteStorageError:
            assert type(caught.value) is error, caught.value


def test_a_store_that_repeats_a_secret_is_not_quoted(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    gate.fault = lambda request: (400, f"Code{SECRET.replace('-', '_')}")
    config = {**place.config, "secret_key": SECRET.replace("-", "_")}
    with pytest.raises(RemoteStorageError) as caught:
        ObjectStore(place.uri, config, attempts=1).put(KEY, 5, [b"hello"])
    assert "Code***" in caught.value.message
    assert config["secret_key"] not in f"{caught.value} {caught.value!r}"


def test_no_permission_to_delete(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = impatient(place)
    opened.put(KEY, 5, [b"hello"])
    gate.fault = only("DELETE", (403, "AccessDenied"))
    with pytest.raises(RemoteAccessError, match="permission denied") as caught:
        opened.delete(KEY)
    assert "s3:DeleteObject" in caught.value.hint
    assert opened.size(KEY) == 5


def test_an_object_that_goes_while_it_is_read(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = impatient(place)
    opened.put(KEY, 5, [b"hello"])
    opened.get(KEY, 0, 5)
    place.store().delete(KEY)
    # The answer is longer than the five bytes: pyarrow loses it, and the store is asked again.
    with pytest.raises(ObjectNotFoundError):
        opened.get(KEY, 0, 5)
    gate.fault = only("GET", (503, "SlowDown"))
    opened.put(KEY, 5, [b"hello"])
    with pytest.raises(RemoteUnavailableError):
        opened.get(KEY, 0, 5)


@pytest.mark.parametrize("part", [1, 3, 4])
def test_a_part_that_fails_leaves_no_object(gated: tuple[Gate, Place], part: int) -> None:
    gate, place = gated
    opened = impatient(place)
    gate.fault = lambda r: CUT if r.query.startswith(f"partNumber={part}&") else None
    with pytest.raises(RemoteUnavailableError):
        opened.put(KEY, len(LARGE), chunks(LARGE))
    gc.collect()
    assert "POST ?uploadId" not in gate.lines
    gate.fault = lambda r: None
    assert opened.size(KEY) is None


def test_an_object_whose_answer_was_lost_is_whole(gated: tuple[Gate, Place]) -> None:
    """The caller cannot know; it may find the object, and may put it again."""
    gate, place = gated
    opened = impatient(place)
    gate.fault = only("PUT", LOST)
    with pytest.raises(RemoteUnavailableError):
        opened.put(KEY, len(SMALL), [SMALL])
    gate.fault = lambda r: None
    assert bytes(opened.get(KEY, 0, len(SMALL))) == SMALL
    opened.put(KEY, len(SMALL), [SMALL])
    gate.fault = lambda r: LOST if r.line == "POST ?uploadId" else None
    with pytest.raises(RemoteUnavailableError):
        opened.put(KEY + "2", len(LARGE), chunks(LARGE))
    gate.fault = lambda r: None
    assert opened.size(KEY + "2") == len(LARGE)


def test_a_request_is_tried_again(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    faults = [(503, "SlowDown"), (500, "InternalError")]
    gate.fault = lambda request: faults.pop() if faults else None
    place.store().put(KEY, 5, [b"hello"])
    assert gate.lines == ["PUT"] * 3


def test_a_silent_store_is_given_up(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = impatient(place)
    opened.put(KEY, 5, [b"hello"])
    gate.fault = lambda request: SILENT
    started = time.monotonic()
    with pytest.raises(RemoteUnavailableError):
        opened.get(KEY, 0, 5)
    assert time.monotonic() - started < 10


def test_a_put_that_hangs_may_be_left_to_its_thread(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = impatient(place)
    stop = threading.Event()
    gate.fault = lambda r: SILENT if r.line == "POST ?uploads" else None
    ended: list[KdirectError] = []

    def put() -> None:
        try:
            opened.put(KEY, len(LARGE), chunks(LARGE), stop=stop.is_set)
        except KdirectError as e:
            ended.append(e)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    wait_until(lambda: gate.requests, "the upload")
    stop.set()
    opened.put("other", 5, [b"hello"])  # nobody waits for it
    thread.join(30)
    assert not thread.is_alive() and isinstance(ended[0], RemoteUnavailableError)
    assert opened.size(KEY) is None


def test_a_put_that_was_stopped_takes_no_more_parts(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    opened = place.store()

    def stop() -> bool:
        return sum(r.line == "PUT ?partNumber" for r in gate.requests) >= 2

    with pytest.raises(UploadStoppedError):
        opened.put(KEY, len(LARGE), chunks(LARGE), stop=stop)
    gc.collect()
    assert gate.lines == ["POST ?uploads", *["PUT ?partNumber"] * 2]
    assert opened.size(KEY) is None


def test_who_yields_chunks_slowly_makes_the_upload_slow(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    sent: list[int] = []

    def slowly():
        for chunk in chunks(LARGE):
            sent.append(len([r for r in gate.requests if r.line == "PUT ?partNumber"]))
            yield chunk

    place.store().put(KEY, len(LARGE), slowly())
    # A part is away before the chunk after it is asked for.
    assert sent == [n // 10 for n in range(len(chunks(LARGE)))]


def test_a_google_store_that_does_not_listen() -> None:
    uri = "gs://tiers?endpoint_override=127.0.0.1:1&scheme=http"
    opened = ObjectStore(uri, {"anonymous": "true"}, request_timeout_s=1)
    with pytest.raises(RemoteUnavailableError, match="gs://tiers/a") as caught:
        opened.put("a", 1, [b"a"])
    assert caught.value.retriable


def test_a_store_that_does_not_listen() -> None:
    uri = "s3://tiers?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    opened = ObjectStore(uri, {"access_key": "a" * 20, "secret_key": "b" * 20}, attempts=1)
    with pytest.raises(RemoteUnavailableError, match="s3://tiers/a") as caught:
        opened.put("a", 1, [b"a"])
    assert caught.value.retriable


def test_a_fault_is_told_of_the_request(gated: tuple[Gate, Place]) -> None:
    """The gate itself: what the other tests rest on."""
    gate, place = gated
    opened = impatient(place)
    seen: list[Request] = []

    def fault(request: Request) -> None:
        seen.append(request)

    gate.fault = fault
    opened.put(KEY, 5, [b"hello"])
    assert [r.method for r in seen] == ["PUT"] and seen[0].path.endswith(f"/{KEY}")
    assert seen == gate.requests
