"""Spark's daemon for Python workers (`pyspark.daemon`), which forks them in less time.

    python -m pyspark_kdirect.daemon [module of the workers]

Law: what its workers do is what those of `pyspark.daemon` do.  Two things differ.  Spark puts a zip
file of pyspark first on the path, from which every process compiles what it imports, some 0.5 s of
processor time; here pyspark comes from the installed package that this zip file lies in, if there
is one.  And modules that every worker needs are imported before the fork, as far as they start no
thread: a fork has the forking thread alone.  So pyarrow and numpy are not among them.

The shim starts it for planners, and `kdirect_spark.configure` for tasks of a local session.
"""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path

# No thread starts when these are imported.
FOR_ANY_WORKER = ("pyspark.worker", "pyspark.sql.datasource", "kdirect.options")
FOR_PLANNERS = (
    "pyspark.sql.datasource_internal",
    "pyspark.sql.types",
    "pyspark.sql.worker.create_data_source",
    "kdirect.format.protocol",
)


def prefer_installed(path: list[str]) -> list[str]:
    """`path` with zip files of pyspark last that lie in a package whose directory is on it too."""
    inside = [entry for entry in path if _is_inside_installed(entry, path)]
    return [entry for entry in path if entry not in inside] + inside


def _is_inside_installed(entry: str, path: list[str]) -> bool:
    zipped = Path(entry)
    package = zipped.parent.parent.parent  # pyspark/python/lib/pyspark.zip
    return (
        zipped.name == "pyspark.zip"
        and package.name == "pyspark"
        and (package / "__init__.py").is_file()
        and str(package.parent) in path
    )


def preload(argv: list[str]) -> None:
    """Import what workers need.  What is missing is missed by the worker that needs it."""
    of_planners = len(argv) > 1 and argv[1] == "pyspark_kdirect.planner"
    for name in FOR_ANY_WORKER + (FOR_PLANNERS if of_planners else ()):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.collect()
    gc.freeze()  # what the workers share is not looked at after each of their tasks


def main() -> None:
    sys.path[:] = prefer_installed(sys.path)
    from pyspark.daemon import manager

    preload(sys.argv)
    manager()


if __name__ == "__main__":
    main()
