"""Types of Spark beside those of the engine: names, ranges, and text of declarations.  Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from kdirect.errors import FormatError
from kdirect_spark.slash.refusal import unsupported
from kdirect_spark.values import spark_type

INTEGERS = {"byte": 8, "short": 16, "integer": 32, "long": 64}  # bits
DIGITS = {"byte": 3, "short": 5, "integer": 10, "long": 20}  # as Spark takes them for decimals
FLOATS = ("float", "double")
_DDL = {
    "byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "float": "float",
    "double": "double", "boolean": "boolean", "string": "string", "binary": "binary",
    "date": "date", "timestamp_ntz": "timestamp_ntz",
    # What TIMESTAMP alone means is a setting of the session (spark.sql.timestampType).
    "timestamp": "timestamp_ltz",
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")


def decimal_of(name: str) -> tuple[int, int] | None:
    """(precision, scale) of Spark's name of a decimal type, or None."""
    match = _DECIMAL.fullmatch(name)
    if match is None:
        return None
    precision, scale = int(match[1]), int(match[2])
    return (precision, scale) if 1 <= precision <= 38 and scale <= precision else None


def spark_name(kind: str) -> str:
    """The name in Spark's JSON of the type that a column of the engine has there."""
    return str(spark_type(kind).jsonValue())


def engine_ddl(kind: str) -> str:
    """The declaration of what a column of the engine is in Spark; ``list<t>`` is an array."""
    if kind.startswith("list<"):
        return f"array<{engine_ddl(kind[5:-1])}>"
    return ddl(spark_name(kind))


def ddl(name: Any) -> str:
    """The declaration of a type: of its name in Spark's JSON, of the JSON of a nested type as an
    object, or of its text."""
    if isinstance(name, str) and name.startswith("{"):
        try:
            name = json.loads(name)
        except (ValueError, RecursionError) as e:
            raise FormatError(f"type: {name[:60]!r} is no type: {e}") from e
    if isinstance(name, dict):
        return _nested(name)
    if not isinstance(name, str):
        raise FormatError(f"type: {name!r} is no type")
    if decimal_of(name):
        return name
    if name not in _DDL:
        raise unsupported(f"the type {name} is not supported", "cast it to another type")
    return _DDL[name]


def _nested(value: dict[str, Any]) -> str:
    if value.get("type") == "array":
        return f"array<{ddl(value.get('elementType'))}>"
    if value.get("type") == "map":
        return f"map<{ddl(value.get('keyType'))},{ddl(value.get('valueType'))}>"
    fields = value.get("fields")
    if value.get("type") != "struct" or not isinstance(fields, list):
        raise FormatError("type: this is no type of Spark")
    found = []
    for field in fields:
        if not isinstance(field, dict) or not isinstance(field.get("name"), str):
            raise FormatError("type: a field of a struct has no name")
        found.append(f"{quoted(field['name'])}:{ddl(field.get('type'))}")
    return f"struct<{','.join(found)}>"


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
