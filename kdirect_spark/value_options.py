"""The options of values: which belong to which format, and what they say together.

Owns: `value_settings`.

Law: no I/O but for what `value_sources` looks up: a descriptor file, a registry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pyspark.sql.types import BinaryType, DataType, StringType, StructField, StructType

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.schema import Field, fields
from kdirect_spark.registry import RegistrySettings
from kdirect_spark.row_types import arrow_type, is_nested, nullable
from kdirect_spark.value_sources import avro_source, protobuf_source
from kdirect_spark.values import KAFKAS, ValueSettings, engine_fields, spark_type

_OPTION = "option valueSchema"
_GIVE_SCHEMA = {
    "fixed": 'write for example "user:int64, kind:int32, time:timestamp(ms)"',
    "json": 'write for example "user long, at timestamp(ms)", or give .schema(...)',
    "arrow": 'write for example "user long, at timestamp(ms)", or give .schema(...)',
    "avro": "leave it out, or name the columns that are wanted",
    "protobuf": "leave it out, or name the columns that are wanted",
}
_REGISTERED = ("avro", "protobuf")
# Options that one format has.
_OF_ONE = {
    "valueSize": ("fixed",),
    "avroSchema": ("avro",),
    "avroWriterSchema": ("avro",),
    "descriptorFile": ("protobuf",),
    "messageName": ("protobuf",),
    "valueFraming": ("json", "avro", "protobuf"),
    "schema.registry.url": ("json", "avro", "protobuf"),
}
CORRUPT = "_corrupt_record"  # Spark's default of columnNameOfCorruptRecord
_RENAMED = re.compile(r"(\S+)(?:\s+as\s+(\S.*))?", re.IGNORECASE)


def value_settings(
    options: Mapping[str, Any], *, topic: str | None, spark_schema: StructType | None
) -> ValueSettings:
    """The options of values, of which valueFormat is given.  `topic`: the only one that is read.
    `spark_schema` is the schema of the query where it is known, which is that of its rows where
    valueSchema is not given.  Raises ConfigError, SchemaRegistryError."""
    format = options["valueFormat"]
    _check_formats(options)
    text = options["valueSchema"]
    reader = options["avroSchema"]
    if format == "avro" and text is not None and _is_avro(text):
        if reader is not None:
            raise ConfigError(
                "options avroSchema and valueSchema both have a schema in Avro", hint="remove one"
            )
        text, reader = None, text
    found = _registry(options)
    common: dict[str, Any] = {
        "format": format,
        "mode": options["valueMode"] or ("FAILFAST" if format in _REGISTERED else "DROPMALFORMED"),
        "framed": _framed(options, found),
        "metadata": _metadata(options["metadataColumns"]),
    }
    if format == "fixed":
        return _fixed(options, common)
    what = ".schema(...)" if text is None else _OPTION
    given = _given(text, spark_schema)
    raw = StringType() if format == "json" else BinaryType()
    corrupt = _corrupt(options, given, raw)
    if format not in _REGISTERED:
        if given is None:
            raise ConfigError(f"valueFormat={format} needs valueSchema", hint=_GIVE_SCHEMA[format])
        return _of_engine(given, what, common, corrupt, text is None or _is_json(text))
    subject = options["schema.registry.subject"] or (topic and f"{topic}-value")
    wanted = _wanted(given, common, corrupt)
    sources: dict[str, Any] = {}
    if format == "avro":
        sources["avro"], row = avro_source(
            reader, options["avroWriterSchema"], wanted, found, subject
        )
    else:
        sources["protobuf"], row = protobuf_source(
            options["descriptorFile"], options["messageName"], wanted, found, subject
        )
    _check_apart(common["metadata"], row.names)
    return ValueSettings(schema=row, registry=found, **common, **corrupt, **sources)


def _check_formats(options: Mapping[str, Any]) -> None:
    format, text = options["valueFormat"], options["valueSchema"]
    for name, formats in _OF_ONE.items():
        if options[name] is not None and format not in formats:
            raise ConfigError(
                f"option {name} is for valueFormat={' or '.join(formats)}, not {format}",
                hint="remove it",
            )
    if text is not None and not text.strip():
        raise ConfigError("option valueSchema is empty", hint=_GIVE_SCHEMA[format])


def _fixed(options: Mapping[str, Any], common: dict[str, Any]) -> ValueSettings:
    text = options["valueSchema"]
    if text is None:
        raise ConfigError("valueFormat=fixed needs valueSchema", hint=_GIVE_SCHEMA["fixed"])
    layout = _layout(text, options["valueSize"])
    own = fields(layout.schema(), _OPTION)
    _check_apart(common["metadata"], [f.name for f in own])
    return ValueSettings(
        fields=own, layout=layout, **common, **_corrupt(options, None, BinaryType())
    )


def _wanted(
    given: StructType | tuple[Field, ...] | None, common: dict[str, Any], corrupt: dict[str, Any]
) -> StructType | None:
    """The columns of the value that the query's schema names; None for all of them."""
    if given is None:
        return None
    apart = {name.lower() for name in (*common["metadata"], corrupt.get("corrupt", ""))}
    return StructType([f for f in _as_row(given) if f.name.lower() not in apart])


