"""Kafka's text form of a 128-bit id: URL-safe base64 without padding, 22 characters.  No I/O.

An id has exactly one text: one whose spare bits are set, or that has padding, is refused, so that a
key in an object store names one segment and a segment has one key.
"""

from __future__ import annotations

import base64
import re
import uuid

from kdirect.errors import FormatError

ID_CHARACTERS = 22
_ID = re.compile(r"[A-Za-z0-9_-]{21}[AQgw]\Z")


def encode_id(value: uuid.UUID) -> str:
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def decode_id(text: str) -> uuid.UUID:
    """The reverse of `encode_id`; FormatError for any other text."""
    if not _ID.match(text):
        raise FormatError(
            f"{text[:40]!r} is no id", hint=f"an id has {ID_CHARACTERS} characters of base64"
        )
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))
