"""Presigned URLs: a broker signs, and who has the URL reads without a key.

Owns: the signature, by botocore (the extra `s3`, imported when it is first used), and the ranged
GET of such a URL by plain HTTP.  A URL's query is a credential, so no error has it, and no log.
"""

from __future__ import annotations

import http.client
import logging
import re
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kdirect import blocks
from kdirect.errors import (
    ConfigError,
    KdirectError,
    ObjectNotFoundError,
    RemoteAccessError,
    RemoteStorageError,
    RemoteUnavailableError,
)
from kdirect.objects.connections import Patience, answer
from kdirect.objects.filesystems import region_of
from kdirect.objects.uri import StoreUri

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30.0
LONGEST_EXPIRY_S = 7 * 24 * 3600  # of S3's signatures
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


class Signer:
    """Signs for one store.  Its client of botocore takes long to make, and threads share it."""

    def __init__(self, uri: StoreUri) -> None:
        if uri.scheme.name != "s3":
            raise ConfigError(
                f"{uri.text} has no presigned URLs: only S3 has them",
                hint="use an s3:// store, or have clients read with credentials of their own",
            )
        if uri.settings.get("anonymous", "false").lower() == "true":
            raise ConfigError(
                f"{uri.text} has no presigned URLs: it is read anonymously",
                hint="set rsm.config.access_key and rsm.config.secret_key",
            )
        self._client = _make_client(uri)

    def sign(self, path: str, name: str, expiry_s: int) -> str:
        """A URL that reads the object at `path` (bucket/key) for `expiry_s` seconds."""
        if not 1 <= expiry_s <= LONGEST_EXPIRY_S:
            raise ConfigError(
                f"a presigned URL lasts 1 to {LONGEST_EXPIRY_S} seconds, not {expiry_s}"
            )
        import botocore.exceptions

        bucket, _, key = path.partition("/")
        try:
            url = self._client.generate_presigned_url(
                "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=expiry_s
            )
        except botocore.exceptions.NoCredentialsError:
            raise RemoteAccessError(
                f"{name} cannot have a presigned URL: there are no credentials to sign with",
                hint="set rsm.config.access_key and rsm.config.secret_key, or AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY",
            ) from None
        except botocore.exceptions.BotoCoreError as e:
            raise RemoteAccessError(
                f"{name} cannot have a presigned URL: {type(e).__name__}",
                hint="check the credentials that the environment of the broker has",
            ) from None
        return str(url)


def _make_client(uri: StoreUri) -> Any:
    try:
        import botocore.config
        import botocore.session
    except ImportError:
        raise ConfigError(
            "presigned URLs are signed by botocore, which is not installed",
            hint="pip install 'kdirect[s3]'",
        ) from None
    # At DEBUG it would log each signature, with all that it is made of.
    logging.getLogger("botocore.auth").setLevel(logging.INFO)
    endpoint = uri.settings.get("endpoint_override")
    scheme = uri.settings.get("scheme", "https")
    virtual = not endpoint or uri.settings.get("force_virtual_addressing", "").lower() == "true"
    return botocore.session.Session().create_client(
        "s3",
        region_name=uri.settings.get("region") or region_of(uri),
        endpoint_url=f"{scheme}://{endpoint}" if endpoint else None,
        aws_access_key_id=uri.secrets.get("access_key"),
        aws_secret_access_key=uri.secrets.get("secret_key"),
        aws_session_token=uri.secrets.get("session_token"),
        config=botocore.config.Config(
            signature_version="s3v4", s3={"addressing_style": "virtual" if virtual else "path"}
        ),
    )


def get_presigned(
    url: str,
    position: int,
    length: int,
    *,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
) -> memoryview:
    """`length` bytes from `position` on, by one GET.  `request_timeout_s` limits each silence."""
    name, parts = _shown(url)
    if position < 0 or length < 0:
        raise ConfigError(f"get of {name}: {length} bytes at {position}")
    if not length:
        return memoryview(b"")
    wanted = {"Range": f"bytes={position}-{position + length - 1}"}
    try:
        with answer(parts, wanted, Patience(connect_timeout_s, request_timeout_s)) as response:
            return _body(response, name, position, length)
    except (OSError, http.client.HTTPException) as e:
        if isinstance(e, KdirectError):
            raise
        raise RemoteUnavailableError(
            f"get of {name}: {type(e).__name__}: the store did not answer in full",
            hint="it is tried again; look at the store and the network if this goes on",
        ) from None


def _shown(url: str) -> tuple[str, SplitResult]:
    """The URL without its query, and its parts."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ConfigError("a presigned URL begins with http://host or https://host")
    return f"{parts.scheme}://{parts.netloc}{parts.path}", parts


def _body(response: http.client.HTTPResponse, name: str, position: int, length: int) -> memoryview:
    if response.status != 206:
        raise _refused(response.status, name, position, length)
    span = _RANGE.fullmatch(response.getheader("Content-Range") or "")
    if span is None or (int(span[1]), int(span[2])) != (position, position + length - 1):
        raise RemoteStorageError(
            f"get of {name}: other bytes than the {length} at {position} came",
            hint="the object is shorter than its metadata says: it is damaged",
        )
    data = memoryview(blocks.take(length))[:length]
    came = 0
    while came < length and (n := response.readinto(data[came:])):
        came += n
    if came != length:
        raise RemoteUnavailableError(
            f"get of {name}: {came} of {length} bytes at {position} came",
            hint="the connection ended early; it is tried again",
        )
    return data.toreadonly()


def _refused(status: int, name: str, position: int, length: int) -> KdirectError:
    if status in (401, 403):
        return RemoteAccessError(
            f"get of {name}: the store refuses the signed URL ({status})",
            hint="it has expired, or was signed with a wrong secret or clock: ask the broker again",
        )
    if status == 404:
        return ObjectNotFoundError(
            f"get of {name}: there is no such object", hint="read the metadata again"
        )
    if status in (408, 429) or (status >= 500 and status != 501):
        return RemoteUnavailableError(
            f"get of {name}: the store answers {status}", hint="it is tried again"
        )
    if 300 <= status < 400:
        return RemoteAccessError(
            f"get of {name}: the store points elsewhere ({status})",
            hint="name the bucket's region: ?region=… in the broker's URI",
        )
    if status == 416:
        return RemoteStorageError(
            f"get of {name}: the object ends before {length} bytes at {position}",
            hint="the object is shorter than its metadata says: it is damaged",
        )
    return RemoteStorageError(
        f"get of {name}: {status} where 206 was asked for",
        hint="the store, or a proxy before it, does not serve ranges",
    )
