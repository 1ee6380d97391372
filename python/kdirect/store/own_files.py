"""The files in which a broker that is alone keeps its topics and producer ids: their form.

Law: the one place that knows it.  The broker's `Registry` reads and writes the files by it, and the
`LocalStore`, which says the same as a tree of nodes, too.  The values are plain, and nothing of the
contract of stores is loaded for them: a broker that is alone has no other use for it.

``topics.json`` has a row for each topic::

    {"version": 1, "topics": {NAME: {"id": ID, "partitions": N, "configs": {...}}, ...}}

with ``"deleting": true`` in the row of a topic whose deletion is under way.  ``producer_ids`` has
the first producer id that no run of the broker has taken.  Both lie in the first log directory, and
are replaced whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdirect.errors import CorruptLogError, LogError
from kdirect.model import check_topic_name

TOPICS_FILE = "topics.json"
IDS_FILE = "producer_ids"
PRODUCER_ID_BLOCK = 1000
PRODUCER_ID_LIMIT = 1 << 62

Row = dict[str, Any]
_WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read_file(path: Path) -> bytes | None:
    """None without the file; LogError where it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise LogError(
            f"cannot read {path}: {e.strerror}",
            hint="check its permissions, restore it, or remove it",
        ) from e


def damaged_topics(path: Path, why: object) -> CorruptLogError:
    """The error of a file of topics that makes no sense."""
    return CorruptLogError(
        f"{path} is damaged: {why}",
        hint="restore it, or remove it: topics are then found by their directories, without their"
        " configs",
    )


def read_document(path: Path) -> tuple[dict[str, Row], dict[str, Any]] | None:
    """The rows of ``topics.json`` by topic, checked, and the whole document; None without the file.
    LogError, CorruptLogError."""
    text = read_file(path)
    if text is None:
        return None
    try:
        document = json.loads(text.decode())
        return {check_topic_name(n): _row(n, x) for n, x in document["topics"].items()}, document
    except _WRONG as e:
        raise damaged_topics(path, e) from e


def _row(name: str, found: Mapping[str, Any]) -> Row:
    row = new_row(
        str(found["id"]),
        int(found["partitions"]),
        {str(key): str(value) for key, value in found["configs"].items()},
        deleting=bool(found.get("deleting")),
    )
    if row["partitions"] < 1:
        raise ValueError(f"topic {name} has {row['partitions']} partitions")
    return row


def new_row(
    topic_id: str, partitions: int, configs: Mapping[str, str], *, deleting: bool = False
) -> Row:
    row: Row = {"id": topic_id, "partitions": partitions, "configs": dict(configs)}
    if deleting:
        row["deleting"] = True
    return row


def topics_text(rows: Mapping[str, Row], more: Mapping[str, Any] | None = None) -> bytes:
    """The file of these rows.  `more`: further keys, which a broker that is alone ignores, and
    drops when it writes the file."""
    document = {"version": 1, "topics": dict(rows), **(more or {})}
    return (json.dumps(document, indent=1) + "\n").encode()


def read_next_id(path: Path) -> int | None:
    """The first producer id that was never in a block; None without the file.  LogError,
    CorruptLogError."""
    text = read_file(path)
    try:
        next_id = None if text is None else int(text.decode())
        if next_id is not None and not 0 <= next_id < PRODUCER_ID_LIMIT:
            raise ValueError("the number is out of range")
    except ValueError as e:
        raise CorruptLogError(
            f"{path} is damaged: {(text or b'')[:40]!r}",
            hint="restore it, or remove it: producer ids then begin far above those in the log",
        ) from e
    return next_id


def next_id_text(next_id: int) -> bytes:
    """The file of producer ids."""
    return f"{next_id}\n".encode()
