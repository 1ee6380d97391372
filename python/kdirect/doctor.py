"""``kdirect doctor``: the whole path from the kernel to a data READ, step by step, and whether RDMA
would be used.

Owns: the order of the steps, their printing, and the verdict.  With --remote-storage, also whether
an object store does what tiers ask of it (`kdirect.objects.proof`).  Every check of the RDMA device
is `kdirect.rdma.verbs_preflight`'s; the choice of a transport towards a broker is the client's own
(`Session.transport`), so that what is said here is what a client would do.  Nothing imports this
module but the command line; it changes nothing and leaves nothing behind.

Verdicts: ``ok``, ``NO`` (RDMA is not used because of it), ``note`` (worth knowing, decides
nothing).  The exit status is 0 when the transport asked about would be used (`verbs`, unless
another one is named) and an object store that was named does all, else 1.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import kdirect
from kdirect.errors import KdirectError
from kdirect.options import CLIENT
from kdirect.rdma import open_device, verbs_choice, verbs_preflight
from kdirect.rdma.contract import Access, Memory

OK, NO, NOTE = "ok", "NO", "note"
REMOTE = "remote"  # what findings of the object store are about
PING_BYTES = 4096
PING_TIMEOUT_MS = 5000
# Kernels that refuse to register writable shared mappings of files, and the file systems they
# spare.
REFUSING_SINCE = (6, 5)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor: `step` names the thing looked at, `hint` what to do about it."""

    step: str
    verdict: str
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Questions:
    """What to look at.  `transport`: which one the exit status is about (`verbs` or `shm`; `auto`
    means verbs).  The rest as the options rdma.bind.address, rdma.device, rdma.gid.index;
    `log_dirs` are a broker's, `bootstrap` a running broker's address or empty.  `remote_storage`:
    the URI of an object store that is to be tried, `remote_config` its properties."""

    bootstrap: str = ""
    transport: str = "auto"
    bind_address: str = ""
    device: str = ""
    gid_index: int = -1
    log_dirs: Sequence[str] = ()
    remote_storage: str = ""
    remote_config: Mapping[str, str] = field(default_factory=dict, repr=False)


def run(questions: Questions, out: TextIO | None = None) -> int:
    """Print every finding as it is made, then the verdict; the exit status."""
    stream = out or sys.stdout
    wanted = "verbs" if questions.transport == "auto" else questions.transport
    refused: dict[str, Finding] = {}
    for transport, finding in examine(questions):
        if finding.verdict == NO:
            refused.setdefault(transport, finding)
        print(f"{finding.verdict:5} {finding.step:14} {finding.detail}", file=stream)
        if finding.hint and finding.verdict != OK:
            print(f"{'':20} -> {finding.hint}", file=stream)
        stream.flush()
    where = (
        f"with the broker at {questions.bootstrap}"
        if questions.bootstrap
        else "on this host (no broker was named: --broker HOST:PORT)"
    )
    stored = REMOTE not in refused
    if not stored:
        print(f"\nthe object store cannot be used: {refused[REMOTE].detail}", file=stream)
    reason = refused.get(wanted)
    if reason is None:
        print(f"\n{wanted} would be used {where}", file=stream)
        return 0 if stored else 1
    rest = [t for t in ("verbs", "shm", "tcp") if t != wanted and t not in refused]
    instead = f"transport=auto would take {rest[0]}" if rest else "no transport would work"
    if rest and rest[0] == "shm" and not questions.bootstrap:
        instead += " with a broker on this host, tcp with any other"
    print(
        f"\n{wanted} would NOT be used {where}: {reason.step}: {reason.detail}; {instead}",
        file=stream,
    )
    return 1


def examine(questions: Questions) -> Iterator[tuple[str, Finding]]:
    """(transport that the finding is about, or "", finding), in order."""
    uname = os.uname()
    yield (
        "",
        Finding(
            "system",
            NOTE,
            f"kdirect {kdirect.__version__}, Python {platform.python_version()},"
            f" {uname.sysname} {uname.release}",
        ),
    )
    kind = verbs_choice.container()
    if kind:
        yield (
            "",
            Finding(
                "container", NOTE, f"this is {kind}", verbs_choice.container_hint().lstrip("; ")
            ),
        )
    for port in verbs_choice.devices():
        gids = ", ".join(map(str, port.gids)) or "none"
        yield (
            "",
            Finding("port", NOTE, f"{port.name}: {port.state}, {port.link_layer}; GIDs {gids}"),
        )
    for directory in questions.log_dirs:
        yield "", log_directory(directory)
    if questions.remote_storage:
        yield from ((REMOTE, finding) for finding in remote_storage(questions))
    yield from _verbs(questions)
    yield "shm", shm()
    if questions.bootstrap:
        yield from _broker(questions)
    else:
        yield "tcp", Finding("tcp", NOTE, "works with any broker that is reached; none was named")


