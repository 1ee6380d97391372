"""New segment files: zeros, allocated at once, and of huge pages where the kernel has some."""

from __future__ import annotations

import errno
import os
import random
import time
import uuid
from pathlib import Path

import pytest

from kdirect.huge_pages import allocate_huge
from kdirect.log.head import allocate
from kdirect.log.mapped import Mapping


@pytest.mark.parametrize("directory", ["tmpfs", "any"])
@pytest.mark.parametrize("length", [1 << 16, 2 << 20, (6 << 20) + 8192])
def test_a_new_segment_is_zeros_and_real_whatever_its_pages_are(tmp_path, directory, length):
    path = (
        Path("/dev/shm") if directory == "tmpfs" else tmp_path
    ) / f"kdirect-test-{uuid.uuid4().hex}"
    fd = allocate(path, length, huge=True)
    try:
        status = os.fstat(fd)
        assert status.st_size == length
        assert status.st_blocks * 512 >= length, "a full disk must show before the first write"
        assert path.read_bytes() == bytes(length)
        mapping = Mapping(fd, length, writable=True)
        if length >= 2 << 20:
            assert mapping.address % (2 << 20) == 0, "else its huge pages cannot be mapped as such"
        mapping.unmap()
    finally:
        os.close(fd)
        path.unlink()


def test_huge_pages_are_used_on_a_tmpfs_that_was_not_mounted_for_them():
    """What makes producing several times faster; Linux 6.1 and later."""
    release = tuple(int(n) for n in os.uname().release.split(".")[:2])
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    path = Path("/dev/shm") / f"kdirect-test-{uuid.uuid4().hex}"
    with open(path, "x+b") as file:
        path.unlink()
        for _ in range(5):
            refused = allocate_huge(file.fileno(), 8 << 20)
            if refused not in (errno.ENOMEM, errno.EAGAIN):
                break
            time.sleep(0.2)  # no free page of that size for now: others use the memory too
        if release < (6, 1) or not enabled.exists():
            assert refused != 0
            return
        if "[never]" in enabled.read_text():
            return  # whether the kernel then refuses differs from version to version
        assert refused == 0, os.strerror(refused)
        mapping = Mapping(file.fileno(), 8 << 20, writable=True)
        mapping.populate(0, 8 << 20, dirty=True)
        smaps = Path("/proc/self/smaps").read_text()
        block = smaps[smaps.index(f"{mapping.address:x}-") :].split("VmFlags", 1)[0]
        assert "ShmemPmdMapped:     8192 kB" in block
        mapping.unmap()


def test_a_file_that_is_longer_stays_so():
    """A head that a broker with larger segments left behind, which readers may have mapped."""
    path = Path("/dev/shm") / f"kdirect-test-{uuid.uuid4().hex}"
    with open(path, "x+b") as file:
        path.unlink()
        file.truncate(8 << 20)
        allocate_huge(file.fileno(), 4 << 20)
        assert os.fstat(file.fileno()).st_size == 8 << 20


def test_a_file_that_has_records_keeps_them_when_it_gets_huge_pages(tmp_path, seed):
    records = random.Random(seed).randbytes((3 << 20) + 77)
    path = Path("/dev/shm") / f"kdirect-test-{uuid.uuid4().hex}"
    with open(path, "x+b") as file:
        path.unlink()
        file.write(records)
        file.flush()
        allocate_huge(file.fileno(), 8 << 20)
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
        file.seek(0)
        assert file.read() == records + bytes((8 << 20) - len(records))
    with open(tmp_path / "elsewhere", "x+b") as file:
        file.write(records)
        file.flush()
        allocate_huge(file.fileno(), 8 << 20)
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
        file.seek(0)
        assert file.read(len(records)) == records
