"""Builds the one jar: the shim, and the Python packages that it needs on every host.

    python -m kdirect_spark.one_jar --output dist --repository dist/maven

Owns: what is in the jar, and where.  At its top are the shim's classes, and for each package a
module of its name that loads the real one (`unpack`).  `kdirect-python/` holds a payload for each
Python and platform, with a manifest.  A payload is a zip of kdirect, as it is installed for the
running Python, and of the packages that it needs.  Of these only `NEEDED` stay outside, because
Spark's own Python workers need them too.  Equal contents make equal bytes.

`--add` takes payloads from jars of the same version that other Pythons or platforms have built.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import io
import json
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kdirect
from kdirect.errors import ShimError
from kdirect_spark import shim, unpack

GROUP, ARTIFACT = "io.github.kdirect", "kdirect-spark_2.13"
# Packages that the Python of Spark's workers must have, and the modules that show it.
NEEDED = {"pyarrow": "pyarrow", "numpy": "numpy"}
# What no process needs at run time.
LEFT_OUT = (".pyc", ".pyi", ".pxd", ".h", "/RECORD", "/INSTALLER", "/direct_url.json", "/REQUESTED")
EPOCH = (1980, 1, 1, 0, 0, 0)

POM = f"""<?xml version="1.0" encoding="UTF-8"?>
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>{GROUP}</groupId>
  <artifactId>{ARTIFACT}</artifactId>
  <version>{kdirect.__version__}</version>
  <packaging>jar</packaging>
  <name>kdirect for Spark</name>
  <licenses><license><name>Apache-2.0</name></license></licenses>
</project>
"""


def parts(add: Iterable[Path] = ()) -> dict[str, bytes]:
    """What of the jar is Python's: its entries by their names.  Raises ShimError."""
    packed, payload = _payload()
    manifest: dict[str, Any] = {
        "version": kdirect.__version__,
        "needs": sorted(NEEDED.items()),
        "carries": sorted(_carried().items()),
        "payloads": {unpack.tag(): payload},
    }
    out = {payload["file"]: packed}
    for other in add:
        _add(other, manifest, out)
    out[unpack.MANIFEST] = json.dumps(manifest, sort_keys=True).encode()
    out[f"{unpack.NAME}.py"] = Path(str(unpack.__file__)).read_bytes()
    for package in unpack.PACKAGES:
        out[f"{package}/__init__.py"] = unpack.STUB.encode()
    return out


def build(output: Path, add: Iterable[Path] = ()) -> Path:
    """Write the jar to `output`, a file or a directory.  Raises ShimError."""
    entries = parts(add)
    if output.suffix != ".jar":
        output = output / f"{ARTIFACT}-{kdirect.__version__}.jar"
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(shim.jar()) as compiled:
        entries |= {name: compiled.read(name) for name in compiled.namelist() if name[-1] != "/"}
    made = output.with_name(f".{output.name}")
    made.write_bytes(_zip(entries))
    made.replace(output)
    return output


def publish(jar: Path, repository: Path) -> Path:
    """Put the jar into a directory that is laid out as a Maven repository; its place there."""
    directory = repository.joinpath(*GROUP.split("."), ARTIFACT, kdirect.__version__)
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{ARTIFACT}-{kdirect.__version__}"
    for name, content in ((f"{stem}.jar", jar.read_bytes()), (f"{stem}.pom", POM.encode())):
        directory.joinpath(name).write_bytes(content)
        directory.joinpath(f"{name}.sha1").write_text(hashlib.sha1(content).hexdigest())
    return directory / f"{stem}.jar"


