"""Will RDMA work here, and if not, why: the path from the package to a data READ, step by step.

How to use it (``kdirect doctor``, and a broker's or client's log)::

    steps = preflight("192.168.1.5", paths=["/dev/shm/kdirect"])
    for step in steps:
        print("ok " if step.ok else "NO ", step.name, step.detail, step.hint)
    usable = all(step.ok for step in steps)
    # steps[-1] is the data ping, or the step that ended the walk

Steps come in the order in which a connection needs them, under the names in `STEPS`.  The walk ends
at the first failure after which nothing more can be tried, so the last step is either the ping,
which passed, or a step that failed.  `preflight` raises nothing that the host is to blame for.

It opens the device in this process for a moment and closes it again: run it in a process that may
do so (not before a fork).  The ping goes between two queue pairs of this host's own port; the way
to a broker is proven by a client's own ping when it connects.  What may not enter: pyverbs (it is
asked through `kdirect.rdma.verbs`), logs, Kafka.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdirect.errors import KdirectError, RdmaError
from kdirect.rdma import verbs, verbs_choice
from kdirect.rdma.contract import Access, Device, Memory
from kdirect.rdma.verbs_device import VerbsDevice
from kdirect.rdma.verbs_limits import filesystem, memlock_fix, memlock_limit

PYVERBS = "pyverbs"
DEVICE = "device"
DEVICE_FILES = "device files"
GID = "gid"
MEMLOCK = "memlock"
OPEN = "open"
MEMORY = "memory"
MAPPING = "mapping"
PING = "ping"
STEPS = (PYVERBS, DEVICE, DEVICE_FILES, GID, MEMLOCK, OPEN, MEMORY, MAPPING, PING)

REGISTER_BYTES = 64 << 20
PING_BYTES = 4096
PING_TIMEOUT_MS = 10_000


@dataclass(frozen=True, slots=True)
class Step:
    """One step.  `name` is one of STEPS; `detail` says what was found, `hint` (only when not `ok`)
    what to do."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


def preflight(
    bind_address: str = "",
    *,
    device: str = "",
    gid_index: int = -1,
    paths: Iterable[str] = (),
    need_bytes: int = REGISTER_BYTES,
) -> list[Step]:
    """Walk the path to a data READ over this host's RDMA device; see the module.

    `bind_address`, `device`, `gid_index` as the options rdma.bind.address, rdma.device and
    rdma.gid.index.  `paths`: directories whose files will take RDMA (a broker's log.dirs); each is
    tried with a small file.  `need_bytes`: memory to be registered at once.
    """
    steps: list[Step] = []
    opened: VerbsDevice | None = None
    try:
        version, where = verbs.library()
        steps.append(Step(PYVERBS, True, f"pyverbs {version} from {where}"))
        if not verbs_choice.devices():
            raise _At(DEVICE, verbs_choice.no_device_error())
        names = sorted({port.device for port in verbs_choice.devices()})
        steps.append(Step(DEVICE, True, ", ".join(names)))
        refused = verbs_choice.device_file_error()
        if refused is not None:
            raise _At(DEVICE_FILES, refused)
        steps.append(
            Step(
                DEVICE_FILES,
                True,
                f"{verbs_choice.DEVICE_FILES} can be opened by user {os.geteuid()}",
            )
        )
        with _at(GID):
            choice = verbs_choice.choose(
                bind_address, device=device, gid_index=gid_index, strict=bool(bind_address)
            )
        steps.append(Step(GID, True, str(choice)))
        steps.append(memlock_step(need_bytes))
        with _at(OPEN):
            opened = VerbsDevice(bind_address, device=device, gid_index=gid_index)
            steps.append(Step(OPEN, True, opened.describe()))
        with _at(MEMORY):
            steps.append(Step(MEMORY, True, _try_memory(opened, need_bytes)))
        for path in paths:
            try:
                steps.append(Step(MAPPING, True, check_mapping(opened, path)))
            except (KdirectError, OSError) as e:
                steps.append(_failed(MAPPING, e))
        with _at(PING):
            steps.append(Step(PING, True, _try_ping(opened)))
    except _At as e:
        steps.append(_failed(e.step, e.error))
    except KdirectError as e:
        steps.append(_failed(PYVERBS, e))
    finally:
        if opened is not None:
            opened.close()
    return steps


