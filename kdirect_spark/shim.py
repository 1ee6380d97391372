"""The JVM shim, compiled for the installed Spark by the Scala compiler that comes with it.

Owns: the shim's jar in the user's cache.

Law: everything works without the shim, only more slowly.  If something is missing (Java, a Spark
whose internals the shim knows, a place to write), the log gives the reason; a query never fails
because of it.  The shim uses classes that Spark does not promise to keep.  Compiling it against the
jars that it will run with checks that they are as expected.

A jar is never overwritten.  Its name contains a hash of the sources and of Spark's version, and it
is moved into place complete.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import cache
from pathlib import Path

import kdirect
from kdirect.errors import ShimError
from kdirect_spark import unpack

log = logging.getLogger("kdirect_spark")

CONF = "spark.kdirect.columnar"
COMPILE_LIMIT_S = 300
PROPERTIES = "META-INF/kdirect.properties"  # in the jar, for the shim: what it was compiled from
FIRST_SPARK = (4, 2)  # PySpark's streams have admission control, which the shim needs, since 4.2


def jar() -> Path:
    """The shim's jar for the Spark that this process would start.  Compiles it (some seconds)
    unless it is in the cache, or this package comes out of a jar, which then has the shim too.
    Raises ShimError with the reason if it is not available."""
    carrying = carrying_jar()
    if carrying is not None:
        return carrying
    jars = _spark_jars()
    name = next((path.name for path in sorted(jars.glob("spark-sql_*.jar"))), "")
    version = re.fullmatch(r"spark-sql_2\.13-(([0-9]+)\.([0-9]+)\..*)\.jar", name)
    if version is None or (int(version[2]), int(version[3])) < FIRST_SPARK:
        raise ShimError(
            f"{name or jars} is not Spark 4.2 or later with Scala 2.13",
            hint="install pyspark 4.2 to read columns",
        )
    digest = hashlib.sha256(f"{name} {kdirect.__version__}".encode())
    sources = _sources()
    for path, entry in sources.items():
        digest.update(entry.encode() + path.read_bytes())
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kdirect")
        out = home / f"kdirect-spark-shim_2.13-{version[1]}-{digest.hexdigest()[:16]}.jar"
        if not out.exists():
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile(jars, sources, version[1], out)
        # Spark runs the code in the jar, so no other user may have put it there.
        if out.stat().st_uid != os.getuid():
            raise ShimError(
                f"{out} belongs to another user",
                hint="remove it, or set XDG_CACHE_HOME to a directory of your own",
            )
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home directory
        raise ShimError(
            f"the shim's jar cannot be stored: {e}",
            hint="set XDG_CACHE_HOME to a directory that you can write",
        ) from None
    return out


def carrying_jar() -> Path | None:
    """The jar that this package was unpacked from, or found by; None if it was installed alone."""
    carrier = sys.modules.get(unpack.NAME)
    found: Path | None = getattr(carrier, "jar", None)
    return found


@cache
def jar_or_none() -> Path | None:
    """Like `jar`, but once in a process, and None with a line in the log if it is not available."""
    try:
        return jar()
    except ShimError as e:
        log.warning(
            "Spark reads kdirect's records as rows, not as columns: %s (%s=false silences this)",
            e,
            CONF,
        )
        return None


def _spark_jars() -> Path:
    try:
        import pyspark
    except ImportError:
        raise ShimError("pyspark is not installed", hint="pip install 'kdirect[spark]'") from None
    home = os.environ.get("SPARK_HOME")
    return Path(home or Path(pyspark.__file__).parent, "jars")


def _sources() -> dict[Path, str]:
    """The shim's files with their names below src/main, from the package or from the source tree
    that this module lies in."""
    here = Path(__file__).resolve().parent
    for root in (here / "jvm_shim", here.parent / "jvm_shim"):
        found = sorted(path for path in (root / "src" / "main").rglob("*") if path.is_file())
        if found:
            return {path: path.relative_to(root / "src" / "main").as_posix() for path in found}
    raise ShimError("the shim's sources are not in this installation", hint="reinstall kdirect")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home, "bin", "java"))) if home else shutil.which("java")
    if found is None:
        raise ShimError(
            f"there is no java {'in JAVA_HOME=' + home if home else 'on PATH'}",
            hint="install Java 17, which Spark needs too",
        )
    return found


def _compile(jars: Path, sources: dict[Path, str], spark: str, out: Path) -> None:
    java = _java()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as directory:
        made = Path(directory, "shim.jar")
        arguments = Path(directory, "arguments")
        arguments.write_text(f'-cp\n"{os.pathsep.join(map(str, sorted(jars.glob("*.jar"))))}"\n')
        command = [
            java,
            "-cp",
            str(jars / "*"),
            "scala.tools.nsc.Main",
            "-nobootcp",
            "-release",
            "17",
            "-nowarn",
            f"@{arguments}",
        ]
        command += ["-d", str(made), *(str(path) for path in sources if path.suffix == ".scala")]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ShimError(
                f"Scala's compiler took more than {COMPILE_LIMIT_S} s",
                hint="try again when the machine is less busy",
            ) from None
        if done.returncode or not made.exists():
            said = " ".join((done.stderr or done.stdout).split())[:600]
            raise ShimError(
                f"the shim does not compile for {jars}: {said}",
                hint="this Spark is not known to the shim yet; Spark reads rows instead",
            )
        with zipfile.ZipFile(made, "a") as archive:
            for path, entry in sources.items():
                if path.suffix != ".scala":
                    archive.write(path, entry.removeprefix("resources/"))
            archive.writestr(PROPERTIES, f"version={kdirect.__version__}\nspark={spark}\n")
        made.replace(out)
    log.info("compiled %s in %.1f s", out, time.monotonic() - begin)


def main(argv: list[str] | None = None) -> int:
    """Compile the shim and print where it is: for clusters (``spark-submit --jars``), and so that
    no session has to wait for the compiler."""
    parser = argparse.ArgumentParser(prog="python -m kdirect_spark.shim", description=main.__doc__)
    parser.add_argument("--output", type=Path, help="copy the jar to this file")
    chosen = parser.parse_args(argv)
    try:
        found = jar()
    except ShimError as e:
        print(f"kdirect reads rows instead of columns here: {e}", file=sys.stderr)
        return 1
    if chosen.output is not None:
        shutil.copyfile(found, chosen.output)
        found = chosen.output
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
