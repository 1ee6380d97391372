"""What a guest boots: the machine's own Debian kernel, uncompressed, and an initramfs with the
modules of soft-RoCE.

Owns: the check that every package is there, the choice of the kernel, and the cache of what was
made of it (`$XDG_CACHE_HOME/kdirect/guest`, outside of the tree; a directory a recipe, so that a
changed kernel or init script makes a new one). Starts nothing: `machine.py` does.  Needs nothing
but the standard library.

A missing package is a `GuestError` that names it and the command that installs it, never a skip.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
# Loaded by the initramfs, in this order, each behind what it depends on.
BOOT_MODULES = (
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_net",
    "dummy",
    "rdma_rxe",
    "rdma_ucm",
)
# Debian package: the command or file that shows that it is there.
PACKAGES = {
    "qemu-system-x86": "qemu-system-x86_64",
    "rdma-core": "/usr/share/doc/rdma-core",
    "ibverbs-providers": "/usr/share/doc/ibverbs-providers",
    "ibverbs-utils": "ibv_devinfo",
    "perftest": "ib_read_bw",
    "iproute2": "rdma",
    "busybox-static": "/bin/busybox",
    "kmod": "modprobe",
    "python3-pyverbs": str(DIST_PACKAGES / "pyverbs"),
}
KERNEL_PACKAGE = "linux-image-amd64"
BZIMAGE_SETUP_SECTORS, BZIMAGE_PAYLOAD = 0x1F1, 0x248


class GuestError(Exception):
    """The guest cannot be made or did not do what was asked; the message names the remedy."""


@dataclass(frozen=True)
class Image:
    """`kernel` and `initramfs` are files; `pyverbs` a directory for PYTHONPATH, or None where the
    environment has its own."""

    release: str
    kernel: Path
    initramfs: Path
    pyverbs: Path | None


def _found(evidence: str) -> bool:
    if evidence.startswith("/"):
        return os.path.exists(evidence)
    return shutil.which(evidence, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def _module_files(release: str) -> dict[str, str]:
    """Name of each module of the kernel to its path below /lib/modules/RELEASE."""
    listed = Path("/lib/modules", release, "modules.dep")
    if not listed.exists():
        return {}
    paths = [line.partition(":")[0] for line in listed.read_text().splitlines()]
    return {_module_name(path): path for path in paths}


def _module_name(path: str) -> str:
    return Path(path).name.partition(".ko")[0].replace("-", "_")


def kernel_release() -> str | None:
    """The newest installed kernel that has soft-RoCE; None when there is none.
    KDIRECT_GUEST_KERNEL names another."""
    named = os.environ.get("KDIRECT_GUEST_KERNEL")
    if named:
        return named

    def age(release: str) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (-1, part)
            for part in release.replace("-", ".").split(".")
        ]

    installed = sorted(
        (
            p.name
            for p in Path("/lib/modules").glob("*")
            if Path("/boot", f"vmlinuz-{p.name}").exists()
        ),
        key=age,
    )
    return next((r for r in reversed(installed) if "rdma_rxe" in _module_files(r)), None)


def packages() -> list[str]:
    """Every Debian package that a guest needs, in alphabetical order."""
    return sorted([*PACKAGES, KERNEL_PACKAGE])


def missing_packages() -> list[str]:
    """Debian packages that have to be installed before a guest can boot, in alphabetical order."""
    missing = [package for package, evidence in PACKAGES.items() if not _found(evidence)]
    if kernel_release() is None:
        missing.append(KERNEL_PACKAGE)
    return sorted(missing)


def cache() -> Path:
    """Where what was made for guests is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kdirect", "guest")


def prepare() -> Image:
    """Check what is needed and make, or find, the image.  GuestError names what is missing."""
    if platform.machine() != "x86_64":
        raise GuestError(f"the guest is an x86-64 one, this machine is {platform.machine()}")
    missing = missing_packages()
    if missing:
        raise GuestError(
            f"Debian packages are missing: {' '.join(missing)};"
            f" apt-get install --no-install-recommends {' '.join(missing)}"
        )
    release = kernel_release()
    assert release is not None
    kernel = Path("/boot", f"vmlinuz-{release}")
    if not os.access(kernel, os.R_OK):
        raise GuestError(
            f"{kernel} is not readable for this user; run as root, or chmod a+r {kernel}"
        )
    recipe = hashlib.sha256()
    status = kernel.stat()
    recipe.update(f"{release} {status.st_size} {status.st_mtime_ns} {BOOT_MODULES}".encode())
    for source in (Path(__file__), HERE / "init.sh", HERE / "command.sh"):
        recipe.update(source.read_bytes())
    home = cache()
    directory = home / f"{release}-{recipe.hexdigest()[:12]}"
    if not directory.exists():
        partial = home / f"{directory.name}.{os.getpid()}"
        partial.mkdir(parents=True)
        (partial / "kernel").write_bytes(uncompressed(kernel.read_bytes()))
        (partial / "initramfs").write_bytes(initramfs(release))
        try:
            partial.rename(directory)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return Image(release, directory / "kernel", directory / "initramfs", _pyverbs(home))


