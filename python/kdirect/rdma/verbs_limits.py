"""Why libibverbs refused memory or a queue: the limit, the need and the remedy.

Law of the room: it explains errno values of `ibv_reg_mr`, `ibv_create_cq` and the like as errors
that name the remedy, and knows the limits that lead to them (locked memory, file systems that
cannot be pinned).  It opens no device, and pyverbs, logs and Kafka may not enter.
"""

from __future__ import annotations

import errno
import os
import resource

from kdirect.errors import RdmaError
from kdirect.rdma import verbs_choice
from kdirect.rdma.contract import Access, Memory

# File systems whose mapped files can be pinned.  Kernels refuse those of ext4, xfs, btrfs, f2fs.
_RAM = ("tmpfs", "hugetlbfs", "ramfs", "devtmpfs")


def memlock_limit() -> int:
    """Bytes that this process may lock; -1: no limit (it has CAP_IPC_LOCK, or the limit is off)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY or _may_lock_all() else soft


def _may_lock_all() -> bool:
    try:
        with open("/proc/self/status") as f:
            effective = next(int(line.split()[1], 16) for line in f if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(effective >> 14 & 1)  # CAP_IPC_LOCK


def memlock_fix() -> str:
    """What to do about a low limit, as a hint."""
    return (
        "raise it: LimitMEMLOCK=infinity in a systemd unit, 'memlock unlimited' in"
        " /etc/security/limits.conf, ulimit -l unlimited in a shell, or the capability IPC_LOCK"
        + verbs_choice.container_hint()
    )


def registration_error(code: int, memory: Memory, access: int, length: int) -> RdmaError:
    """Why ibv_reg_mr refused `length` bytes of `memory` with `access`: the limit, the need and the
    fix.  `code` is its errno."""
    what = f"cannot register {length} bytes of memory ({errno.errorcode.get(code, code)})"
    kind, name = filesystem(memory.fd)
    if code in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        limit = memlock_limit()
        if limit >= 0:
            return RdmaError(
                f"{what}: locked memory is limited to {limit >> 10} KiB,"
                f" {length >> 10} KiB more are needed",
                hint=memlock_fix(),
            )
        return RdmaError(
            f"{what}: the host or the device has no memory left for it",
            hint="free memory, or use smaller segments (log.segment.bytes)",
        )
    if code in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
        if kind and kind not in _RAM:
            return RdmaError(
                f"{what}: {name or 'the file'} is on {kind}, and kernel {os.uname().release}"
                " does not pin mapped files of it",
                hint="put the log on tmpfs, hugetlbfs or a DAX device (log.dirs), or serve it over"
                " TCP; kernels from 6.5 on refuse ext4 and xfs",
            )
        if not memory.writable:
            return RdmaError(
                f"{what}: it is mapped read-only, and kernel {os.uname().release} pins writable"
                " shared mappings only",
                hint="map it read-write (MAP_SHARED): the access flags of the key keep peers from"
                " writing",
            )
    if code == errno.ENOSPC:
        return RdmaError(
            f"{what}: the device has no more memory regions",
            hint="close idle clients; ibv_devinfo -v shows max_mr",
        )
    return RdmaError(
        f"{what}: {os.strerror(code)} (access {Access(access)!r})",
        hint="run kdirect doctor; it tries each step alone",
    )


def queue_error(code: int, what: str, need: str) -> RdmaError:
    """Why `what` (a completion queue, a queue pair, a context) of `need` could not be made."""
    name = errno.errorcode.get(code, code)
    if code in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        limit = memlock_limit()
        if limit >= 0:
            return RdmaError(
                f"cannot create {what} of {need} ({name}): locked memory is limited to"
                f" {limit >> 10} KiB",
                hint=memlock_fix(),
            )
        return RdmaError(
            f"cannot create {what} of {need} ({name}): the device has no room for it",
            hint="close idle clients or lower rdma.max.in.flight",
        )
    if code in (errno.EACCES, errno.ENOENT):
        error = verbs_choice.device_file_error()
        if error is not None:
            return RdmaError(error.message, hint=error.hint)
    return RdmaError(
        f"cannot create {what} of {need}: {os.strerror(code) if code else name}",
        hint="ibv_devinfo -v shows the device's limits",
    )


def filesystem(fd: int) -> tuple[str, str]:
    """(type of the file system, name) of the file behind a descriptor; empty strings where it is
    not known."""
    if fd < 0:
        return "", ""
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith("/memfd:"):
            return "tmpfs", name
        st = os.fstat(fd)
        device = f"{os.major(st.st_dev)}:{os.minor(st.st_dev)}"
        with open("/proc/self/mountinfo") as f:
            for line in f:
                fields, _, rest = line.partition(" - ")
                if fields.split()[2] == device:
                    return rest.split()[0], name
    except (OSError, IndexError):
        return "", ""
    return "", name