class _At(Exception):
    """A step failed and the walk ends."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.error = error


class _at:
    """Turns errors of its block into the failure of a step."""

    def __init__(self, step: str) -> None:
        self._step = step

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, KdirectError | OSError):
            raise _At(self._step, error) from error


def _failed(name: str, error: Exception) -> Step:
    if isinstance(error, KdirectError):
        return Step(name, False, error.message, error.hint)
    return Step(name, False, str(error), "look up the name of this error")


# -- limits ----------------------------------------------------------------------------------------
def memlock_step(need_bytes: int) -> Step:
    """Whether so many bytes can be registered under this process's limit of locked memory."""
    limit = memlock_limit()
    if limit < 0:
        return Step(MEMLOCK, True, "no limit of locked memory")
    detail = (
        f"locked memory is limited to {limit >> 10} KiB (ulimit -l);"
        f" {need_bytes >> 10} KiB are needed"
    )
    return Step(MEMLOCK, limit >= need_bytes, detail, "" if limit >= need_bytes else memlock_fix())


# -- trying ----------------------------------------------------------------------------------------
def _try_memory(device: Device, need_bytes: int) -> str:
    domain = device.alloc_pd()
    memory = Memory.anonymous(need_bytes, "kdirect-preflight")
    try:
        domain.register(memory, Access.LOCAL_WRITE | Access.REMOTE_READ).deregister()
    finally:
        domain.close()
        memory.close()
    return f"{need_bytes >> 20} MiB of anonymous memory registered"


def check_mapping(device: Device, path: str) -> str:
    """Prove with a small file that mapped files of directory `path` can be registered for RDMA;
    what was found.  RdmaError, or OSError."""
    name = os.path.join(path, f".kdirect-preflight.{os.getpid()}")
    domain = device.alloc_pd()
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(name)
        os.posix_fallocate(fd, 0, 1 << 16)
        memory = Memory.map(fd, 1 << 16, True)
        try:
            domain.register(
                memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
            ).deregister()
            kind = filesystem(fd)[0] or "unknown file system"
            return f"a mapped file in {path} ({kind}) takes RDMA reads and writes"
        finally:
            domain.close()
            memory.close()
    finally:
        os.close(fd)


def _try_ping(device: VerbsDevice) -> str:
    """A READ between two queue pairs of the device, through the network port."""
    domain = device.alloc_pd()
    cq = device.create_cq(depth=64)
    memory = Memory.anonymous(2 * PING_BYTES, "kdirect-ping")
    try:
        region = domain.register(memory, Access.LOCAL_WRITE | Access.REMOTE_READ)
        proof = os.urandom(PING_BYTES)
        view = memoryview(memory)
        view[PING_BYTES:] = proof
        near, far = (
            domain.create_qp(cq, cq, max_send_wr=4, max_recv_wr=4),
            domain.create_qp(cq, cq, max_send_wr=4, max_recv_wr=4),
        )
        far.connect(near.address, False)
        near.connect(far.address, True)
        near.post_read(1, region, 0, PING_BYTES, region.address + PING_BYTES, region.rkey)
        if not cq.wait(PING_TIMEOUT_MS):
            raise RdmaError(
                f"a READ of {PING_BYTES} bytes over {device.choice.port.name} did not complete in"
                f" {PING_TIMEOUT_MS} ms",
                hint="no RDMA data flows through this port: check the GID (rdma.gid.index), a"
                " firewall (UDP port 4791) and the configuration of the switch",
            )
        (completion,) = cq.poll(1)
        if not completion.ok or bytes(view[:PING_BYTES]) != proof:
            raise RdmaError(
                f"a READ over {device.choice.port.name} failed: {completion}",
                hint="check the GID (rdma.gid.index) and UDP port 4791",
            )
        del view
        return (
            f"a READ of {PING_BYTES} bytes over {device.choice.port.name} brought the right bytes"
        )
    finally:
        domain.close()
        cq.close()


__all__ = [
    "STEPS",
    "Step",
    "check_mapping",
    "memlock_step",
    "preflight",
]
