"""The DataFrame of an accelerated query: control rows, tasks, figures, and what Spark still does.

Law: pure Spark API.  The stage of the tasks ends in an exchange: Spark runs a failed barrier stage
again if its output goes into a shuffle, and ends the query if it does not.  Rows go through it in
chunks, by the hash of a chunk's number, because a round robin would sort them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kdirect_spark.slash.slash_plan import SlashPlan
from kdirect_spark.slash.source import FORMAT, KdirectSlashSource
from kdirect_spark.slash.task import CHUNK, FIGURES, FIGURES_DDL, Chunks, run_task

POSITION = "position"
WATERMARK = "spark.watermarkDelayMs"  # in the metadata of a column


def frame_of(
    session: Any,
    plan: SlashPlan,
    options: dict[str, str],
    source: dict[str, Any],
    *,
    name: str,
    schema: Any,
) -> Any:
    """The DataFrame.  `options`: of the source of control rows; `source`: settings of the tasks'
    clients; `name`: of the observed figures; `schema`: Spark's of the result."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    session.dataSource.register(KdirectSlashSource)
    reader = session.readStream if plan.is_streaming else session.read
    control = reader.format(FORMAT).options(**options).load()
    columns = [_without_nulls(field) for field in StructType.fromDDL(plan.output_ddl)]
    declared = _chunks(columns, plan.constant_outputs)
    chunks = Chunks(
        to_arrow_schema(declared, timezone="UTC"), [field.type for field in plan.plan.output]
    )
    rows = control.mapInArrow(run_task(source, chunks), declared, barrier=True)
    rows = rows.observe(name, F.max(FIGURES).alias(FIGURES))
    partitions = int(session.conf.get("spark.sql.shuffle.partitions"))
    rows = rows.drop(FIGURES).repartition(partitions, F.col(CHUNK))
    rows = _taken_apart(rows, columns, plan.constant_outputs)
    if plan.having is not None:
        rows = rows.where(F.expr(plan.having))
    return _as_declared(rows, plan, schema)


def _chunks(columns: Sequence[Any], constant: Sequence[int]) -> Any:
    """The declaration of chunks of rows with these columns."""
    from pyspark.sql.types import ArrayType, LongType, StructField, StructType

    fields = [StructField(CHUNK, LongType(), False)]
    for i, column in enumerate(columns):
        kind = column.dataType
        if i not in constant:
            kind = ArrayType(kind, column.nullable)
        fields.append(StructField(_place(i), kind, False))
    return StructType([*fields, *StructType.fromDDL(FIGURES_DDL).fields])


def _place(number: int) -> str:
    """The name of a column within a chunk."""
    return f"column{number}"


def _taken_apart(rows: Any, columns: Sequence[Any], constant: Sequence[int]) -> Any:
    """The rows of chunks.  One generator gives them, and every other column is taken from its array
    by position.

    The row of figures, whose arrays are empty, has gone through the exchange too: the adaptive
    execution drops the stage before an exchange that is empty from the plan, and with it what was
    observed."""
    from pyspark.sql import functions as F

    places = range(len(columns))
    first = next(i for i in places if i not in constant)
    generated = F.posexplode_outer(_place(first)).alias(POSITION, _place(first))
    rows = rows.select(generated, *(_place(i) for i in places if i != first))
    rows = rows.where(F.col(POSITION).isNotNull())
    elements = [
        F.col(_place(i)) if i == first or i in constant else F.expr(f"{_place(i)}[{POSITION}]")
        for i in places
    ]
    return rows.select(*(_declared(element, column) for element, column in zip(elements, columns)))


def _without_nulls(field: Any) -> Any:
    """A column of the engine as it is declared: the values of a list are never null."""
    from pyspark.sql.types import ArrayType, StructField

    if not isinstance(field.dataType, ArrayType):
        return field
    return StructField(field.name, ArrayType(field.dataType.elementType, False), field.nullable)


def _as_declared(rows: Any, plan: SlashPlan, schema: Any) -> Any:
    """The columns of the result with the types, nullability and metadata that they have unwrapped.
    By its metadata Spark knows that a column is a window (`window_time`).  The watermark's is left
    out: no operator of this plan keeps it."""
    from pyspark.sql import functions as F

    values = [F.expr(column.sql) for column in plan.columns]
    found = rows.select(*values).schema.fields
    values = [
        value if had.dataType == wanted.dataType else value.cast(column.type)
        for value, column, had, wanted in zip(values, plan.columns, found, schema.fields)
    ]
    # SQL that was written back may tell more or less of nulls than the plan did: a constant becomes
    # a cast, a field of a window one of a struct.
    found = rows.select(*values).schema.fields
    columns = []
    for value, column, had, wanted in zip(values, plan.columns, found, schema.fields):
        if wanted.nullable and not had.nullable:
            value = F.when(value.isNotNull(), value)  # Spark drops the condition later
        elif had.nullable and not wanted.nullable:
            value = _never_null(value, had.dataType)
        metadata = {k: v for k, v in wanted.metadata.items() if k != WATERMARK}
        columns.append(value.alias(column.name, metadata=metadata))
    return rows.select(*columns)


# A value of each simple type, which is not null, and for Spark cannot be.
_NOTHING = {
    "boolean": "false", "string": "''", "binary": "CAST('' AS binary)",
    "date": "date_from_unix_date(0)", "timestamp": "timestamp_micros(0L)",
    **dict.fromkeys(("byte", "short", "integer", "long", "float", "double"), "0Y"),
    "decimal": "0.{}BD", "array": "array()",
}  # fmt: skip


def _never_null(value: Any, kind: Any) -> Any:
    """A value of the type `kind` of which Spark does not see that it is never null.  A struct stays
    as it is."""
    from pyspark.sql import functions as F

    text = _NOTHING.get(kind.typeName())
    if text is None:
        return value
    # A cast of a decimal may be null, but not where it keeps the digits behind the point.
    return F.coalesce(value, F.expr(text.format("0" * getattr(kind, "scale", 0))).cast(kind))


def _declared(element: Any, column: Any) -> Any:
    """An element of an array as the column that it is of."""
    if not column.nullable:
        element = _never_null(element, column.dataType)
    return element.alias(column.name)
