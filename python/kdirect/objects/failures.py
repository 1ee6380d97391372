"""Which error an answer of an object store is, and its remedy.

Owns: the tables from the codes of S3, Google Cloud Storage, Azure and the operating system to the
errors of `kdirect.errors`.  Pure.  pyarrow raises OSError and has the store's code in its text
only, in fixed forms ("AWS Error NAME during Operation"); these forms are parsed here and nowhere
else, and what has none of them is a plain `RemoteStorageError`.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from kdirect.errors import (
    KdirectError,
    ObjectNotFoundError,
    RemoteAccessError,
    RemoteStorageError,
    RemoteUnavailableError,
)

_AWS = re.compile(r"AWS Error (?P<code>[\w ]+?|\[code \d+\])(?: \(HTTP status (?P<status>\d+)\))?"
                  r" during (?P<operation>\w+) operation:(?P<rest>.*)", re.DOTALL)  # fmt: skip
_AWS_NAME = re.compile(r"Unable to parse ExceptionName: (\w+)")
_GOOGLE = re.compile(r"google::cloud::Status\((?P<code>[A-Z_]+):")
_GOOGLE_STATUS = re.compile(r"http_status_code=(\d+)")
_AZURE = re.compile(r"Azure Error: \[(?P<code>\w*)\]")

LONGEST_DETAIL = 400
BODILESS = "HeadObject"  # its answer has a status, and no code that says more
GET, CUT_SHORT = "GetObject", "INTERNAL_FAILURE"  # an answer that did not fit into the range
CHECKSUMS = (
    "many stores that speak S3 do not know its newer checksums: in the environment set"
    " AWS_REQUEST_CHECKSUM_CALCULATION and AWS_RESPONSE_CHECKSUM_VALIDATION to when_required"
)
_KEY = "check rsm.config.access_key, or AWS_ACCESS_KEY_ID"
_SECRET = "check rsm.config.secret_key, or AWS_SECRET_ACCESS_KEY"
_TOKEN = "renew rsm.config.session_token, or AWS_SESSION_TOKEN with its keys"
_CLOCK = "the clocks of this host and of the store differ too much: set this host's by NTP"
_REGION = "name the bucket's region: ?region=… in the URI"
_FULL = "make room in the store, or raise its quota"
_WAIT = "it is tried again; look at the store and the network if this goes on"

ACCESS = {
    "INVALID_ACCESS_KEY_ID": ("the store does not know the access key", _KEY),
    "INVALID_CLIENT_TOKEN_ID": ("the store does not know the access key", _KEY),
    "UNRECOGNIZED_CLIENT": ("the store does not know the access key", _KEY),
    "SIGNATURE_DOES_NOT_MATCH": ("the secret key is wrong", _SECRET),
    "MISSING_AUTHENTICATION_TOKEN": ("no credentials were sent", f"{_KEY}, and {_SECRET}"),
    "ExpiredToken": ("the session token has expired", _TOKEN),
    "InvalidToken": ("the session token is not valid", _TOKEN),
    "REQUEST_TIME_TOO_SKEWED": ("the clocks differ", _CLOCK),
    "REQUEST_EXPIRED": ("the clocks differ", _CLOCK),
    "RequestTimeTooSkewed": ("the clocks differ", _CLOCK),
    "AuthorizationHeaderMalformed": ("the region is wrong", _REGION),
    "PermanentRedirect": ("the region is wrong", _REGION),
    "UNAUTHENTICATED": (
        "the store does not accept the credentials",
        "set GOOGLE_APPLICATION_CREDENTIALS, or rsm.config.anonymous=true",
    ),
    "AuthenticationFailed": (
        "the store does not accept the credentials",
        "check rsm.config.account_key, rsm.config.sas_token and the clock",
    ),
}
DENIED = frozenset(
    {
        "ACCESS_DENIED",
        "AccessDenied",
        "PERMISSION_DENIED",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
    }
)
UNAVAILABLE = frozenset(
    {
        "NETWORK_CONNECTION",
        "SLOW_DOWN",
        "SERVICE_UNAVAILABLE",
        "INTERNAL_FAILURE",
        "THROTTLING",
        "REQUEST_TIMEOUT",
        "UNAVAILABLE",
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "ABORTED",
        "ServerBusy",
        "OperationTimedOut",
        "InternalError",
    }
)
NO_BUCKET = frozenset({"NO_SUCH_BUCKET", "ContainerNotFound", "ContainerBeingDeleted"})
ABSENT = frozenset({"NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "NOT_FOUND", "BlobNotFound"})
FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "AccountIsDisabled"})
UNSUPPORTED = frozenset({"NotImplemented", "XAmzContentSHA256Mismatch", "[code 138]"})
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})

_RETRIED_ERRNO = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.ETIMEDOUT,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ESTALE,
        errno.EINTR,
        errno.EMFILE,
        errno.ENFILE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a store's library said: a code of the store, its HTTP status if any, the request."""

    code: str = ""
    status: int = 0
    operation: str = ""
    errno: int = 0
    detail: str = ""


