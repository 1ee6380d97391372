"""Opens pyarrow's file system of a URI.

Owns: every import of pyarrow.fs, the time limits and the number of attempts of each kind of store,
and the two variables of the environment about S3's checksums.  Nothing is asked of a store here but
the region of a bucket on AWS that names none.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

from kdirect.errors import ConfigError
from kdirect.objects.uri import BOOLS, StoreUri

CHECKSUM_VARIABLES = ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a request may take to connect and be without a byte, and how often it is tried."""

    connect_timeout_s: float
    request_timeout_s: float
    attempts: int


def open_filesystem(uri: StoreUri, limits: Limits) -> Any:
    """A pyarrow FileSystem; OSError as pyarrow raises it."""
    name = uri.scheme.name
    if name == "s3":
        return _s3(uri, limits)
    if name == "gs":
        return _gcs(uri, limits)
    from pyarrow import fs

    if name == "abfs":
        return _azure(uri)
    if name == "hdfs":
        return _hdfs(uri)
    return fs.LocalFileSystem()


def choose_checksums(uri: StoreUri) -> None:
    """S3's newer checksums are for AWS: most other stores that speak S3 answer 400 or 501 to them.
    For a store with an endpoint of its own they are switched off in this process, unless the
    environment says something.  The SDK reads these variables whenever a file system is made."""
    if uri.scheme.name == "s3" and "endpoint_override" in uri.settings:
        for variable in CHECKSUM_VARIABLES:
            os.environ.setdefault(variable, "when_required")


def _typed(uri: StoreUri) -> dict[str, Any]:
    return {n: v.lower() == "true" if n in BOOLS else v for n, v in uri.settings.items()}


def _s3(uri: StoreUri, limits: Limits) -> Any:
    choose_checksums(uri)
    fs = _part("s3")
    settings = _typed(uri)
    if "region" not in settings and not os.environ.get("AWS_ENDPOINT_URL"):
        settings["region"] = region_of(uri)
    try:
        return fs.S3FileSystem(
            **settings,
            **uri.secrets,
            connect_timeout=limits.connect_timeout_s,
            request_timeout=limits.request_timeout_s,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=limits.attempts),
            # A small object is one PUT, and a write returns when its part is stored: memory stays
            # bounded, and a write that failed is known to have.
            allow_delayed_open=True,
            background_writes=False,
        )
    except TypeError:  # it names a parameter
        import pyarrow

        raise ConfigError(
            f"pyarrow {pyarrow.__version__} is too old for {uri.text}",
            hint="install a newer one: pip install -U pyarrow",
        ) from None


def _gcs(uri: StoreUri, limits: Limits) -> Any:
    fs = _part("gs")
    limit = datetime.timedelta(seconds=max(1, round(limits.request_timeout_s)))
    return fs.GcsFileSystem(**_typed(uri), retry_time_limit=limit)


def _azure(uri: StoreUri) -> Any:
    fs = _part("abfs")
    host = uri.text.partition("://")[2].partition("/")[0].partition("?")[0].partition("@")[2]
    if not host:
        raise ConfigError(
            f"{uri.text} names no account",
            hint="write abfs://container@account.dfs.core.windows.net/prefix",
        )
    return fs.AzureFileSystem(host.partition(".")[0], **uri.settings, **uri.secrets)


def _hdfs(uri: StoreUri) -> Any:
    fs = _part("hdfs")
    query = "&".join(f"{n}={v}" for n, v in uri.settings.items())
    base = uri.text.partition("?")[0]
    return fs.HadoopFileSystem.from_uri(f"{base}?{query}" if query else base)


def _part(name: str) -> Any:
    """pyarrow.fs, if it was built with this kind of store."""
    from pyarrow import fs

    made = {
        "s3": "S3FileSystem",
        "gs": "GcsFileSystem",
        "abfs": "AzureFileSystem",
        "hdfs": "HadoopFileSystem",
    }
    try:
        getattr(fs, made[name])
    except (ImportError, AttributeError):
        raise ConfigError(
            f"this pyarrow was built without {name}:// ({made[name]})",
            hint="install pyarrow's own wheel: pip install pyarrow",
        ) from None
    return fs


def folder_selector(folder: str) -> Any:
    from pyarrow import fs

    return fs.FileSelector(folder, recursive=True, allow_not_found=True)


def is_file(info: Any) -> bool:
    from pyarrow import fs

    return info.type == fs.FileType.File


def is_absent(info: Any) -> bool:
    from pyarrow import fs

    return info.type == fs.FileType.NotFound


def region_of(uri: StoreUri) -> str:
    """The region of an S3 bucket, for who signs by another library."""
    from pyarrow import fs

    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named or "endpoint_override" in uri.settings:
        return named or "us-east-1"
    return str(fs.resolve_s3_region(uri.bucket))
