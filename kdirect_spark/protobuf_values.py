"""Values in Protobuf become columns, by ptars, which decodes whole batches into Arrow.

Owns: `ProtobufMessage`, a message of a set of descriptors and the row of Spark's that it is;
`ProtobufValues`, its decoder.

Law: no I/O but for schemas by their ids.  google.protobuf and ptars are imported here only, at
first use.

Fields without presence have their defaults where they are not set, as in Protobuf's own languages;
those with presence (`optional`, messages, members of a oneof) are null.  Numbers without a sign
become the next wider type, enums their names.
"""

from __future__ import annotations

import base64
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from kdirect.errors import ConfigError, MissingPackageError
from kdirect_spark.registry import FRAME, NO_FRAME, schema_id
from kdirect_spark.row_types import arrow_type, spark_type
from kdirect_spark.value_decoders import Bad, Decoded, halving, joined

# What ptars makes of times that 64 bits cannot hold in microseconds.
_CLAMPED = (-(2**63), 2**63 - 1)
_WELL_KNOWN = ("any", "duration", "empty", "field_mask", "struct", "timestamp", "wrappers")
_PACKAGES = "valueFormat=protobuf needs the packages protobuf and ptars"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise MissingPackageError(
            f"{_PACKAGES} ({e})",
            hint="pip install 'kdirect[protobuf]' where the driver and the executors run",
        ) from e


class ProtobufMessage:
    """The message `name` of a FileDescriptorSet, given as bytes.  The last part of a name is enough
    where one message alone has it; without a name the set must have one message, or it is the first
    of the last file.  `what` says in errors where the set is from.  Raises ConfigError."""

    def __init__(self, descriptors: bytes, name: str | None, what: str) -> None:
        self.descriptors = descriptors
        self._what = what
        pb2 = _library("google.protobuf.descriptor_pb2")
        try:
            files = pb2.FileDescriptorSet.FromString(descriptors).file
        except Exception as e:  # the library's DecodeError has several homes
            raise ConfigError(f"{what} is no set of descriptors: {e}", hint=_PROTOC) from None
        if not files:
            raise ConfigError(f"{what} has no file in it", hint=_PROTOC)
        self._pool = self._pool_of(files)
        self.name = self._found(files, name)
        self._descriptor = self._pool.FindMessageTypeByName(self.name)
        self._check(self._descriptor, ())
        #: Where the message is among those of its file, as Confluent's frame says it.
        self.path = _path(self._descriptor)
        self._handler = self._handler_of()
        self._kinds = {f.name: _without_empty(spark_type(f.type)) for f in self._arrow_schema()}
        self._kinds = {name: kind for name, kind in self._kinds.items() if kind is not None}
        if not self._kinds:
            raise ConfigError(f"{what}: the message {self.name} has no fields", hint="name another")

    @property
    def row(self) -> StructType:
        """Spark's type of a value."""
        return StructType([StructField(name, kind) for name, kind in self._kinds.items()])

    def target(self, name: str) -> pa.DataType:
        """Arrow's type of what Spark takes for a column."""
        return arrow_type(self._kinds[name], name)

    def decode(self, values: pa.Array, columns: Iterable[str]) -> list[pa.Array]:
        """The columns of these messages.  ValueError or ArrowException if one does not decode."""
        batch = self._batch_of(values)
        found = []
        for name in columns:
            column, wanted = batch.column(name), self.target(name)
            _refuse_clamped(column, name)
            column = last_of_each_key(column)
            found.append(column if column.type == wanted else pc.cast(column, wanted))
        return found

    def _batch_of(self, values: pa.Array) -> pa.RecordBatch:
        try:
            return self._handler.array_to_record_batch(values)
        except BaseException as e:
            # A promised length of almost 2^64 bytes overflows within ptars, whose Rust code panics:
            # PyO3 raises that as what is no Exception, so that it would end the query.
            if type(e).__name__ != "PanicException":
                raise
            raise ValueError(f"its decoder fails: {e}") from None

    def _handler_of(self) -> Any:
        ptars = _library("ptars")
        config = ptars.PtarsConfig(enum_repr="string", timestamp_unit="us", duration_unit="us")
        try:
            pool = ptars.HandlerPool([self._descriptor.file], config=config)
            return pool.get_for_message(self._descriptor)
        except Exception as e:
            raise ConfigError(
                f"{self._what}: the message {self.name} is not understood: {e}", hint=_PROTOC
            ) from None

    def _arrow_schema(self) -> pa.Schema:
        return self._handler.array_to_record_batch(pa.array([], pa.binary())).schema

    def _pool_of(self, files: Sequence[Any]) -> Any:
        pool = _library("google.protobuf.descriptor_pool").DescriptorPool()
        pb2 = _library("google.protobuf.descriptor_pb2")
        there = {f.name for f in files}
        given = list(files)
        for name in _WELL_KNOWN:  # a set without its imports may lack them
            path = f"google/protobuf/{name}.proto"
            if path not in there:
                copy = pb2.FileDescriptorProto()
                _library(f"google.protobuf.{name}_pb2").DESCRIPTOR.CopyToProto(copy)
                given.insert(0, copy)
        try:
            for f in given:
                pool.Add(f)
            for f in files:
                pool.FindFileByName(f.name)
        except Exception as e:
            raise ConfigError(f"{self._what} is not complete: {e}", hint=_PROTOC) from None
        return pool

    def _found(self, files: Sequence[Any], name: str | None) -> str:
        if name is None:
            last = files[-1]
            if not last.message_type:
                raise ConfigError(f"{self._what} has no message", hint="see messageName")
            return ".".join(filter(None, (last.package, last.message_type[0].name)))
        there = [n for f in files for n in _names(f.package, f.message_type)]
        wanted = name.strip().lstrip(".")
        found = [n for n in there if n == wanted] or [
            n for n in there if n.rpartition(".")[2] == wanted
        ]
        if len(found) == 1:
            return found[0]
        which = ", ".join((found or there)[:20])
        raise ConfigError(
            f"option messageName: {self._what} has {'several messages' if found else 'no message'} "
            f"{wanted}",
            hint=f"choose one of {which}",
        )

    def _check(self, message: Any, above: tuple[str, ...]) -> None:
        """Refuse what rows cannot have."""
        if message.full_name in above:
            raise ConfigError(
                f"{self._what}: {self.name} has a {message.full_name} within a {message.full_name}",
                hint="Spark has no types that contain themselves",
            )
        for f in message.fields:
            if f.type == f.TYPE_GROUP:
                raise ConfigError(
                    f"{self._what}: {f.full_name} is a group, which is not read",
                    hint="make it a message",
                )
            if f.message_type is not None:
                self._check(f.message_type, (*above, message.full_name))


