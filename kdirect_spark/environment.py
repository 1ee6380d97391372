"""Spark sessions with settings that suit the connector.

Law: a user may override every setting.  None of them is needed for correct results, except that
Spark's planner must find this interpreter (PYSPARK_PYTHON).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

SHIM_CLASS = "org.apache.spark.sql.execution.datasources.v2.python.kdirect.KdirectSource"
FIRST_WITH_SOCKETS = (4, 1)
SOCKETS = "spark.python.unix.domain.socket.enabled"

log = logging.getLogger("kdirect_spark")

# conf -> (value, why).  Set unless the builder has them already.
CONFS = {
    SOCKETS: (
        "true",
        "over TCP loopback every Python task stalls for about 40 ms (pyspark 4.1 and later)",
    ),
    "spark.sql.execution.arrow.maxBytesPerBatch": (
        "1MB",
        "larger batches slow the sink down with rows of 1 KiB",
    ),
}


# What starts the Python workers: with pyspark compiled, and imported before they are forked.
DAEMON = "spark.python.daemon.module"
OUR_DAEMON = "pyspark_kdirect.daemon"
# By these a session may name another Python for its workers than the one that runs.
OTHER_PYTHONS = (
    "spark.pyspark.python",
    "spark.pyspark.driver.python",
    "spark.sql.execution.pyspark.python",
)

# With a local master, Spark's checkpoints are local files.  Spark's default class starts several
# processes for each file, and its plain one two (chmod, for the file and its checksum), which take
# some 7 ms each: a micro-batch writes two files.  The shim's writes the same files without one.  It
# extends the plain class where Spark 4.1 and later have it.  The shim puts its class in the place
# of the plain one where it is asked to: a name in the settings would end every stream of a session
# whose jars are chosen after ours.
CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
PLAIN_FILES = "FileSystemBasedCheckpointFileManager"
PLAIN_FILES_OF_SHIM = f"org.apache.spark.sql.execution.streaming.checkpointing.{PLAIN_FILES}"
FILES_OF_SHIM = SHIM_CLASS.replace("KdirectSource", "CheckpointFiles")
ASK_FOR_FILES_OF_SHIM = "spark.kdirect.checkpointFiles"


def configure(builder: Any) -> Any:
    """Add to a `SparkSession.builder` what the connector runs best with, and return the builder.

    Adds settings, and the shim's jar, with which records stay columns in the JVM
    (`kdirect_spark.shim`); set ``spark.kdirect.columnar`` to ``false`` to leave the jar out.  Also
    sets PYSPARK_PYTHON to the running interpreter unless it is set.  Spark's planner otherwise
    takes the first `python3` on PATH.  If the virtual environment is not activated, that is another
    interpreter, which does not find format("kdirect").  Call this before the session exists: Spark
    starts its JVM only once.  For a session that runs already the log says what it lacks.
    """
    from kdirect_spark import shim  # imported here so that `python -m kdirect_spark.shim` works

    say_what_is_missing()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    set_already = getattr(builder, "_options", {})
    for name, (value, _) in CONFS.items():
        if name not in set_already:
            builder = builder.config(name, value)
    is_local = str(set_already.get("spark.master", "")).startswith("local")
    files = _spark_class(PLAIN_FILES) if is_local and CHECKPOINT_FILES not in set_already else None
    if is_local and DAEMON not in set_already and _workers_are_ours(set_already):
        builder = builder.config(DAEMON, OUR_DAEMON)
    if (
        not ("spark.remote" in set_already or os.environ.get("SPARK_REMOTE"))
        and not _is_of_spark_submit()
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
            if files == PLAIN_FILES_OF_SHIM:
                builder = builder.config(ASK_FOR_FILES_OF_SHIM, "true")
    if files is not None:
        builder = builder.config(CHECKPOINT_FILES, files)
    return builder


def _workers_are_ours(set_already: Mapping[str, Any]) -> bool:
    """Whether the workers of a local session run this interpreter, and find what it has
    installed."""
    named = [os.environ["PYSPARK_PYTHON"], *(set_already.get(conf) for conf in OTHER_PYTHONS)]
    spec = importlib.util.find_spec(OUR_DAEMON.partition(".")[0])
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return (
        all(python is None or shutil.which(python) == sys.executable for python in named)
        and spec is not None
        and spec.origin is not None
        and Path(spec.origin).resolve().parent.parent in installed
    )


def _is_of_spark_submit() -> bool:
    """Whether this program was started by spark-submit.  Then the JVM runs already, with the jars
    that it was given; they are in spark.jars, and a list of ours would replace them."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def say_what_is_missing() -> None:
    """Say in the log, once in a process, what a session lacks that runs already: that of the
    pyspark shell, a notebook or a cluster platform.  `getOrCreate` returns it as it is.  Of a
    program of spark-submit, say whether its JVM has the shim."""
    try:
        context = _running_context()
        if context is None:
            _say_what_spark_submit_lacks()
            return
        conf = context.getConf()
        lines = missing(conf.get, context.version, _has_shim(context))
    except Exception as e:  # a session that answers nothing is its user's to find out
        log.debug("the running session does not say what it has: %s", e)
        return
    for line in lines:
        _say_once(line)