@cache
def _payload() -> tuple[bytes, dict[str, Any]]:
    """The packages of this Python as a zip, and what the manifest says of it."""
    files: dict[str, bytes] = {}
    for name in ["kdirect", *_carried()]:
        distribution = importlib.metadata.distribution(name)
        for path in distribution.files or ():
            entry = path.as_posix()
            is_left_out = (
                entry.startswith(("..", "kdirect_spark/jvm_shim/"))
                or "__pycache__" in path.parts
                or f"/{entry}".endswith(LEFT_OUT)
            )
            if not is_left_out:
                files[entry] = Path(str(distribution.locate_file(path))).read_bytes()
    lacking = [package for package in unpack.PACKAGES if f"{package}/__init__.py" not in files]
    if lacking:
        raise ShimError(
            f"kdirect is not installed as a whole: {', '.join(lacking)} is not there",
            hint="install it with pip, and not as editable",
        )
    packed = _zip(files)
    digest = hashlib.sha256(packed).hexdigest()
    compiled = [content for name, content in files.items() if name.endswith(".so")]
    return packed, {
        "file": f"{unpack.PAYLOADS}{unpack.tag()}.zip",
        "sha256": digest,
        "glibc": _glibc(compiled),
        "files": {name: len(content) for name, content in sorted(files.items())},
    }


def _carried() -> dict[str, str]:
    """The packages that kdirect needs, and those that these need, without NEEDED; each with a
    module that it brings."""
    out: dict[str, str] = {}
    left = ["kdirect"]
    while left:
        distribution = importlib.metadata.distribution(left.pop())
        for line in distribution.requires or ():
            name = re.match(r"[A-Za-z0-9._-]+", line)
            assert name is not None, line
            if "extra ==" not in line and name[0] not in {*NEEDED, *out}:
                out[name[0]] = _module(name[0])
                left.append(name[0])
    return out


def _module(package: str) -> str:
    files = importlib.metadata.distribution(package).files or ()
    return min(path.parts[0] for path in files if path.parts[1:] == ("__init__.py",))


def _glibc(compiled: Iterable[bytes]) -> list[int] | None:
    """The newest glibc whose symbols are used; None if the modules use another C library."""
    found = {
        (int(match[1]), int(match[2]))
        for content in compiled
        for match in re.finditer(rb"GLIBC_(\d+)\.(\d+)", content)
    }
    return list(max(found)) if found and "gnu" in str(sysconfig.get_config_var("SOABI")) else None


def _add(other: Path, manifest: dict[str, Any], out: dict[str, bytes]) -> None:
    try:
        with zipfile.ZipFile(other) as opened:
            theirs = json.loads(opened.read(unpack.MANIFEST))
            if theirs["version"] != manifest["version"]:
                raise ShimError(
                    f"{other} is of kdirect {theirs['version']}, not {manifest['version']}",
                    hint="build it with the same version",
                )
            for tag, payload in theirs["payloads"].items():
                if tag not in manifest["payloads"]:
                    manifest["payloads"][tag] = payload
                    out[payload["file"]] = opened.read(payload["file"])
    except (OSError, KeyError, zipfile.BadZipFile) as e:
        raise ShimError(
            f"{other} is no jar with kdirect's Python packages: {e}",
            hint="name a jar that `python -m kdirect_spark.one_jar` has made",
        ) from None


def _zip(entries: Mapping[str, bytes]) -> bytes:
    """Equal bytes for equal entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in sorted(entries.items()):
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o644 << 16
            packed_already = name.endswith(".zip")
            info.compress_type = zipfile.ZIP_STORED if packed_already else zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return out.getvalue()


def main(argv: list[str] | None = None) -> int:
    """Build the jar that holds the shim and the Python packages."""
    parser = argparse.ArgumentParser(
        prog="python -m kdirect_spark.one_jar", description=main.__doc__
    )
    parser.add_argument("--output", type=Path, default=Path("."), help="a file or a directory")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="jars of other platforms")
    parser.add_argument("--repository", type=Path, help="a Maven repository to publish it in, too")
    parser.add_argument("--parts", type=Path, help="write only the Python parts, for build.sbt")
    chosen = parser.parse_args(argv)
    try:
        if chosen.parts is not None:
            for name, content in parts(chosen.add).items():
                path = chosen.parts / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return 0
        made = build(chosen.output, chosen.add)
        print(made)
        if chosen.repository is not None:
            print(publish(made, chosen.repository))
    except ShimError as e:
        print(f"the jar cannot be built: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
