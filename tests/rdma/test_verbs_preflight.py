"""The choice of an RDMA device and GID, and the words for what is missing; on any machine, over
trees of files laid out as sysfs is."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kdirect.errors import RdmaError, TransportError
from kdirect.rdma import verbs_choice, verbs_limits, verbs_preflight
from kdirect.rdma.contract import Access, Memory
from kdirect.rdma.verbs_link import Address

V4 = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}"
LOCAL = "fe80:0000:0000:0000:0000:00ff:fe77:0001"


def gid(ip: str) -> str:
    return V4.format(*map(int, ip.split(".")))


def device(
    sysfs: Path,
    name: str,
    gids: dict[int, tuple[str, str]],
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    port: int = 1,
) -> None:
    """A port with these GIDs: {index: (gid, kind)}; entries between are empty, as in sysfs."""
    base = sysfs / name / "ports" / str(port)
    for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (base / part).mkdir(parents=True)
    (base / "state").write_text(state + "\n")
    (base / "link_layer").write_text(layer + "\n")
    for i in range(max(gids, default=0) + 40):
        text, kind = gids.get(i, ("0000:0000:0000:0000:0000:0000:0000:0000", ""))
        (base / "gids" / str(i)).write_text(text + "\n")
        if kind:
            (base / "gid_attrs/types" / str(i)).write_text(kind + "\n")
            (base / "gid_attrs/ndevs" / str(i)).write_text("eth0\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two Ethernet devices: mlx5_0 with two addresses, each also as RoCE v1; rxe0 with one."""
    device(
        tmp_path,
        "mlx5_0",
        {
            0: (LOCAL, "IB/RoCE v1"),
            1: (LOCAL, "RoCE v2"),
            2: (gid("10.0.0.5"), "IB/RoCE v1"),
            3: (gid("10.0.0.5"), "RoCE v2"),
            4: (gid("10.0.1.5"), "IB/RoCE v1"),
            5: (gid("10.0.1.5"), "RoCE v2"),
        },
    )
    device(tmp_path, "rxe0", {0: (LOCAL, "RoCE v2"), 1: (gid("192.168.77.1"), "RoCE v2")})
    return tmp_path


@pytest.mark.parametrize(
    ("bind", "options", "expected"),
    [
        ("10.0.1.5", {}, ("mlx5_0", 5)),
        ("192.168.77.1", {"strict": True}, ("rxe0", 1)),
        ("", {}, ("mlx5_0", 3)),  # an IPv4 address before a link-local one
        ("127.0.0.1", {}, ("mlx5_0", 3)),
        ("0.0.0.0", {}, ("mlx5_0", 3)),
        ("172.16.0.9", {}, ("mlx5_0", 3)),  # a management network
        ("broker.example", {}, ("mlx5_0", 3)),
        ("", {"device": "rxe0"}, ("rxe0", 1)),
        ("10.0.0.5", {"device": "rxe0"}, ("rxe0", 1)),
        ("10.0.1.5", {"gid_index": 1}, ("mlx5_0", 1)),  # what is named is taken
        ("192.168.77.1", {"gid_index": 1}, ("rxe0", 1)),
    ],
)
def test_choice(sysfs: Path, bind: str, options: dict, expected: tuple[str, int]) -> None:
    choice = verbs_choice.choose(bind, sysfs=str(sysfs), **options)
    assert (choice.device, choice.gid.index) == expected
    assert choice.reason and choice.device in str(choice)


@pytest.mark.parametrize(
    ("bind", "options", "message"),
    [
        (
            "172.16.0.9",
            {"strict": True},
            r"no RDMA device has a RoCE v2 GID of 172\.16\.0\.9.*3: 10\.0\.0\.5",
        ),
        ("", {"device": "nosuch0"}, r"no RDMA device 'nosuch0'; present: mlx5_0, rxe0"),
        ("", {"gid_index": 9}, r"GID index 9 is empty; present: .*10\.0\.0\.5"),
    ],
)
def test_refused_choices_name_what_is_there(
    sysfs: Path, bind: str, options: dict, message: str
) -> None:
    with pytest.raises(TransportError, match=message) as e:
        verbs_choice.choose(bind, sysfs=str(sysfs), **options)
    assert e.value.hint


