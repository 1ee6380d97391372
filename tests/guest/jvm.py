"""What lets Spark start in an emulated guest within a minute or so: an archive of the classes that
it loads.

Owns: the archive, in the guests' cache (`image.py`), one for each Java, Spark and place of Spark;
and the options of every JVM in a guest.  An emulated JVM takes minutes to read, check and link
Spark's classes from its jars; from an archive of its own (class data sharing) it maps them.  The
archive is made by a run of `far_spark.py` on this machine.  A JVM that cannot use it reads the
jars.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.guest.image import GuestError, cache

# One compiler and the plain collector: fewer threads, and less code to translate.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PROGRAM = Path(__file__).with_name("far_spark.py")
LIMIT_S = 400


def options(classes: Path) -> str:
    """For JAVA_TOOL_OPTIONS in a guest.  `classes`: the archive."""
    return f"{OPTIONS} -XX:SharedArchiveFile={classes}"


def archive() -> Path:
    """The archive; made if it is not there."""
    import pyspark

    java = Path(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    try:
        says = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as e:
        raise GuestError(f"Spark needs Java: {e}; install it, or set JAVA_HOME") from e
    recipe = f"{says!r} {pyspark.__version__} {pyspark.__file__} {OPTIONS}"
    name = f"classes-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.jsa"
    home = cache()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / name).exists():
        partial = home / f"{name}.{os.getpid()}"
        try:
            _make(partial)
            partial.rename(home / name)
        finally:
            partial.unlink(missing_ok=True)
    return home / name


def _make(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kdirect-classes-") as work:
        run = subprocess.run(
            [sys.executable, str(PROGRAM), "train", work, str(path)],
            env={**os.environ, "JAVA_TOOL_OPTIONS": OPTIONS, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if run.returncode != 0 or not path.exists():
        raise GuestError(f"no archive of Spark's classes could be made:\n{run.stdout[-6000:]}")
