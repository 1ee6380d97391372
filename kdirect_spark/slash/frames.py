"""The DataFrame of an accelerated query: control rows, tasks, figures, and what Spark still does.

Law: pure Spark API.  The stage of the tasks ends in an exchange: Spark runs a failed barrier stage
again if its output goes into a shuffle, and ends the query if it does not.  The exchange goes by
hash, because a round robin would sort the rows first.
"""

from __future__ import annotations

from typing import Any

from kdirect_spark.slash.slash_plan import SlashPlan
from kdirect_spark.slash.source import FORMAT, KdirectSlashSource
from kdirect_spark.slash.spark_types import quoted
from kdirect_spark.slash.task import FIGURES, FIGURES_DDL, Rows, run_task


def frame_of(
    session: Any,
    plan: SlashPlan,
    options: dict[str, str],
    source: dict[str, Any],
    *,
    name: str,
) -> Any:
    """The DataFrame.  `options`: of the source of control rows; `source`: settings of the tasks'
    clients; `name`: of the observed figures."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    session.dataSource.register(KdirectSlashSource)
    reader = session.readStream if plan.is_streaming else session.read
    control = reader.format(FORMAT).options(**options).load()
    declared = StructType.fromDDL(f"{plan.output_ddl}, {FIGURES_DDL}")
    columns = Rows(
        to_arrow_schema(declared, timezone="UTC"),
        [field.type for field in plan.plan.output],
        [output.nullable for output in plan.outputs],
    )
    rows = control.mapInArrow(run_task(source, columns), declared, barrier=True)
    rows = rows.observe(name, F.max(FIGURES).alias(FIGURES))
    rows = rows.where(F.col(FIGURES).isNull()).drop(FIGURES)
    partitions = int(session.conf.get("spark.sql.shuffle.partitions"))
    rows = rows.repartition(partitions, F.col(quoted(plan.outputs[0].name)))
    if plan.having is not None:
        rows = rows.where(F.expr(plan.having))
    return rows.select(*(F.expr(c.sql).cast(c.type).alias(c.name) for c in plan.columns))