def test_a_port_that_is_down_is_passed_over_or_named(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", {3: (gid("10.0.0.5"), "RoCE v2")}, state="1: DOWN")
    with pytest.raises(TransportError, match="mlx5_0 port 1 is DOWN"):
        verbs_choice.choose("10.0.0.5", sysfs=str(tmp_path))
    device(tmp_path, "mlx5_1", {0: (gid("10.0.0.6"), "RoCE v2")})
    assert verbs_choice.choose("", sysfs=str(tmp_path)).device == "mlx5_1"


def test_only_roce_v1_is_refused_and_infiniband_taken(tmp_path: Path) -> None:
    device(tmp_path, "old0", {0: (LOCAL, "IB/RoCE v1")})
    with pytest.raises(TransportError, match="no RDMA port has a GID that can be used"):
        verbs_choice.choose("", sysfs=str(tmp_path))
    device(
        tmp_path,
        "ib0",
        {0: ("fe80:0000:0000:0000:506b:4b03:00aa:bbcc", "IB/RoCE v1")},
        layer="InfiniBand",
    )
    assert verbs_choice.choose("", sysfs=str(tmp_path)).device == "ib0"


def test_no_device_and_no_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match="is missing") as e:
        verbs_choice.choose("", sysfs=str(tmp_path / "none"))
    assert "rdma_rxe" in e.value.hint
    refused = verbs_choice.device_file_error(str(tmp_path))
    assert refused is not None and "uverbs" in refused.message and "ib_uverbs" in refused.hint
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert "device plugin" in verbs_choice.no_device_error(str(tmp_path)).hint
    (tmp_path / "uverbs0").touch()
    assert verbs_choice.device_file_error(str(tmp_path)) is None


def test_preflight_ends_at_the_first_step_that_fails() -> None:
    steps = verbs_preflight.preflight(device="nosuch0")
    assert [step.ok for step in steps] == [True] * (len(steps) - 1) + [False]
    assert [step.name for step in steps] == list(verbs_preflight.STEPS[: len(steps)])
    assert steps[-1].detail and steps[-1].hint


LOW_LIMIT = """
import contextlib, os, resource
from kdirect.rdma import verbs_limits, verbs_preflight
from kdirect.rdma.contract import Memory
resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
if os.geteuid() == 0:
    with contextlib.suppress(PermissionError):  # a root without capabilities
        os.setuid(65534)  # without CAP_IPC_LOCK
print(verbs_limits.memlock_limit())
print(verbs_preflight.memlock_step(32 << 10).ok)
step = verbs_preflight.memlock_step(64 << 20)
print(step.ok, step.detail, step.hint)
print(verbs_limits.registration_error(12, Memory.anonymous(1 << 20), 1, 1 << 20))
print(verbs_limits.queue_error(12, "a completion queue", "1024 entries"))
"""


def test_a_low_limit_of_locked_memory_is_named_with_the_need_and_the_fix() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOW_LIMIT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    limit, enough, short, registration, queue = run.stdout.splitlines()
    assert (limit, enough) == ("65536", "True")
    assert (
        short.startswith("False")
        and "64 KiB" in short
        and "65536 KiB are needed" in short
        and "LimitMEMLOCK" in short
    )
    assert (
        "64 KiB" in registration
        and "1024 KiB more are needed" in registration
        and "IPC_LOCK" in registration
    )
    assert "64 KiB" in queue and "ulimit -l" in queue


def test_enough_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert verbs_limits.memlock_limit() == -1 and verbs_preflight.memlock_step(1 << 40).ok


def test_registration_errors_tell_file_systems_and_read_only_mappings_apart(tmp_path: Path) -> None:
    anonymous = Memory.anonymous(4096)
    error = verbs_limits.registration_error(
        errno.EFAULT, Memory.map(anonymous.fd, 4096, False), Access.REMOTE_READ, 4096
    )
    assert (
        isinstance(error, RdmaError)
        and "read-only" in error.message
        and "EFAULT" in error.message
        and "read-write" in error.hint
    )
    path = tmp_path / "segment"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDWR)
    on_disk = Memory.map(fd, 4096, True)
    os.close(fd)
    error = verbs_limits.registration_error(errno.EFAULT, on_disk, 7, 4096)
    kind = verbs_limits.filesystem(on_disk.fd)[0]
    assert kind
    if kind != "tmpfs":
        assert (
            f"is on {kind}" in error.message
            and str(path) in error.message
            and "tmpfs" in error.hint
            and "log.dirs" in error.hint
        )
    for code in (errno.ENOSPC, errno.EIO, errno.ENOMEM):
        error = verbs_limits.registration_error(code, anonymous, 7, 4096)
        assert "4096 bytes" in error.message and error.hint


def test_addresses_are_checked() -> None:
    whole = Address(
        bytes(range(16)),
        17,
        0x123456,
        bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 5]),
        0,
        3,
        16,
        14,
        "10.0.0.5",
        4000,
    )
    assert Address.unpack(whole.pack()) == whole and whole.gid_text.endswith("0a00:0005")
    data = bytearray(whole.pack())
    for bad in (b"", b"KDVA", data[:-1], data + b"x", b"KDSA" + data[4:]):
        with pytest.raises(TransportError):
            Address.unpack(bytes(bad))
    for change in ({"mtu": 9}, {"rd_atomic": 0}, {"rnr_timer": 99}, {"qp_num": 1 << 24}):
        values = {name: getattr(whole, name) for name in Address.__slots__} | change
        with pytest.raises(TransportError, match="impossible"):
            Address.unpack(Address(**values).pack())
