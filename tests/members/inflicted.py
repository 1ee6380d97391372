"""What is done to a broker's process and disk from outside of it: its queue pairs are cut, and its
disk is full."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import kdirect

PIDFD_GETFD = 438  # the system call's number, on all architectures
FILLER = "filler"


# -- queue pairs -----------------------------------------------------------------------------------


class End(Enum):
    """Whose end of a link a broker has.  Followers open them."""

    LEADER = "where it leads"
    FOLLOWER = "where it follows"


def cut_links(cluster: kdirect.Cluster, node_id: int, end: End) -> int:
    """Let a broker find that the queue pairs over shm between it and other brokers are cut: those
    of which it has this end; how many they were.

    Each has a Unix socket, whose end of file means that the peer is gone.  Here only the victim
    comes to read it, and closes its own end as it does then; so the other one is told truly."""
    others = {cluster.pid(n) for n in cluster.running if n != node_id}
    count = 0
    for link in _sockets(cluster.pid(node_id)):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            accepted = bool(link.getsockname())
            if struct.unpack("3i", peer)[0] in others and accepted == (end is End.LEADER):
                link.shutdown(socket.SHUT_RD)
                count += 1
    return count


def _sockets(pid: int) -> Iterator[socket.socket]:
    """A process' Unix sockets that keep the borders of messages; closed after use."""
    getfd = ctypes.CDLL(None, use_errno=True).syscall
    process = os.pidfd_open(pid)
    try:
        for fd in map(int, os.listdir(f"/proc/{pid}/fd")):
            with contextlib.suppress(FileNotFoundError):
                if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
                    continue
                ours = getfd(PIDFD_GETFD, process, fd, 0)
                if ours < 0:
                    code = ctypes.get_errno()
                    if code == errno.EBADF:
                        continue
                    raise OSError(code, f"pidfd_getfd: {os.strerror(code)}")
                with socket.socket(fileno=ours) as found:
                    if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                        yield found
    finally:
        os.close(process)


# -- disks -----------------------------------------------------------------------------------------


def why_no_disks() -> str:
    """Why no file system can be mounted; empty where it can."""
    return "" if os.geteuid() == 0 else "needs root, to mount a small disk"


class Disk:
    """A file system of a few megabytes, in memory, mounted at `directory`."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kdirect-test", str(directory))

    def fill(self) -> None:
        """Take all that is free."""
        with open(self.directory / FILLER, "ab") as file:
            step = 1 << 24
            while step >= 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
                except OSError as e:
                    if e.errno != errno.ENOSPC:
                        raise
                    step //= 2

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def empty(self) -> None:
        """Give back what `fill` took."""
        (self.directory / FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        _run("umount", "--lazy", str(self.directory))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
