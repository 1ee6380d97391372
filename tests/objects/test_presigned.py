"""Presigned URLs: who has one reads the object with no key, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from kdirect.errors import (
    ConfigError,
    KdirectError,
    ObjectNotFoundError,
    RemoteAccessError,
    RemoteStorageError,
    RemoteUnavailableError,
)
from kdirect.objects import ObjectStore, get_presigned
from tests.object_servers import CUT, KEY_ID, SECRET, SILENT, Gate, Place

DATA = os.urandom(200_000)
KEY = "cluster/topic-x_-y/0/00000000000000000000-aZ_-9.kseg"


def signed(place: Place, key: str = KEY, expiry_s: int = 60) -> str:
    return place.store().presign(key, expiry_s)


def query(url: str) -> str:
    return urlsplit(url).query


def test_who_has_the_url_reads(s3: Place) -> None:
    s3.store().put(KEY, len(DATA), [DATA])
    url = signed(s3)
    assert SECRET not in url and KEY in url
    for position, length in ((0, 10), (5, 100_000), (len(DATA) - 1, 1), (0, len(DATA)), (7, 0)):
        assert bytes(get_presigned(url, position, length)) == DATA[position : position + length]


def test_it_is_one_get(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    place.store().put(KEY, len(DATA), [DATA])
    url = signed(place)
    gate.requests.clear()
    get_presigned(url, 100, 50)
    assert [(r.method, r.range) for r in gate.requests] == [("GET", "bytes=100-149")]


def test_bounds(s3: Place) -> None:
    s3.store().put(KEY, 100, [DATA[:100]])
    url = signed(s3)
    for position, length in ((0, 101), (99, 2), (100, 1), (5000, 10)):
        with pytest.raises(RemoteStorageError, match=r"other bytes|ends before") as caught:
            get_presigned(url, position, length)
        assert query(url) not in str(caught.value)
    with pytest.raises(ConfigError):
        get_presigned(url, -1, 1)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ((403, "AccessDenied"), RemoteAccessError),
        ((301, "PermanentRedirect"), RemoteAccessError),
        ((404, "NoSuchKey"), ObjectNotFoundError),
        ((503, "SlowDown"), RemoteUnavailableError),
        ((200, "whole"), RemoteStorageError),
        ((501, "NotImplemented"), RemoteStorageError),
        (CUT, RemoteUnavailableError),
        (SILENT, RemoteUnavailableError),
    ],
    ids=str,
)
def test_an_answer_has_an_error_without_the_query(
    gated: tuple[Gate, Place], fault: object, error: type[KdirectError]
) -> None:
    gate, place = gated
    url = signed(place)
    gate.fault = lambda request: fault  # type: ignore[return-value]
    with pytest.raises(KdirectError) as caught:
        get_presigned(url, 0, 10, request_timeout_s=1)
    assert type(caught.value) is error
    said = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert KEY in said and "Signature" not in said and query(url) not in said


def test_a_url_that_was_changed_or_has_expired(s3: Place) -> None:
    s3.store().put(KEY, 100, [DATA[:100]])
    s3.store().put("other", 100, [DATA[:100]])
    url = signed(s3)
    for changed in (url.replace(KEY, "other"), url.replace(KEY_ID, "nobody"), url[:-4] + "0000"):
        with pytest.raises(RemoteAccessError):
            get_presigned(changed, 0, 10)
    short = signed(s3, expiry_s=1)
    time.sleep(2.1)
    with pytest.raises(RemoteAccessError, match="refuses the signed URL"):
        get_presigned(short, 0, 10)


def test_a_store_that_does_not_listen() -> None:
    with pytest.raises(RemoteUnavailableError, match=r"http://127\.0\.0\.1:1/a") as caught:
        get_presigned("http://127.0.0.1:1/a?X-Amz-Signature=abc", 0, 1)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/a", "a", "http://u:p@host/a"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="begins with http"):
        get_presigned(url, 0, 1)


def test_only_s3_has_presigned_urls(object_stores) -> None:
    for kind in ("directory", "gcs"):
        with pytest.raises(ConfigError, match="only S3"):
            object_stores[kind].fresh().store().presign(KEY, 60)


def test_what_cannot_be_signed(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for expiry_s in (0, -1, 8 * 24 * 3600):
        with pytest.raises(ConfigError, match="seconds"):
            signed(s3, expiry_s=expiry_s)
    with pytest.raises(ConfigError, match="anonymously"):
        ObjectStore(s3.uri, {"anonymous": "true"}).presign(KEY, 60)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(RemoteAccessError, match="no credentials"):
        ObjectStore(s3.uri).presign(KEY, 60)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = ObjectStore(s3.uri)
    store.put(KEY, 100, [DATA[:100]])
    assert bytes(get_presigned(store.presign(KEY, 60), 0, 100)) == DATA[:100]


def test_without_botocore_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['botocore'] = None\n"
        "from kdirect.objects import ObjectStore\n"
        "s = ObjectStore('s3://b?region=x', {'access_key': 'a', 'secret_key': 'b'})\n"
        "s.presign('k', 5)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "pip install 'kdirect[s3]'" in run.stderr