def descriptor_set(files: Iterable[tuple[str, str]], what: str) -> bytes:
    """A FileDescriptorSet of a registry's schemas in serialized form (base64), each with the name
    that others import it by.  Raises ConfigError."""
    pb2 = _library("google.protobuf.descriptor_pb2")
    out = pb2.FileDescriptorSet()
    try:
        for name, text in files:
            file = pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
            file.name = name or file.name or "value.proto"
            out.file.append(file)
    except Exception as e:  # the library's DecodeError has several homes
        raise ConfigError(
            f"{what}: the registry does not give it in serialized form ({e})",
            hint="give descriptorFile and messageName instead",
        ) from None
    return bytes(out.SerializeToString())


_PROTOC = "write it with protoc --include_imports --descriptor_set_out=FILE"


class ProtobufValues:
    """Reads `columns` of values that are `message`s.  With `framed`, each value begins with
    Confluent's frame: a byte 0, a schema's id, and the place of the message in that schema.  The
    id is not looked up: fields are found by their numbers, whatever else a schema has."""

    def __init__(
        self, message: ProtobufMessage, columns: Iterable[str], *, framed: bool = False
    ) -> None:
        self._message = message
        self._columns = list(columns)
        self._framed = framed
        self._targets = [message.target(name) for name in self._columns]

    def decode(self, values: pa.Array) -> Decoded:
        bad: list[Bad] = []
        good = np.arange(len(values), dtype=np.int64)
        if self._framed:
            values, good, bad = self._unframed(values)
        parts, kept, worse = halving(
            values,
            len(values),
            lambda start, stop: self._message.decode(
                values.slice(start, stop - start), self._columns
            ),
            lambda i, e: Bad(int(good[i]), "", f"it is no {self._message.name} ({_said(e)})"),
        )
        records = good[np.concatenate(kept)] if kept else good[:0]
        bad = sorted(bad + worse, key=lambda row: row.record) if worse else bad
        return Decoded(joined(parts, self._targets), records, bad)

    def _unframed(self, values: pa.Array) -> tuple[pa.Array, np.ndarray, list[Bad]]:
        out: list[bytes] = []
        good: list[int] = []
        bad: list[Bad] = []
        wanted = self._message.path
        for i, value in enumerate(values.to_pylist()):
            if schema_id(value) is None:
                bad.append(Bad(i, "", NO_FRAME))
                continue
            if value[FRAME : FRAME + 1] == b"\0":  # the short form of a schema's first message
                at = FRAME + 1
                path: tuple[int, ...] = (0,)
            else:
                path, at = _path_in(value)
            if path != wanted:
                why = f"its frame names message {list(path)} of its schema, not {list(wanted)}"
                bad.append(Bad(i, "", why if path else f"{NO_FRAME}, and the place of a message"))
                continue
            out.append(value[at:])
            good.append(i)
        return pa.array(out, pa.binary()), np.array(good, np.int64), bad


