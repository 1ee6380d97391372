"""Spark sessions that suit the connector.

Law: only settings that a user may override; nothing here is needed for correct results except that Spark's planner finds this
interpreter (PYSPARK_PYTHON).
"""

from __future__ import annotations

import os
import sys
from typing import Any

# conf -> (value, why).  Set where the builder does not name them yet.
CONFS = {
    "spark.python.unix.domain.socket.enabled": ("true", "over TCP loopback every Python task stalls about 40 ms (pyspark 4.1 and later)"),
    "spark.sql.execution.arrow.maxBytesPerBatch": ("1MB", "larger batches slow the sink down at 1 KiB a row"),
}


def configure(builder: Any) -> Any:
    """Set on a `SparkSession.builder` what the connector runs best with, and return it.

    Names the running interpreter in PYSPARK_PYTHON where that is not set: Spark's planner otherwise takes the `python3` of PATH, which
    is another one when the virtual environment is not activated, and finds no format("kdirect").  Call it before the session exists.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    set_already = getattr(builder, "_options", {})
    for name, (value, _) in CONFS.items():
        if name not in set_already:
            builder = builder.config(name, value)
    return builder


def session_builder(app_name: str = "kdirect", master: str | None = None) -> Any:
    """A configured `SparkSession.builder`; `master` such as ``local[2]``, None for spark-submit's."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    return configure(builder.master(master) if master else builder)
