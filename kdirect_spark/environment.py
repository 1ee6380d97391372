"""Spark sessions with settings that suit the connector.

Law: a user may override every setting.  None of them is needed for correct results, except that
Spark's planner must find this interpreter (PYSPARK_PYTHON).
"""

from __future__ import annotations

import os
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

# conf -> (value, why).  Set unless the builder has them already.
CONFS = {
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "over TCP loopback every Python task stalls for about 40 ms (pyspark 4.1 and later)",
    ),
    "spark.sql.execution.arrow.maxBytesPerBatch": (
        "1MB",
        "larger batches slow the sink down with rows of 1 KiB",
    ),
}


# With a local master, Spark's checkpoints are local files.  The default class starts a process for
# chmod for each file: two files in a micro-batch, some 30 ms each.
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
PLAIN_FILES = "FileSystemBasedCheckpointFileManager"


def configure(builder: Any) -> Any:
    """Add to a `SparkSession.builder` what the connector runs best with, and return the builder.

    Adds settings, and the shim's jar, with which records stay columns in the JVM
    (`kdirect_spark.shim`); set ``spark.kdirect.columnar`` to ``false`` to leave the jar out.  Also
    sets PYSPARK_PYTHON to the running interpreter unless it is set.  Spark's planner otherwise
    takes the first `python3` on PATH.  If the virtual environment is not activated, that is another
    interpreter, which does not find format("kdirect").  Call this before the session exists.
    """
    from kdirect_spark import shim  # imported here so that `python -m kdirect_spark.shim` works

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    set_already = getattr(builder, "_options", {})
    for name, (value, _) in CONFS.items():
        if name not in set_already:
            builder = builder.config(name, value)
    if CHECKPOINT_FILES not in set_already and str(set_already.get("spark.master", "")).startswith(
        "local"
    ):
        plain = _spark_class(PLAIN_FILES)
        if plain is not None:
            builder = builder.config(CHECKPOINT_FILES, plain)
    if (
        not ("spark.remote" in set_already or os.environ.get("SPARK_REMOTE"))
        and str(set_already.get(shim.CONF, "true")).lower() == "true"
    ):
        compiled = shim.jar_or_none()
        if compiled is not None:
            jars = [
                jar
                for jar in str(set_already.get("spark.jars") or "").split(",")
                if jar not in ("", str(compiled))
            ]
            builder = builder.config("spark.jars", ",".join([*jars, str(compiled)]))
    return builder


@cache
def _spark_class(name: str) -> str | None:
    """The full name of a class of Spark SQL, or None.  Spark's versions have it in different
    packages."""
    import pyspark

    for jar in Path(pyspark.__file__).parent.glob("jars/spark-sql_*.jar"):
        with zipfile.ZipFile(jar) as entries:
            for entry in entries.namelist():
                if entry.endswith(f"/{name}.class"):
                    return entry.removesuffix(".class").replace("/", ".")
    return None


def session_builder(app_name: str = "kdirect", master: str | None = None) -> Any:
    """A configured `SparkSession.builder`.  `master` is for example ``local[2]``; None leaves the
    choice to spark-submit."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    return configure(builder.master(master) if master else builder)
