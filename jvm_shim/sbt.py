"""sbt without an installation of it: python jvm_shim/sbt.py [--directory DIR] test package

Owns: how sbt is started.  Its launcher is one of the jars of bench/versus/jars.txt, with a checked
sum.  Everything that it fetches comes from Maven Central, or from what the machine's Maven settings
name in its place, and stays in the caches of sbt and Coursier.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(directory: Path, arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "bench" / "versus"))
    import jars
    import pyspark

    (launcher,) = jars.jars("sbt")
    mirror = jars.mirror()
    central = f"central: {mirror}" if mirror else "maven-central"
    with tempfile.TemporaryDirectory(prefix="kdirect-sbt-") as scratch:
        repositories = Path(scratch, "repositories")
        repositories.write_text(f"[repositories]\nlocal\n{central}\n")
        command = ["java", "-Xmx1g", "-Dsbt.override.build.repos=true", "-Dsbt.supershell=false"]
        command += ["-Dsbt.color=false", f"-Dsbt.repository.config={repositories}"]
        command += ["-jar", str(launcher), *arguments]
        return subprocess.run(
            command,
            cwd=directory,
            check=False,
            env={
                "SPARK_HOME": str(Path(str(pyspark.__file__)).parent),
                "KDIRECT_PYTHON": sys.executable,
                **os.environ,
            },
        ).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT, help="where build.sbt is")
    parser.add_argument("arguments", nargs="+", help="what sbt is to do")
    chosen = parser.parse_args()
    sys.exit(main(chosen.directory, chosen.arguments))