def parse(error: OSError) -> Answer:
    """The parts of an error of pyarrow or of the operating system."""
    said = " ".join(f"{error}".split())
    detail = said[:LONGEST_DETAIL]
    if match := _AWS.search(said):
        name = _AWS_NAME.search(match["rest"])
        return Answer(
            code=name[1] if name else match["code"],
            status=int(match["status"] or 0),
            operation=match["operation"],
            detail=detail,
        )
    if match := _GOOGLE.search(said):
        status = _GOOGLE_STATUS.search(said)
        return Answer(code=match["code"], status=int(status[1]) if status else 0, detail=detail)
    if match := _AZURE.search(said):
        return Answer(code=match["code"], detail=detail)
    return Answer(errno=error.errno or 0, detail=detail)


def named(answer: Answer, doing: str, thing: str, bucket: str) -> KdirectError:
    """The error of `doing` (put, get, list, delete or find) to `thing`, an object's URI."""
    where = f"{doing} of {thing}"
    code, status = answer.code, answer.status
    if code in ACCESS or status == 301:
        what, hint = ACCESS.get(code, ACCESS["PermanentRedirect"])
        return RemoteAccessError(f"{where}: {what} ({code})", hint=hint)
    if code in FULL or status == 507 or answer.errno in (errno.ENOSPC, errno.EDQUOT):
        return RemoteStorageError(f"{where}: the store is full: {answer.detail}", hint=_FULL)
    if code in DENIED or answer.errno in (errno.EACCES, errno.EPERM) or status in (401, 403):
        return _denied(answer, doing, where)
    if code in NO_BUCKET:
        return no_bucket(where, bucket)
    if code in ABSENT or answer.errno == errno.ENOENT or status == 404:
        return absent(where) if doing != "put" else no_bucket(where, bucket)
    if answer.errno == errno.EROFS:
        return RemoteStorageError(
            f"{where}: the store is read-only", hint="mount it writable, or name another one"
        )
    cut_short = code == CUT_SHORT and answer.operation == GET
    if code in UNSUPPORTED or status == 501:
        return RemoteStorageError(
            f"{where}: the store does not know the request: {answer.detail}", hint=CHECKSUMS
        )
    if code in UNAVAILABLE or status in RETRIED_STATUS or answer.errno in _RETRIED_ERRNO:
        return RemoteUnavailableError(
            f"{where}: the store did not answer in full: {answer.detail}",
            hint=f"{_WAIT}; {CHECKSUMS}" if cut_short else _WAIT,
        )
    if status == 400:
        return RemoteAccessError(
            f"{where}: the store refuses the request: {answer.detail}",
            hint=f"check the region, and that a session token has not expired; {CHECKSUMS}",
        )
    return RemoteStorageError(
        f"{where}: {answer.detail}", hint="`kdirect doctor --remote-storage URI` tries each step"
    )


def _denied(answer: Answer, doing: str, where: str) -> RemoteAccessError:
    if answer.operation == BODILESS:
        return RemoteAccessError(
            f"{where}: the store refuses access",
            hint=f"{_KEY}; {_SECRET}; check the permission to read objects, and the clock",
        )
    permission = {
        "put": "write objects (s3:PutObject, s3:AbortMultipartUpload)",
        "delete": "delete objects (s3:DeleteObject; pyarrow also needs s3:PutObject and"
        " s3:GetObject for it)",
        "list": "list objects (s3:ListBucket)",
    }.get(doing, "read objects (s3:GetObject)")
    return RemoteAccessError(
        f"{where}: permission denied", hint=f"permit the credentials (or the user) to {permission}"
    )


def no_bucket(where: str, bucket: str) -> RemoteStorageError:
    lacks = f"no bucket {bucket!r}" if bucket else "no such directory any more"
    return RemoteStorageError(
        f"{where}: there is {lacks}",
        hint="create it, or correct the URI; kdirect creates no buckets",
    )


def absent(where: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(
        f"{where}: there is no such object",
        hint="it may have been deleted since its name was read: read the metadata again",
    )
