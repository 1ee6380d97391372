"""The jar that carries kdirect's Python packages, in Pythons that have none of their own: what is
found, what is unpacked, and what is refused.  Without Spark."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kdirect_spark import one_jar, unpack
from tests.packaging import bare_python
from tests.support import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION = one_jar.kdirect.__version__
USE = (
    "import kdirect_spark, kdirect, kafka\n"
    "from kdirect import Broker, Consumer\n"
    "import kdirect.log.kernel as kernel, kdirect_spark.datasource\n"
    "print(kernel.__file__)\n"
)


@pytest.fixture(scope="module")
def jar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_jar.build(tmp_path_factory.mktemp("jar"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_python.make(tmp_path_factory.mktemp("bare") / "env")


def environment(jar: Path, cache: Path, *before: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KDIRECT_"))}
    path = os.pathsep.join(map(str, [*before, jar]))
    return {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(cache)}


def run(
    python: Path, jar: Path, cache: Path, *before: Path, code: str = USE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-c", code], env=environment(jar, cache, *before),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def unpacked(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "kdirect").iterdir() if not p.name.endswith(".lock"))


def changed(
    jar: Path, target: Path, change: Callable[[dict], None] = lambda manifest: None,
    content: Callable[[str, bytes], bytes] = lambda name, content: content,
) -> Path:  # fmt: skip
    """The jar with another manifest, or with other contents."""
    with zipfile.ZipFile(jar) as opened, zipfile.ZipFile(target, "w") as out:
        for name in opened.namelist():
            found = opened.read(name)
            if name == unpack.MANIFEST:
                manifest = json.loads(found)
                change(manifest)
                found = json.dumps(manifest).encode()
            out.writestr(name, content(name, found))
    return target


def test_a_python_without_kdirect_gets_it_from_the_jar(jar, bare, tmp_path):
    first = run(bare, jar, tmp_path)
    assert first.returncode == 0, first.stderr
    (place,) = unpacked(tmp_path)
    kernel = Path(first.stdout.strip())
    assert kernel.is_relative_to(tmp_path / "kdirect" / place)
    assert place.startswith(f"python-{VERSION}-{unpack.tag()}-")
    changed_at = kernel.stat().st_mtime_ns
    assert run(bare, jar, tmp_path).stdout == first.stdout
    assert kernel.stat().st_mtime_ns == changed_at and unpacked(tmp_path) == [place]


def test_finders_of_older_libraries_are_no_hindrance(jar, bare, tmp_path):
    code = (
        "import sys\n"
        "class Old:\n"
        "    def find_module(self, name, path=None):\n"
        "        return None\n"
        "sys.meta_path.insert(0, Old())\n"
        "import kdirect\n"
        "print(kdirect.__version__)\n"
    )
    used = run(bare, jar, tmp_path, code=code)
    assert used.stdout.strip() == VERSION, used.stderr


def test_several_processes_unpack_once(jar, bare, tmp_path):
    started = [
        subprocess.Popen(
            [bare, "-c", USE], env=environment(jar, tmp_path), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1 and len(unpacked(tmp_path)) == 1


def test_what_a_killed_process_leaves_is_never_used_and_goes(jar, bare, tmp_path):
    process = subprocess.Popen([bare, "-c", USE], env=environment(jar, tmp_path))
    home = tmp_path / "kdirect"

    def half() -> list[Path]:
        return [p for p in home.glob(".python-*") if p.is_dir() and any(p.iterdir())]

    wait_until(half, "unpacking", 60, 0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    (left,) = half()
    assert not [name for name in unpacked(tmp_path) if not name.startswith(".")]
    used = run(bare, jar, tmp_path)
    assert used.returncode == 0, used.stderr
    assert not Path(used.stdout.strip()).is_relative_to(left)
    assert left.exists()  # it may be another process's that is at work
    (place,) = [name for name in unpacked(tmp_path) if not name.startswith(".")]
    # A file that a cleaner removed is brought back, and the old half goes once it is old.
    Path(used.stdout.strip()).unlink()
    os.utime(left, (time.time() - 2 * unpack.STALE_S,) * 2)
    again = run(bare, jar, tmp_path)
    assert again.stdout == used.stdout and unpacked(tmp_path) == [place], again.stderr


def test_directories_of_others_are_not_trusted(jar, bare, tmp_path):
    home = tmp_path / "kdirect"
    home.mkdir()
    home.chmod(0o777)
    assert f"{home} (other users may write into it)" in refusal(run(bare, jar, tmp_path))
    home.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(home, 12345, 12345)
        assert f"{home} (it belongs to another user)" in refusal(run(bare, jar, tmp_path))
        os.chown(home, 0, 0)
    home.rmdir()
    (tmp_path / "elsewhere").mkdir()
    home.symlink_to(tmp_path / "elsewhere")
    assert "it is no directory" in refusal(run(bare, jar, tmp_path))


def test_a_jar_without_modules_for_this_python_says_which_it_has(jar, bare, tmp_path):
    def other(manifest: dict) -> None:
        manifest["payloads"] = {"cpython-39-aarch64-linux-gnu": manifest["payloads"][unpack.tag()]}

    said = refusal(run(bare, changed(jar, tmp_path / "other.jar", other), tmp_path))
    assert "has compiled modules for cpython-39-aarch64-linux-gnu" in said
    assert f"{bare} needs those for {unpack.tag()}" in said
    assert f"install kdirect=={VERSION}" in said


def test_a_jar_for_a_newer_glibc_is_refused(jar, bare, tmp_path):
    if unpack.glibc() is None:
        pytest.skip("this Python uses another C library than glibc")

    def newer(manifest: dict) -> None:
        assert tuple(manifest["payloads"][unpack.tag()]["glibc"]) <= unpack.glibc()
        manifest["payloads"][unpack.tag()]["glibc"] = [99, 1]

    said = refusal(run(bare, changed(jar, tmp_path / "newer.jar", newer), tmp_path))
    assert "need glibc 99.1, and this host has" in said


def test_a_damaged_jar_is_refused(jar, bare, tmp_path):
    def flip(name: str, content: bytes) -> bytes:
        if not name.endswith(".zip"):
            return content
        return content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]

    said = refusal(run(bare, changed(jar, tmp_path / "flip.jar", content=flip), tmp_path))
    assert re.search(r"kdirect-python/.*\.zip in .*flip\.jar is damaged; copy the jar again", said)


def test_a_python_without_pyarrow_is_named_with_the_remedy(jar, tmp_path):
    python = bare_python.make(tmp_path / "env", without=("pyarrow", "numpy"))
    said = refusal(run(python, jar, tmp_path, code="import kdirect"))
    assert f"{python} lacks numpy, pyarrow, which kdirect needs" in said
    assert "pip install numpy pyarrow" in said


def test_an_installed_kdirect_of_the_same_version_is_taken(jar, tmp_path):
    used = run(Path(sys.executable), jar, tmp_path)
    assert used.returncode == 0, used.stderr
    assert Path(used.stdout.strip()).is_relative_to(bare_python.SITE)
    assert not (tmp_path / "kdirect").exists()


def test_an_installed_kdirect_of_another_version_is_refused(jar, bare, tmp_path):
    other = tmp_path / "other"
    (other / "kdirect").mkdir(parents=True)
    text = (bare_python.SITE / "kdirect" / "__init__.py").read_text()
    (other / "kdirect" / "__init__.py").write_text(text.replace(f'"{VERSION}"', '"0.0.9"'))
    said = refusal(run(bare, other, tmp_path, jar, code="import kdirect_spark"))
    assert f"kdirect 0.0.9 is installed in {other}" in said
    assert f"the jar {jar} is of kdirect {VERSION}" in said
    assert f"install kdirect=={VERSION} on every host, or none" in said


def test_the_shims_version_is_compared(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import kdirect_spark"], capture_output=True, text=True,
        env={**os.environ, "KDIRECT_JAR_VERSION": "0.0.9"}, timeout=60, check=False,
    )  # fmt: skip
    said = refusal(done)
    assert "the shim's jar is of kdirect 0.0.9, but" in said
    assert f"has kdirect {VERSION}" in said and "the same version on every host" in said


def test_equal_packages_make_equal_parts_and_jars_of_platforms_add_up(jar, tmp_path):
    one_jar._payload.cache_clear()
    mine = one_jar.parts()
    with zipfile.ZipFile(jar) as opened:
        assert {name: opened.read(name) for name in mine} == mine

    def elsewhere(manifest: dict) -> None:
        payload = manifest["payloads"].pop(unpack.tag())
        manifest["payloads"]["cpython-312-x86_64-linux-gnu"] = {
            **payload,
            "file": "kdirect-python/x.zip",
        }

    other = changed(jar, tmp_path / "other.jar", elsewhere)
    with zipfile.ZipFile(other, "a") as opened:
        opened.writestr("kdirect-python/x.zip", b"theirs")
    both = one_jar.parts([other])
    manifest = json.loads(both[unpack.MANIFEST])
    assert set(manifest["payloads"]) == {unpack.tag(), "cpython-312-x86_64-linux-gnu"}
    assert both["kdirect-python/x.zip"] == b"theirs"
    older = changed(jar, tmp_path / "older.jar", lambda manifest: manifest.update(version="0.0.9"))
    with pytest.raises(one_jar.ShimError, match=r"is of kdirect 0\.0\.9, not"):
        one_jar.parts([older])
    (tmp_path / "no.jar").write_bytes(b"no zip")
    with pytest.raises(one_jar.ShimError, match="no jar with kdirect's Python packages"):
        one_jar.parts([tmp_path / "no.jar"])


def test_the_jar_carries_what_kdirect_depends_on():
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    depends = set(re.findall(r'^    "([A-Za-z0-9-]+)', listed, re.MULTILINE))
    with_modules = json.loads(one_jar.parts()[unpack.MANIFEST])
    assert {name for name, _ in with_modules["carries"]} == depends - set(one_jar.NEEDED)
    assert set(one_jar.NEEDED) < depends