def _pyverbs(home: Path) -> Path | None:
    """A directory that holds a link to Debian's pyverbs and nothing else of dist-packages; None if
    the environment has pyverbs."""
    own = subprocess.run(
        [sys.executable, "-I", "-c", "import pyverbs.device"], capture_output=True, check=False
    )
    if own.returncode == 0:
        return None
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not list((DIST_PACKAGES / "pyverbs").glob(f"device.{tag}*.so")):
        built = (
            ", ".join(p.name.split(".")[1] for p in (DIST_PACKAGES / "pyverbs").glob("device.*.so"))
            or "nothing"
        )
        raise GuestError(
            f"python3-pyverbs is built for {built},"
            f" the environment runs Python {platform.python_version()};"
            " make the environment with that version (make PYTHON=...),"
            " or install pyverbs into it (extra [rdma])"
        )
    directory = home / "pyverbs"
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / "pyverbs"
    if not link.is_symlink():
        try:
            link.symlink_to(DIST_PACKAGES / "pyverbs")
        except FileExistsError:
            pass
    return directory


def uncompressed(image: bytes) -> bytes:
    """The ELF kernel inside a bzImage, which QEMU starts by PVH: emulated decompression takes
    longer than the boot.

    A compression that this Python does not know leaves the bzImage as it is; it boots too.
    """
    offset, length = struct.unpack_from("<II", image, BZIMAGE_PAYLOAD)
    start = ((image[BZIMAGE_SETUP_SECTORS] or 4) + 1) * 512 + offset
    payload = image[start : start + length]
    try:
        if payload.startswith(b"\xfd7zXZ\0"):
            kernel = lzma.LZMADecompressor().decompress(payload)
        elif payload.startswith(b"\x1f\x8b"):
            kernel = zlib.decompressobj(31).decompress(payload)
        elif payload.startswith(b"\x28\xb5\x2f\xfd") and shutil.which("zstd"):
            kernel = subprocess.run(
                ["zstd", "-dc"], input=payload, capture_output=True, check=False
            ).stdout
        else:
            return image
    except (lzma.LZMAError, zlib.error):
        return image
    return kernel if kernel.startswith(b"\x7fELF") else image


def load_order(release: str) -> list[str]:
    """Paths of the modules to load, dependencies first, below /lib/modules/RELEASE."""
    base = Path("/lib/modules", release)
    needs: dict[str, list[str]] = {}
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {_module_name(path): path for path in needs}
    builtin = {_module_name(line) for line in (base / "modules.builtin").read_text().splitlines()}
    order: list[str] = []
    for name in BOOT_MODULES:
        if name in builtin:
            continue
        if name not in by_name:
            raise GuestError(
                f"kernel {release} has no module {name};"
                " install linux-image-amd64 (a cloud kernel has no soft-RoCE)"
            )
        # modules.dep lists what a module needs nearest first
        order += [
            path for path in [*reversed(needs[by_name[name]]), by_name[name]] if path not in order
        ]
    return order


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".gz":
        return zlib.decompressobj(31).decompress(data)
    if path.suffix == ".zst":
        if not shutil.which("zstd"):
            raise GuestError(f"{path} is compressed with zstd; apt-get install zstd")
        return subprocess.run(["zstd", "-dc"], input=data, capture_output=True, check=True).stdout
    return data


def initramfs(release: str) -> bytes:
    """A cpio archive: busybox, the modules in load order, and the two scripts."""
    files: list[tuple[str, int, bytes]] = [
        (name, 0o040755, b"")
        for name in ("bin", "modules", "proc", "sys", "dev", "root", "lower", "rw")
    ]
    files.append(("bin/busybox", 0o100755, Path("/bin/busybox").read_bytes()))
    names = []
    for path in load_order(release):
        names.append(_module_name(path) + ".ko")
        files.append(
            (f"modules/{names[-1]}", 0o100644, _module(Path("/lib/modules", release, path)))
        )
    files.append(("modules/order", 0o100644, "".join(f"{name}\n" for name in names).encode()))
    files.append(("init", 0o100755, (HERE / "init.sh").read_bytes()))
    files.append(("command.sh", 0o100755, (HERE / "command.sh").read_bytes()))
    return cpio(files)


def cpio(files: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A "newc" archive of (path, mode, content); its length is a multiple of 512, so that archives
    can follow one another."""
    out = bytearray()

    def pad(multiple: int) -> None:
        out.extend(bytes(-len(out) % multiple))

    for inode, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        path = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % value for value in fields) + path
        pad(4)
        out += data
        pad(4)
    pad(512)
    return bytes(out)
