"""Python packages out of the one jar: what the jar carries at its top as `_kdirect_unpack`.

Compiled modules cannot be imported from a jar.  So in the jar a module of each package's name
(`STUB`) calls `load`.  It finds the real package, in this order: kdirect as it is installed for
this Python, which must be of the jar's version; else the jar's own payload for this Python and
platform, unpacked into a directory of this user.

Law: it imports only the standard library, and nothing of kdirect, as there is no kdirect yet.  A
directory is used only if it and its parent belong to this user, nobody else may write there, and
every file of the payload is there with its size.  It is filled under another name and renamed when
it is whole, so what a killed process leaves is never used.  The name contains a hash of the
payload: no two builds share a directory, and nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NoReturn

NAME = "_kdirect_unpack"  # of this module in the jar
PAYLOADS = "kdirect-python/"  # where payloads are in the jar
MANIFEST = PAYLOADS + "manifest.json"
STUB = f"import {NAME}\n\n{NAME}.load(__name__, __loader__.archive)\n"
PACKAGES = ("kdirect", "kdirect_spark", "pyspark_kdirect")
STALE_S = 3600.0  # a directory that is being filled is no older than that

_place: Path | None = None  # where the packages of this process are
jar: Path | None = None  # the jar that they were found by


def load(name: str, archive: str) -> None:
    """Put the package `name` in place of the jar's stub of that name, which is being imported."""
    global _place, jar
    if _place is None:
        jar = Path(archive)
        _place = _find(jar)
    spec = PathFinder.find_spec(name, [str(_place)])
    if spec is None or spec.loader is None:
        _refuse(f"{_place} has no package {name}", "install kdirect again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _find(archive: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        manifest = json.loads(opened.read(MANIFEST))
        version = manifest["version"]
        spec = _installed("kdirect")
        if spec is not None and spec.origin is not None:
            found = _version(Path(spec.origin))
            place = Path(spec.origin).parent.parent
            if found != version:
                _refuse(
                    f"kdirect {found} is installed in {place} for {sys.executable}, but the jar "
                    f"{archive} is of kdirect {version}",
                    f"install kdirect=={version} on every host, or none, or take the jar of "
                    f"kdirect {found}",
                )
            _check_needs([*manifest["needs"], *manifest["carries"]])
            return place
        payload = _payload(archive, manifest)
        _check_needs(manifest["needs"])
        place = _unpacked(opened, manifest, payload)
    # Before the jar, so that what the jar brings is found with the precedence of the jar.
    here = next((i for i, entry in enumerate(sys.path) if _is_jar(entry)), len(sys.path))
    sys.path.insert(here, str(place))
    return place


def _payload(archive: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The part of the jar for this Python and platform."""
    mine = tag()
    payload = manifest["payloads"].get(mine)
    remedy = (
        f"install kdirect=={manifest['version']} for {sys.executable} with pip on every host, or "
        f"add what such a Python builds to the jar (docs/spark.md, Delivery)"
    )
    if payload is None:
        _refuse(
            f"the jar {archive} has compiled modules for {', '.join(sorted(manifest['payloads']))}"
            f", and {sys.executable} needs those for {mine}",
            remedy,
        )
    has, needs = glibc(), payload["glibc"]
    if needs and has and tuple(needs) > has:
        _refuse(
            f"the compiled modules of the jar {archive} need glibc {_dotted(needs)}, and this "
            f"host has {_dotted(has)}",
            remedy,
        )
    return payload


def tag() -> str:
    """Which compiled modules this Python loads, for example cpython-311-x86_64-linux-gnu."""
    return str(sysconfig.get_config_var("SOABI"))


def glibc() -> tuple[int, ...] | None:
    """The version of this host's glibc; None where the C library is another one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        if name == "glibc":
            return tuple(int(part) for part in number.split("."))
    return None


def _dotted(number: Any) -> str:
    return ".".join(str(part) for part in number)


def _is_jar(entry: str) -> bool:
    """Whether an entry of sys.path is a jar of ours."""
    if not os.path.isfile(entry):
        return False
    with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(entry) as opened:
        return MANIFEST in opened.namelist()
    return False


def _installed(name: str) -> ModuleSpec | None:
    """The package as this Python has it without jars of ours; None if it has not."""
    entries = [entry for entry in sys.path if not _is_jar(entry)]
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(name, entries)
        elif hasattr(finder, "find_spec"):  # older libraries have some without, as Python allows
            spec = finder.find_spec(name, None, None)
        else:
            continue
        if spec is not None and spec.origin is not None:
            return spec
    return None


def _version(package: Path) -> str:
    """The version that a kdirect/__init__.py says."""
    match = re.search(r'^__version__ = "([^"]+)"', package.read_text(), re.MULTILINE)
    return match[1] if match else "of unknown version"


def _check_needs(needs: list[list[str]]) -> None:
    """`needs`: packages as pip knows them, each with the module that it brings."""
    missing = [package for package, module in needs if _installed(module) is None]
    if missing:
        _refuse(
            f"{sys.executable} lacks {', '.join(missing)}, which kdirect needs",
            f"install on every host, for that Python: pip install {' '.join(missing)}",
        )


def _unpacked(opened: zipfile.ZipFile, manifest: dict[str, Any], payload: dict[str, Any]) -> Path:
    name = f"python-{manifest['version']}-{tag()}-{payload['sha256'][:16]}"
    refused = []
    for home in _homes():
        try:
            _own(home)
            place = home / name
            if not _whole(place, payload["files"]):
                with _locked(home / f".{name}.lock"):
                    if not _whole(place, payload["files"]):
                        _fill(place, opened, payload)
            return place
        except OSError as e:
            refused.append(f"{home} ({e})")
    _refuse(
        f"the packages of the jar cannot be unpacked into {', nor into '.join(refused)}",
        "set XDG_CACHE_HOME, in the environment of Spark's driver and executors, to a directory "
        "that only they can write",
    )


def _homes() -> Iterator[Path]:
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        yield Path(given, "kdirect")
        return
    with contextlib.suppress(RuntimeError):  # there is no home directory
        yield Path.home() / ".cache" / "kdirect"
    yield Path(tempfile.gettempdir(), f"kdirect-{os.geteuid()}")


def _own(directory: Path) -> None:
    """Make the directory, unless it is there.  OSError unless it is ours alone, as Python will run
    what is in it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(directory)
    if os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 8):
        raise OSError("its file system is mounted noexec")


def _check_owner(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError("it is no directory")
    if found.st_uid != os.geteuid():
        raise OSError("it belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError("other users may write into it")


def _whole(place: Path, files: dict[str, int]) -> bool:
    """Whether every file is there with its size: a cleaner of temporary files may have removed
    some, or a host may have lost its power."""
    try:
        _check_owner(place)
        return all(os.path.getsize(place / path) == size for path, size in files.items())
    except FileNotFoundError:
        return False


def _fill(place: Path, opened: zipfile.ZipFile, payload: dict[str, Any]) -> None:
    """Unpack into `place`, of which nobody sees a part."""
    packed = opened.read(payload["file"])
    if hashlib.sha256(packed).hexdigest() != payload["sha256"]:
        _refuse(f"{payload['file']} in {opened.filename} is damaged", "copy the jar again")
    for left in place.parent.glob(f".{place.name}-*"):
        if time.time() - left.lstat().st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            archive.extractall(made)
        if place.exists():  # and is not whole
            place.rename(made / ".damaged")
        try:
            made.rename(place)
        except OSError:  # where locks do not work, another process was faster
            if not _whole(place, payload["files"]):
                raise
    finally:
        shutil.rmtree(place / ".damaged", ignore_errors=True)
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Among the processes of this user: one unpacks, the others wait for it."""
    import fcntl

    with open(path, "ab") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: several may unpack
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _refuse(what: str, remedy: str) -> NoReturn:
    """The jar's packages cannot be used by this Python."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and str(spec.name).startswith("pyspark."):
        # In a process that Spark has started: the sentence alone, as for every error of kdirect.
        if not os.environ.get("KDIRECT_TRACEBACK"):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
    raise ImportError(f"{what}; {remedy}")
