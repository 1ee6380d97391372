"""Pythons that have Spark, pyarrow and pandas, and nothing of kdirect.

Owns: how such an environment is made, in no time and without a download: a virtual environment
whose packages are links to those that the tests run with.  Another Spark than that of the tests is
pip's source distribution of it, unpacked without a build, and kept in the user's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
ARROW = ("pyarrow",)
PANDAS = ("pandas", "numpy", "dateutil", "python_dateutil", "pytz", "six", "tzdata")
SPARK = ("pyspark", "py4j")
DOWNLOAD_LIMIT_S = 600


def make(directory: Path, spark: str | None = None, without: tuple[str, ...] = ()) -> Path:
    """The python of a new environment.  `spark`: another version than that of the tests;
    `without`: packages that it lacks."""
    if not directory.exists():
        venv.create(directory, symlinks=True)
    found = subprocess.run(
        [directory / "bin" / "python", "-c", "import sysconfig as s; print(s.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    site = Path(found.stdout.strip())
    wanted = {*SPARK, *ARROW, *PANDAS} - set(without) - ({"pyspark"} if spark else set())
    for path in SITE.iterdir():
        name = re.split(r"[-.]", path.name)[0]
        if name in wanted and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    if spark and not (site / "pyspark").exists():
        (site / "pyspark").symlink_to(other_spark(spark))
    return directory / "bin" / "python"


def other_spark(version: str) -> Path:
    """The package pyspark of another version."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kdirect", "spark")
    kept = cache / version
    if kept.exists():
        return kept / "pyspark"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{version}-") as name:
        scratch = Path(name)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        command += ["--no-deps", "--no-build-isolation", "--no-binary", "pyspark"]
        run = subprocess.run(
            [*command, "-d", str(scratch), f"pyspark=={version}"],
            capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False,
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"pyspark {version} cannot be fetched: {run.stderr[-500:]}")
        (archive,) = scratch.glob("*.tar.gz")
        _unpack(archive, scratch / "made")
        (scratch / "made").replace(kept)
    return kept / "pyspark"


# Where setup.py of pyspark takes the parts of the package from that are not in its place.
ELSEWHERE = {"deps/jars": "jars", "deps/bin": "bin", "deps/sbin": "sbin", "lib": "python/lib"}


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            for start, place in {"pyspark": "", **ELSEWHERE}.items():
                if member.isfile() and path.startswith(f"{start}/"):
                    target = into / "pyspark" / place / path.removeprefix(f"{start}/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = opened.extractfile(member)
                    assert content is not None
                    with content, open(target, "wb") as out:
                        shutil.copyfileobj(content, out)
                    target.chmod(member.mode & 0o755)