def nullable_row(schema: StructType, what: str) -> StructType:
    """The schema, whose columns may all be null.  Raises ConfigError."""
    for f in schema.fields:
        if not f.nullable:
            raise ConfigError(
                f"{what}: column {f.name} is NOT NULL, which values do not promise",
                hint="leave NOT NULL out",
            )
    row = nullable(schema)
    assert isinstance(row, StructType)
    return row


def _of_engine(
    given: StructType | tuple[Field, ...],
    what: str,
    common: dict[str, Any],
    corrupt: dict[str, Any],
    may_name_kafkas: bool,
) -> ValueSettings:
    """Values in JSON and Arrow: by the engine's types if it has them all."""
    apart = {name.lower() for name in common["metadata"]}
    hidden = corrupt.get("corrupt")
    if isinstance(given, tuple):
        _check_apart(common["metadata"], [f.name for f in given])
        own = tuple(f for f in given if f.name != hidden)
        if hidden is None or len(own) == len(given):
            return ValueSettings(fields=given, **common, **corrupt)
        given = _as_row(given)
    row = StructType([f for f in given if f.name.lower() not in apart])
    if not may_name_kafkas:
        _check_apart(common["metadata"], given.names)
    if not row.names:
        raise ConfigError(f"{what}: there is no column", hint="name the columns of a value")
    is_nested_row = any(is_nested(f.dataType) for f in row)
    if common["format"] == "json" and (is_nested_row or hidden in row.names):
        for f in row:
            arrow_type(f.dataType, f"{what}: column {f.name}")
        return ValueSettings(schema=row, **common, **corrupt)
    return ValueSettings(fields=engine_fields(row, what), **common, **corrupt)


def _given(
    text: str | None, spark_schema: StructType | None
) -> StructType | tuple[Field, ...] | None:
    """The schema that the query gives, in the engine's types or in Spark's."""
    if text is None:
        return None if spark_schema is None else nullable_row(spark_schema, ".schema(...)")
    if _is_json(text):
        return nullable_row(_from_json(text), _OPTION)
    return fields(text, _OPTION)


def _as_row(given: StructType | tuple[Field, ...]) -> StructType:
    if isinstance(given, StructType):
        return given
    return StructType([StructField(f.name, spark_type(f.type)) for f in given])