def _say_what_spark_submit_lacks() -> None:
    from pyspark import SparkConf, SparkContext, __version__

    from kdirect_spark import shim

    if not _is_of_spark_submit() or _release(__version__) < shim.FIRST_SPARK:
        return
    SparkContext._ensure_initialized()
    asked = str(SparkConf().get(shim.CONF, "true")).strip().lower()
    if asked == "true" and not _has_shim(SparkContext):
        _say_once(
            "spark-submit has started Spark without kdirect's shim: Spark reads kdirect's records "
            "as rows, not as columns; give it --packages or --jars (docs/spark.md, Delivery), or "
            f"--jars $(python -m kdirect_spark.shim) ({shim.CONF}=false silences this)"
        )


def missing(conf: Callable[[str, str], str], version: str, has_shim: bool) -> list[str]:
    """Lines for the log about a running session: `conf(name, default)` is its configuration,
    `version` that of Spark, and `has_shim` says whether its JVM has the shim's class."""
    from kdirect_spark import shim

    out = []
    release = _release(version)
    if (
        not has_shim
        and release >= shim.FIRST_SPARK
        and conf(shim.CONF, "true").strip().lower() == "true"
    ):
        out.append(
            "a Spark session runs already, without kdirect's shim: Spark reads kdirect's records as"
            " rows, not as columns; start Python again and call session_builder first (a JVM keeps"
            " its jars, so spark.stop() is not enough), or start Spark with"
            " --jars $(python -m kdirect_spark.shim)"
            f" ({shim.CONF}=false silences this)"
        )
    if release >= FIRST_WITH_SOCKETS and conf(SOCKETS, "false").strip().lower() != "true":
        out.append(
            "a Spark session runs already, without Unix sockets: every Python task stalls for about"
            " 40 ms; call spark.stop() before session_builder, or start Spark with --conf"
            f" {SOCKETS}=true"
        )
    return out


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


@cache
def _say_once(line: str) -> None:
    log.warning("%s", line)


def _running_context() -> Any:
    """The SparkContext of this process that runs; None with Spark Connect, or without any."""
    import pyspark

    context = getattr(pyspark.SparkContext, "_active_spark_context", None)
    return context if context is not None and context._jsc is not None else None


def _has_shim(context: Any) -> bool:
    """Whether the JVM finds the shim's class, however its jar came there."""
    loader = context._jvm.Thread.currentThread().getContextClassLoader()
    name = SHIM_CLASS.replace(".", "/") + ".class"
    return loader is not None and loader.getResource(name) is not None


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