# -- the host --------------------------------------------------------------------------------------
def _verbs(questions: Questions) -> Iterator[tuple[str, Finding]]:
    paths = [d for d in questions.log_dirs if os.path.isdir(d)]
    steps = verbs_preflight.preflight(
        questions.bind_address, device=questions.device, gid_index=questions.gid_index, paths=paths
    )
    for step in steps:
        yield "verbs", Finding(step.name, OK if step.ok else NO, step.detail, step.hint)


def log_directory(path: str) -> Finding:
    """What file system a log directory is on, and whether this kernel registers what is mapped
    there."""
    existing = next(
        p for p in [Path(path).absolute(), *Path(path).absolute().parents] if p.exists()
    )
    mount, kind = file_system(existing)
    free = shutil.disk_usage(existing).free >> 20
    detail = f"{path}: {kind} (mounted at {mount}), {free} MiB free"
    if not os.path.isdir(path):
        return Finding(
            "log directory", NOTE, detail + "; it does not exist yet", "a broker creates it"
        )
    if kind not in MEMORY_FILE_SYSTEMS and _kernel() >= REFUSING_SINCE:
        since = ".".join(map(str, REFUSING_SINCE))
        detail += f"; kernels from {since} on do not register its mapped files for RDMA"
        return Finding(
            "log directory",
            NOTE,
            detail,
            "put log.dirs on tmpfs, hugetlbfs or a DAX device if producers are to write by verbs",
        )
    return Finding("log directory", NOTE, detail)


def file_system(path: Path) -> tuple[str, str]:
    """(mount point, type) of the file system that holds `path`."""
    real = os.path.realpath(path)
    best = ("/", "unknown")
    with open("/proc/self/mountinfo") as f:
        for line in f:
            left, _, right = line.partition(" - ")
            mount = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), left.split()[4])
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and (
                len(mount) >= len(best[0])
            ):  # of two mounts on one place the later one is on top
                best = (mount, right.split()[0])
    return best


def _kernel() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def shm() -> Finding:
    """Whether two queue pairs of the software RNIC reach one another in this process: a READ of
    random bytes."""
    try:
        device = open_device("shm", shared=False)
        try:
            domain, cq = device.alloc_pd(), device.create_cq(64)
            region = domain.register(
                Memory.anonymous(2 * PING_BYTES, "kdirect-doctor"),
                Access.LOCAL_WRITE | Access.REMOTE_READ,
            )
            proof = os.urandom(PING_BYTES)
            memoryview(region.memory)[PING_BYTES : 2 * PING_BYTES] = proof
            near, far = (domain.create_qp(cq, cq, max_send_wr=4, max_recv_wr=4) for _ in range(2))
            far.connect(near.address, False)
            near.connect(far.address, True)
            near.post_read(1, region, 0, PING_BYTES, region.address + PING_BYTES, region.rkey)
            arrived = (
                cq.wait(PING_TIMEOUT_MS)
                and cq.poll(1)[0].ok
                and bytes(memoryview(region.memory)[:PING_BYTES]) == proof
            )
        finally:
            device.close()
    except (KdirectError, OSError) as e:
        return Finding("shm", NO, str(e), "use transport=tcp")
    if not arrived:
        return Finding(
            "shm", NO, f"a READ of {PING_BYTES} bytes did not bring them", "use transport=tcp"
        )
    return Finding(
        "shm",
        OK,
        f"a READ of {PING_BYTES} bytes through this host's memory brought the right bytes",
    )


# -- the object store ------------------------------------------------------------------------------
def remote_storage(questions: Questions) -> Iterator[Finding]:
    """A put, a ranged get, a list and a delete of an object of the doctor's own."""
    from kdirect.objects import proof, store

    try:
        opened = store.ObjectStore(questions.remote_storage, questions.remote_config)
    except KdirectError as e:
        yield Finding("remote storage", NO, e.message, e.hint)
        return
    for step in proof.prove(opened):
        yield Finding(step.step, OK if step.ok else NO, f"{opened.uri}: {step.detail}", step.hint)


# -- the broker ------------------------------------------------------------------------------------
def _broker(questions: Questions) -> Iterator[tuple[str, Finding]]:
    settings = {"bootstrap.servers": questions.bootstrap, "client.id": "kdirect-doctor"}
    known = {row.name for row in CLIENT.rows}
    for name, value, unset in (
        ("rdma.bind.address", questions.bind_address, ""),
        ("rdma.device", questions.device, ""),
        ("rdma.gid.index", questions.gid_index, -1),
    ):
        if value != unset and name in known:
            settings[name] = str(value)
    try:
        peer = kdirect.connect({**settings, "transport": "tcp"}).cluster.control_connection().peer
    except KdirectError as e:
        for transport in ("tcp", "verbs", "shm"):
            yield transport, Finding("broker", NO, e.message, e.hint)
        return
    yield "tcp", Finding("broker", OK, f"{peer} answers")
    for transport in ("verbs", "shm"):
        try:
            session = kdirect.connect({**settings, "transport": transport})
            try:
                chosen, why = session.transport, session.transport_reason
            finally:
                session.close()
            yield transport, Finding(f"{chosen} ping", OK, why)
        except KdirectError as e:
            yield transport, Finding(f"{transport} ping", NO, e.message, e.hint)
