"""Spark sessions that suit the connector.

Law: only settings that a user may override; nothing here is needed for correct results except that
Spark's planner finds this interpreter (PYSPARK_PYTHON).
"""

from __future__ import annotations

import os
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

# conf -> (value, why).  Set where the builder does not name them yet.
CONFS = {
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "over TCP loopback every Python task stalls about 40 ms (pyspark 4.1 and later)",
    ),
    "spark.sql.execution.arrow.maxBytesPerBatch": (
        "1MB",
        "larger batches slow the sink down at 1 KiB a row",
    ),
}


# Where Spark runs in one process (master local), its checkpoints are local files, and the default
# writes each with a process of its own for chmod: two files a micro-batch, some 30 ms each.
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
PLAIN_FILES = "FileSystemBasedCheckpointFileManager"


def configure(builder: Any) -> Any:
    """Set on a `SparkSession.builder` what the connector runs best with, and return it: settings,
    and the shim's jar, for which records are columns in the JVM (`kdirect_spark.shim`; set
    ``spark.kdirect.columnar`` to ``false`` to leave it out).

    Names the running interpreter in PYSPARK_PYTHON where that is not set: Spark's planner otherwise
    takes the `python3` of PATH, which is another one when the virtual environment is not activated,
    and finds no format("kdirect").  Call it before the session exists.
    """
    from kdirect_spark import shim  # here, so that it can be run by itself

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
    """The full name of a class of Spark SQL, which moves between packages from version to version;
    None where it is not found."""
    import pyspark

    for jar in Path(pyspark.__file__).parent.glob("jars/spark-sql_*.jar"):
        with zipfile.ZipFile(jar) as entries:
            for entry in entries.namelist():
                if entry.endswith(f"/{name}.class"):
                    return entry.removesuffix(".class").replace("/", ".")
    return None


def session_builder(app_name: str = "kdirect", master: str | None = None) -> Any:
    """A configured `SparkSession.builder`; `master` such as ``local[2]``, None for spark-submit's."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    return configure(builder.master(master) if master else builder)
