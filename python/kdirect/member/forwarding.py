"""Questions to the controller, and its answers, as bytes for the message AskController.

The body is JSON: the fields of the request's tuple in their order, each as its type says.

==================  ============================================================================
type                as JSON
==================  ============================================================================
int, str, bool      itself
an enum             its value
UUID                its 32 hexadecimal digits
X or None           null, or X
tuple, list of X    a list
a named tuple       a list of its fields
mapping             a list of pairs
==================  ============================================================================

A body comes from another process, which may be anybody: whatever does not fit the types is one
`ProtocolError`.  A tag is the asker's own and does not travel.
"""

from __future__ import annotations

import collections.abc
import enum
import json
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kdirect.cluster import partition_state, requests
from kdirect.cluster.codes import Code, Outcome
from kdirect.cluster.requests import (
    REQUESTS,
    AlterInSync,
    Answer,
    CreatedTopic,
    CreateTopic,
    ElectLeaders,
    InSyncAnswer,
    ListReassignments,
    Reassign,
    ReassignmentRow,
    ReplicasFailed,
    Request,
    RowOutcome,
    ShutDown,
)
from kdirect.errors import ProtocolError
from kdirect.model import TopicPartition

_MOST = 2**63 - 1
_KINDS = {kind.__name__: kind for kind in REQUESTS}
# What the rows of an answer are, by the request.  Others have none.
_ROWS: Mapping[type, type] = {
    CreateTopic: CreatedTopic,
    AlterInSync: InSyncAnswer,
    ElectLeaders: RowOutcome,
    Reassign: RowOutcome,
    ReplicasFailed: RowOutcome,
    ListReassignments: ReassignmentRow,
    ShutDown: TopicPartition,
}


class _Codec(NamedTuple):
    """`write` makes what `json` takes; `read` makes a value of what it gives, or raises
    ValueError."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def encode_request(request: Request) -> tuple[str, bytes]:
    """(kind, body) of AskController."""
    codec = _codec(type(request))
    return type(request).__name__, _dump(codec.write(request))


def decode_request(kind: str, body: bytes) -> Request:
    """The request, with None as its tag.  ProtocolError: it is none."""
    found = _KINDS.get(kind)
    if found is None:
        raise ProtocolError(f"{kind[:40]!r} is no request to a controller")
    request: Request = _load(body, _codec(found), f"request {kind}")
    return request


def encode_answer(answer: Answer, request: Request) -> tuple[int, bytes]:
    """(error code, body) of the answer to `request`."""
    row = _ROWS.get(type(request))
    rows = [_codec(row).write(r) for r in answer.rows] if row is not None else []
    return int(answer.outcome.code), _dump([answer.outcome.message, rows])


def decode_answer(code: int, body: bytes, request: Request) -> Answer:
    """The answer to `request`, with its tag.  ProtocolError: it is none."""
    row = _ROWS.get(type(request))
    what = f"answer to {type(request).__name__}"
    rows = _list_of(_codec(row)) if row is not None else _list_of(_NOTHING)
    message, found = _load(body, _fields([_TEXT, rows], tuple), what)
    try:
        outcome = Outcome(Code(code), message)
    except ValueError:
        text = f"code {code}, which this broker does not know"
        outcome = Outcome(Code.UNKNOWN_SERVER_ERROR, f"{text}: {message}" if message else text)
    return Answer(request.tag, outcome, found)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(body: bytes, codec: _Codec, what: str) -> Any:
    try:
        return codec.read(json.loads(bytes(body)))
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"a malformed {what}: {str(e)[:200]}") from e


# -- codecs by type --------------------------------------------------------------------------------


def _plain(kind: Any) -> _Codec:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
        if kind is int and not -_MOST - 1 <= value <= _MOST:
            raise ValueError("a number has more than 64 bits")
        if kind is str:
            value.encode()  # half of a surrogate pair is a ValueError
        return value

    return _Codec(kind, read)


def _refuse(value: Any) -> Any:
    raise ValueError("rows where there are none")


_TEXT = _plain(str)
_NOTHING = _Codec(_refuse, _refuse)
_codecs: dict[Any, _Codec] = {int: _plain(int), str: _TEXT, bool: _plain(bool)}


def _codec(kind: Any) -> _Codec:
    found = _codecs.get(kind)
    if found is None:
        found = _codecs[kind] = _make(kind)
    return found


def _make(kind: Any) -> _Codec:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (only,) = (x for x in inner if x is not type(None))
        return _or_none(_codec(only))
    if origin is collections.abc.Mapping:
        return _mapping(_codec(inner[0]), _codec(inner[1]))
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return _list_of(_codec(inner[0]))
        return _fields([_codec(x) for x in inner], tuple)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _Codec(lambda value: value.value, kind)
    if kind is uuid.UUID:
        return _Codec(lambda value: value.hex, lambda text: uuid.UUID(hex=_TEXT.read(text)))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named(kind)
    raise TypeError(f"no codec for {kind}")


def _or_none(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else codec.write(value),
        lambda value: None if value is None else codec.read(value),
    )


def _read_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is no list")
    return value


def _list_of(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value: [codec.write(x) for x in value],
        lambda value: tuple(codec.read(x) for x in _read_list(value)),
    )


def _mapping(key: _Codec, value: _Codec) -> _Codec:
    pair = _fields([key, value], tuple)
    return _Codec(
        lambda mapping: [pair.write(item) for item in mapping.items()],
        lambda rows: dict(pair.read(row) for row in _read_list(rows)),
    )


def _fields(codecs: list[_Codec], make: Callable[[list[Any]], Any]) -> _Codec:
    def read(value: Any) -> Any:
        if len(_read_list(value)) != len(codecs):
            raise ValueError(f"{len(value)} fields in place of {len(codecs)}")
        return make([codec.read(x) for codec, x in zip(codecs, value, strict=True)])

    return _Codec(
        lambda value: [codec.write(x) for codec, x in zip(codecs, value, strict=True)], read
    )


def _named(kind: Any) -> _Codec:
    """A named tuple by the types of its fields, but for `tag`."""
    names = {**vars(requests), **vars(partition_state), "TopicPartition": TopicPartition}
    hints = typing.get_type_hints(kind, names)
    carried = [name for name in kind._fields if name != "tag"]
    inner = _fields([_codec(hints[name]) for name in carried], tuple)

    def read(value: Any) -> Any:
        fields = dict(zip(carried, inner.read(value), strict=True))
        return kind(None, **fields) if "tag" in kind._fields else kind(**fields)

    return _Codec(lambda value: inner.write([getattr(value, name) for name in carried]), read)