def _path_in(value: bytes) -> tuple[tuple[int, ...], int]:
    """The place of a message in its schema, as numbers in zigzag after their count, and where the
    message begins; () for what is none."""
    at = FRAME
    numbers: list[int] = []
    count = 1
    while len(numbers) <= count:
        number, shift = 0, 0
        while True:
            if at >= len(value) or shift > 28:
                return (), at
            byte = value[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        number = (number >> 1) ^ -(number & 1)
        numbers.append(number)
        count = numbers[0]
        if not 0 < count <= 64 or number < 0:
            return (), at
    return tuple(numbers[1:]), at


def _path(descriptor: Any) -> tuple[int, ...]:
    path: list[int] = []
    while descriptor is not None:
        parent = descriptor.containing_type
        of_file = descriptor.file.message_types_by_name.values()
        beside = of_file if parent is None else parent.nested_types
        path.insert(0, [d.full_name for d in beside].index(descriptor.full_name))
        descriptor = parent
    return tuple(path)


def _names(package: str, messages: Iterable[Any]) -> Iterable[str]:
    for message in messages:
        full = ".".join(filter(None, (package, message.name)))
        yield full
        yield from _names(full, (m for m in message.nested_type if not m.options.map_entry))


def _without_empty(kind: DataType) -> DataType | None:
    """The type without messages that have no fields, which no column can be; None for such a
    message."""
    if isinstance(kind, StructType):
        some = [(f.name, _without_empty(f.dataType)) for f in kind]
        left = [StructField(name, found) for name, found in some if found is not None]
        return StructType(left) if left else None
    if isinstance(kind, ArrayType):
        element = _without_empty(kind.elementType)
        return None if element is None else ArrayType(element)
    if isinstance(kind, MapType):
        found = _without_empty(kind.valueType)
        return None if found is None else MapType(kind.keyType, found)
    return kind


def _refuse_clamped(column: pa.Array, name: str) -> None:
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        ends = pc.min_max(column.view(pa.int64())).as_py()
        if ends["min"] == _CLAMPED[0] or ends["max"] == _CLAMPED[1]:
            raise ValueError(f"{name}: a time that microseconds of 64 bits cannot hold")
    elif pa.types.is_struct(kind):
        for i, child in enumerate(kind):
            _refuse_clamped(column.field(i), f"{name}.{child.name}")
    elif pa.types.is_map(kind):
        _refuse_clamped(column.items, name)
    elif pa.types.is_list(kind):
        _refuse_clamped(column.values, name)


def last_of_each_key(column: pa.Array) -> pa.Array:
    """The column with maps in which each key is once: of a key that a message has twice, the last
    one counts, as Protobuf prescribes.  ptars keeps both, and Spark's maps must not have them."""
    kind = column.type
    if pa.types.is_map(kind):
        return _without_earlier(column)
    if pa.types.is_struct(kind):
        parts = [column.field(i) for i in range(kind.num_fields)]
        mended = [last_of_each_key(part) for part in parts]
        if all(new is old for new, old in zip(mended, parts)):
            return column
        return pa.StructArray.from_arrays(mended, fields=list(kind), mask=column.is_null())
    if pa.types.is_list(kind):
        items = column.flatten()
        mended_items = last_of_each_key(items)
        if mended_items is items:
            return column
        return pa.ListArray.from_arrays(
            _offsets(_lengths(column)), mended_items, type=kind, mask=column.is_null()
        )
    return column


def _without_earlier(column: pa.Array) -> pa.Array:
    lengths = _lengths(column)
    ends = _offsets(lengths).to_numpy()
    first = column.offsets[0].as_py() if len(column) else 0
    keys = column.keys.slice(first, int(ends[-1]))
    items = column.items.slice(first, int(ends[-1]))
    row = np.repeat(np.arange(len(column)), lengths)
    code = pc.dictionary_encode(keys).indices.to_numpy(zero_copy_only=False)
    entry = row.astype(np.int64) * (len(keys) + 1) + code
    newest = len(keys) - 1 - np.unique(entry[::-1], return_index=True)[1]
    mended = last_of_each_key(items)
    if len(newest) == len(keys) and mended is items:
        return column
    kept = pa.array(np.sort(newest))
    rows = np.bincount(row[np.sort(newest)], minlength=len(column))
    offsets = _offsets(rows)
    if column.null_count:
        offsets = pc.if_else(pa.concat_arrays([column.is_valid(), pa.array([True])]), offsets, None)
    return pa.MapArray.from_arrays(offsets, keys.take(kept), mended.take(kept), type=column.type)


def _lengths(column: pa.Array) -> np.ndarray:
    lengths = np.diff(column.offsets.to_numpy())
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), lengths, 0)


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
