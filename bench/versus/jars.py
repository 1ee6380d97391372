"""Kafka's broker, Spark's Kafka connector, Delta, S3Proxy and sbt as jars: exact coordinates,
checked sums, kept outside of the tree.

Owns: jars.txt (a line for each jar: the set it belongs to, its coordinates, its SHA-256) and the
folder that the jars are kept in ($KDIRECT_JARS, else kdirect/jars in the user's cache).
Coordinates are group:artifact:version, with :classifier behind where a jar has one.  They are
fetched by the Ivy that comes with Spark, one by one and without their dependencies, from Maven
Central or from what the machine's Maven settings name in its place.  A jar whose sum differs is
never used.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

LIST = Path(__file__).with_name("jars.txt")
FETCH_LIMIT_S = 240
PATTERN = "[organisation]-[artifact]-[revision](-[classifier]).[ext]"
MAVEN = "http://ant.apache.org/ivy/maven"  # where Ivy's word for a classifier is from


class MissingJarsError(RuntimeError):
    """Jars are not kept here, and cannot be fetched: there is no network, no such jar, or no
    Java."""


def jars(kind: str) -> list[Path]:
    """The jars of a set, `broker`, `tiered` (what a broker needs beside for its local store),
    `connector`, `delta`, `formats` (Spark's Avro), `s3proxy`, `sbt` (its launcher), `streams`
    (Kafka Streams) or `connect` (Kafka Connect with its file connectors); fetches what is missing.
    MissingJarsError when one cannot be had, RuntimeError when one has another sum."""
    wanted = _listed(kind)
    folder = home()
    missing = [c for c in wanted if not _path(folder, c).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(missing, folder)
    for coordinates, expected in wanted.items():
        path = _path(folder, coordinates)
        if not path.exists():
            raise MissingJarsError(
                f"{coordinates} was not fetched; is Maven Central reachable,"
                " or its mirror in Maven's settings.xml?"
            )
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != expected:
            path.unlink()
            raise RuntimeError(
                f"{path.name} has the SHA-256 {found}, not {expected}:"
                " removed; run again to fetch it anew"
            )
    return [_path(folder, c) for c in wanted]


def home() -> Path:
    named = os.environ.get("KDIRECT_JARS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "kdirect" / "jars"


def version(artifact: str) -> str:
    """The version of the artifact in the list."""
    for line in LIST.read_text().splitlines():
        _, coordinates, _ = line.split()
        if coordinates.split(":")[1] == artifact:
            return coordinates.split(":")[2]
    raise LookupError(artifact)


def pyspark_jar(name: str) -> Path:
    """A jar that comes with pyspark, by the start of its name."""
    import pyspark

    return next(iter(sorted(Path(pyspark.__file__).parent.glob(f"jars/{name}-[0-9]*.jar"))))


def _listed(kind: str) -> dict[str, str]:
    lines = (line.split() for line in LIST.read_text().splitlines() if line)
    return {coordinates: checksum for owner, coordinates, checksum in lines if owner == kind}


def _path(folder: Path, coordinates: str) -> Path:
    return folder / ("-".join(coordinates.split(":")) + ".jar")


def _fetch(coordinates: list[str], folder: Path) -> None:
    root = mirror()
    resolver = ET.Element(
        "ibiblio",
        {
            "name": "central",
            "m2compatible": "true",
            "usepoms": "false",
            **({"root": root} if root else {}),
        },
    )
    with tempfile.TemporaryDirectory(prefix="kdirect-ivy-") as scratch:
        settings = ET.Element("ivysettings")
        ET.SubElement(settings, "settings", defaultResolver="central")
        ET.SubElement(settings, "caches", defaultCacheDir=f"{scratch}/cache")
        ET.SubElement(settings, "resolvers").append(resolver)
        module = ET.Element("ivy-module", version="2.0")
        ET.SubElement(module, "info", organisation="kdirect", module="bench")
        ET.SubElement(ET.SubElement(module, "configurations"), "conf", name="default")
        dependencies = ET.SubElement(module, "dependencies")
        wanted: dict[tuple[str, ...], list[str]] = {}  # modules, and the classifiers of each
        for line in coordinates:
            group, artifact, revision, *classifier = line.split(":")
            wanted.setdefault((group, artifact, revision), []).append("".join(classifier))
        for (group, artifact, revision), classifiers in wanted.items():
            dependency = ET.SubElement(
                dependencies,
                "dependency",
                org=group,
                name=artifact,
                rev=revision,
                transitive="false",
                conf="default->*",
            )
            for classifier in classifiers if any(classifiers) else ():
                more = {f"{{{MAVEN}}}classifier": classifier} if classifier else {}
                ET.SubElement(
                    dependency, "artifact", {"name": artifact, "type": "jar", "ext": "jar", **more}
                )
        ET.ElementTree(settings).write(f"{scratch}/settings.xml")
        ET.ElementTree(module).write(f"{scratch}/ivy.xml")
        command = [
            "java",
            "-cp",
            str(pyspark_jar("ivy")),
            "org.apache.ivy.Main",
            "-warn",
            "-types",
            "jar",
        ]
        command += [
            "-settings",
            f"{scratch}/settings.xml",
            "-ivy",
            f"{scratch}/ivy.xml",
            "-retrieve",
            f"{scratch}/jars/{PATTERN}",
        ]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise MissingJarsError(f"{len(coordinates)} jars cannot be fetched: {e}") from e
        fetched = list(Path(scratch, "jars").glob("*.jar"))
        if not fetched:
            raise MissingJarsError(
                f"{len(coordinates)} jars cannot be fetched: Ivy says\n"
                f"{(run.stdout + run.stderr)[-2000:]}"
            )
        for path in fetched:
            partial = folder / f"{path.name}.{os.getpid()}"
            partial.write_bytes(path.read_bytes())
            partial.replace(folder / path.name)


def mirror() -> str | None:
    """What the user's Maven settings name in place of Central, if they do."""
    settings = Path.home() / ".m2" / "settings.xml"
    try:
        tree = ET.parse(settings)
    except (OSError, ET.ParseError):
        return None
    for element in tree.iter():
        if element.tag.rsplit("}", 1)[-1] == "mirror":
            fields = {child.tag.rsplit("}", 1)[-1]: (child.text or "").strip() for child in element}
            if {"*", "central", "external:*"} & set(fields.get("mirrorOf", "").split(",")):
                return fields.get("url") or None
    return None
