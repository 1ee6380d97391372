"""Makes the files of `plans/` anew, from the installed Spark: ``python tests/slash/make_plans.py``.

Each file of a query has its analyzed plan (``plan`` and ``text``), the schema, and, where the query
is supported, beside it the `SlashPlan` that it is read to.  Look at what changes before you keep
it: the tests compare with these files."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    # At the end: what is installed comes before the sources of the same name.
    sys.path.append(str(HERE.parent.parent))

from kdirect_spark.slash import read_plan, read_tree  # noqa: E402
from tests.slash import queries  # noqa: E402

PLANS = HERE / "plans"
_JVM = re.compile(r'"jvmId":"[0-9a-f-]+"')
_OBJECT = re.compile(r"org\.apache\.spark\.[\w.]+@[0-9a-f]+")


def start():
    """A session with a data source `kdirect` that has the columns of its option `ddl`."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[1]").appName("plans of the slash tests")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "1",
        # Compiling queries would take longer than running them over some hundred rows.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def register(spark, rows=None) -> None:
    """`rows` has for the option `ddl` of a relation the rows that a batch of it gives."""
    from pyspark.sql.datasource import DataSource, DataSourceReader

    class Rows(DataSourceReader):
        def __init__(self, held):
            self.held = held

        def read(self, partition):
            yield from self.held

    class TypedTopics(DataSource):
        """The columns of a topic with a valueFormat."""

        @classmethod
        def name(cls):
            return "kdirect"

        def schema(self):
            return self.options["ddl"]

        def reader(self, schema):
            return Rows(rows[self.options["ddl"]])

        def streamReader(self, schema):
            raise NotImplementedError

    spark.dataSource.register(TypedTopics)


def analyzed(df) -> dict:
    """What is kept of a DataFrame's plan."""
    plan = df._jdf.queryExecution().analyzed()
    text = plan.treeString(True, True, (1 << 31) - 1, False, False)
    return {
        "plan": _JVM.sub('"jvmId":""', plan.toJSON()),
        "text": _OBJECT.sub("", text),
        "schema": df.schema.json(),
    }


def made(spark, query, zone: str = "UTC") -> dict:
    import pyspark.sql.functions as F

    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        return analyzed(query(spark, F))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def conditions(spark) -> dict:
    """One plan with all conditions, as columns."""
    import pyspark.sql.functions as F

    given = [*queries.CONDITIONS, *queries.REFUSED_CONDITIONS]
    return analyzed(queries.typed(spark, False).select(*(F.expr(c).alias(c) for c in given)))


def read(kept: dict, leaves, zone: str = "UTC", ansi: bool = True):
    tree = read_tree(kept["plan"], kept["text"])
    return read_plan(tree, leaves, schema=kept["schema"], ansi=ansi, time_zone=zone)


def main() -> None:
    import pyspark

    folder = PLANS / ".".join(pyspark.__version__.split(".")[:2])
    folder.mkdir(parents=True, exist_ok=True)
    spark = start()
    register(spark)
    for name, (query, leaves) in queries.SUPPORTED.items():
        zone = queries.ZONES.get(name, "UTC")
        kept = made(spark, query, zone)
        (folder / f"{name}.json").write_text(json.dumps(kept) + "\n")
        expected = json.dumps(read(kept, leaves, zone).to_json(), indent=1, sort_keys=True)
        (folder / f"{name}.slash.json").write_text(expected + "\n")
    for name, (query, *_) in queries.REFUSED.items():
        kept = made(spark, query)
        (folder / f"refused-{name}.json").write_text(json.dumps(kept) + "\n")
    (folder / "conditions.json").write_text(json.dumps(conditions(spark)) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