def _corrupt(
    options: Mapping[str, Any],
    given: StructType | tuple[Field, ...] | None,
    raw: DataType,
) -> dict[str, Any]:
    """What of a ValueSettings says where values stand that do not decode.  The schema of a query
    may have the column; Spark's own name counts there without the option."""
    name = options["columnNameOfCorruptRecord"]
    there = {} if given is None else {f.name: f.dataType for f in _as_row(given)}
    if name is None:
        if CORRUPT not in there:
            return {}
        name = CORRUPT
    name = name.strip()
    kind = there.get(name, raw)
    if kind not in (StringType(), BinaryType()):
        raise ConfigError(
            f"column {name} of values that do not decode is {kind.simpleString()}",
            hint="make it a string, or binary",
        )
    if options["valueMode"] not in (None, "PERMISSIVE") or (
        options["valueMode"] is None and options["columnNameOfCorruptRecord"] is not None
    ):
        raise ConfigError(
            f"column {name}: values that do not decode have a row in valueMode=PERMISSIVE only",
            hint="set valueMode=PERMISSIVE",
        )
    return {"corrupt": name, "corrupt_type": kind}


def _metadata(names: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    kafkas = {name.lower(): name for name in KAFKAS}
    for text in names or ():
        match = _RENAMED.fullmatch(text.strip())
        column = match and kafkas.get(match[1].lower())
        if match is None or column is None:
            raise ConfigError(
                f"option metadataColumns: {text!r} is no column of Kafka's",
                hint=f"choose from {', '.join(KAFKAS)}; write for example offset as kafka_offset",
            )
        name = match[2] or column
        if name.lower() in {other.lower() for other in found}:
            raise ConfigError(
                f"option metadataColumns: two columns have the name {name}", hint="rename one"
            )
        found[name] = column
    return found


def _check_apart(metadata: Mapping[str, str], names: list[str]) -> None:
    there = {name.lower(): name for name in names}
    for name, column in metadata.items():
        if name.lower() in there:
            raise ConfigError(
                f"option metadataColumns: the value has a column {there[name.lower()]} too",
                hint=f"write for example {column} as kafka_{column}",
            )


def _registry(options: Mapping[str, Any]) -> RegistrySettings | None:
    url = options["schema.registry.url"]
    if url is None:
        for name in options:
            if name.startswith("schema.registry.") and options[name] is not None:
                if name != "schema.registry.timeout.ms":
                    raise ConfigError(
                        f"option {name} has no effect without schema.registry.url",
                        hint="give the registry's address too",
                    )
        return None
    return RegistrySettings(
        url=url.strip().rstrip("/"),
        subject=options["schema.registry.subject"],
        timeout_ms=options["schema.registry.timeout.ms"],
        ca_location=options["schema.registry.ssl.ca.location"],
        user_info=options["schema.registry.secret.basic.auth.user.info"],
        token=options["schema.registry.secret.bearer.auth.token"],
    )


def _framed(options: Mapping[str, Any], found: RegistrySettings | None) -> bool:
    framing = options["valueFraming"]
    if framing is None:
        return found is not None
    if framing == "none" and found is not None:
        raise ConfigError(
            "options valueFraming=none and schema.registry.url exclude each other",
            hint="remove one: it is Confluent's frame that names the schema of a value",
        )
    return bool(framing == "confluent")


def _is_json(text: str | None) -> bool:
    return text is not None and text.lstrip().startswith("{")


def _is_avro(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("type") == "record"


def _layout(text: str, size: int | None) -> FixedLayout:
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    try:
        return FixedLayout.of(*parts, size=size)
    except ConfigError as e:
        raise ConfigError(f"{_OPTION}: {e.message}", hint=e.hint) from None


def _from_json(text: str) -> StructType:
    """A schema in Spark's own JSON (`df.schema.json()`): what the shim passes on."""
    try:
        return StructType.fromJson(json.loads(text))
    except Exception as e:  # Spark's errors for what is no schema are of many kinds
        raise ConfigError(
            f"{_OPTION}: this JSON is no schema of Spark ({e!r})",
            hint="write names and types, or what df.schema.json() returns",
        ) from None
