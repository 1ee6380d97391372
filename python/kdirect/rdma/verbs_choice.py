"""Which RDMA device, port and GID to use: read from sysfs, decided here, without a verb.

Owns: the view of ``/sys/class/infiniband`` (`devices`) and the choice by bind address (`choose`).
What may not enter: libibverbs, sockets.  Everything is readable without privileges, so that a
preflight can say what is wrong before anything is opened.

The rule of choice: an index or device that the user named is taken or refused, never replaced.
Otherwise the RoCE v2 GID that is the bind address; where the bind address is no device's (loopback,
a management network), the first active port's RoCE v2 GID of an IPv4 address, then of an IPv6 one,
then an InfiniBand port's first GID.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kdirect.errors import TransportError

SYSFS = "/sys/class/infiniband"
DEVICE_FILES = "/dev/infiniband"
ROCE_V2 = "RoCE v2"
# GID tables have up to 1024 entries and are filled from the front: after this many empty entries in
# a row the rest is taken to be empty.
EMPTY_RUN = 32
LINK_INFINIBAND = "InfiniBand"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table.  `kind` is sysfs's word: ``RoCE v2``, ``IB/RoCE v1``;
    `netdev` may be empty."""

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str

    @property
    def ip(self) -> str:
        """The IP address that the GID is made of, as people write it; for InfiniBand the GID
        itself."""
        mapped = self.address.ipv4_mapped
        return str(mapped if mapped is not None else self.address)

    def __str__(self) -> str:
        return f"{self.index}: {self.ip} ({self.kind}{', ' + self.netdev if self.netdev else ''})"


@dataclass(frozen=True, slots=True)
class Port:
    """One port of a device.  `state` is ACTIVE, DOWN, INIT, ARMED."""

    device: str
    number: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def name(self) -> str:
        return f"{self.device} port {self.number}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What `choose` decided, and why (for the log)."""

    port: Port
    gid: Gid
    reason: str

    @property
    def device(self) -> str:
        return self.port.device

    def __str__(self) -> str:
        return f"{self.port.name}, GID {self.gid}: {self.reason}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an empty GID entry answers EINVAL
        return ""


def _entries(path: Path) -> list[str]:
    try:
        return sorted(
            os.listdir(path), key=lambda name: (int(name) if name.isdigit() else -1, name)
        )
    except OSError:
        return []


def devices(sysfs: str = SYSFS) -> list[Port]:
    """Every port of every RDMA device, with the GIDs that are set."""
    return [
        port for device in _entries(Path(sysfs)) for port in _ports(Path(sysfs) / device, device)
    ]


def _ports(path: Path, device: str) -> Iterator[Port]:
    for name in _entries(path / "ports"):
        port = path / "ports" / name
        gids = []
        empty = 0
        for entry in _entries(port / "gids"):
            text = _read(port / "gids" / entry)
            if not text.strip("0:"):
                empty += 1
                if empty >= EMPTY_RUN:
                    break
                continue
            empty = 0
            address = ipaddress.IPv6Address(text)
            attributes = port / "gid_attrs"
            gids.append(
                Gid(
                    int(entry),
                    address,
                    _read(attributes / "types" / entry),
                    _read(attributes / "ndevs" / entry),
                )
            )
        state = _read(port / "state").partition(":")[2].strip() or "?"
        yield Port(device, int(name), state, _read(port / "link_layer"), tuple(gids))


def container() -> str:
    """What kind of container this process is in, or an empty string."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "a Kubernetes pod"
    if os.path.exists("/.dockerenv"):
        return "a Docker container"
    if os.path.exists("/run/.containerenv"):
        return "a Podman container"
    return ""


def container_hint() -> str:
    """How a container gets RDMA, to be appended to another remedy; empty outside of one."""
    kind = container()
    if not kind:
        return ""
    if "Kubernetes" in kind:
        return (
            "; in a pod: request the RDMA resource of a device plugin (rdma/... under"
            " resources.limits) and add the capability IPC_LOCK"
        )
    return (
        f"; in {kind}: run it with --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        " and the host's network"
    )


def no_device_error(sysfs: str = SYSFS) -> TransportError:
    """The error for a host on which the kernel shows no RDMA device."""
    return TransportError(
        f"no RDMA device: {sysfs} is {'empty' if os.path.isdir(sysfs) else 'missing'}",
        hint="load the RNIC's driver (ibv_devinfo lists what it finds), or make a soft-RoCE device:"
        " modprobe rdma_rxe && rdma link add rxe0 type rxe netdev <interface>" + container_hint(),
    )


def device_file_error(directory: str = DEVICE_FILES) -> TransportError | None:
    """The error for missing or forbidden /dev/infiniband/uverbs*, or None."""
    names = [name for name in _entries(Path(directory)) if name.startswith("uverbs")]
    if not names:
        return TransportError(
            f"{directory} has no uverbs device: user space cannot reach the RDMA device",
            hint="modprobe ib_uverbs (package rdma-core)" + container_hint(),
        )
    open_to_us = [
        name for name in names if os.access(os.path.join(directory, name), os.R_OK | os.W_OK)
    ]
    if not open_to_us:
        return TransportError(
            f"{', '.join(os.path.join(directory, n) for n in names)}: no permission for user"
            f" {os.geteuid()}",
            hint="give the user read and write access (udev rules of rdma-core make the files"
            " world-writable, or use their group)" + container_hint(),
        )
    return None


def choose(
    bind_address: str = "",
    *,
    device: str = "",
    gid_index: int = -1,
    strict: bool = False,
    sysfs: str = SYSFS,
) -> Choice:
    """The port and GID to use; TransportError with the remedy when there is none.

    `bind_address` is an IP address of this host (empty, a wildcard, a loopback address or a host
    name: no preference); `device` restricts to one device; `gid_index` (>= 0) demands that entry of
    the GID table; `strict` refuses to take another address than `bind_address`.
    """
    ports = devices(sysfs)
    if not ports:
        raise no_device_error(sysfs)
    if device:
        named = [port for port in ports if port.device == device]
        if not named:
            present = ", ".join(sorted({port.device for port in ports}))
            raise TransportError(
                f"there is no RDMA device {device!r}; present: {present}",
                hint="correct rdma.device, or leave it empty",
            )
        ports = named
    if gid_index >= 0:
        return _by_index(ports, gid_index, bind_address)
    wanted = _ip(bind_address)
    if wanted is not None and not wanted.is_unspecified and (strict or not wanted.is_loopback):
        found = [(port, gid) for port in ports for gid in port.gids if gid.ip == str(wanted)]
        for port, gid in sorted(found, key=lambda x: (not x[0].active, x[1].kind != ROCE_V2)):
            if gid.kind == ROCE_V2 or port.link_layer == LINK_INFINIBAND:
                return Choice(_active(port), gid, f"the GID of {bind_address}")
        if strict:
            raise TransportError(
                f"no RDMA device has a RoCE v2 GID of {bind_address}; present: {_table(ports)}",
                hint="bind to an address of the RDMA network, or name the entry: rdma.device and"
                " rdma.gid.index",
            )
    best: tuple[tuple[bool, int], Port, Gid] | None = None
    for port in ports:
        for gid in port.gids:
            rank = _rank(port, gid)
            if rank is not None and (best is None or (not port.active, rank) < best[0]):
                best = ((not port.active, rank), port, gid)
    if best is None:
        raise TransportError(
            "no RDMA port has a GID that can be used (RoCE v2 or InfiniBand); present:"
            f" {_table(ports)}",
            hint="give the device's network interface an IP address, and check that the driver"
            " makes RoCE v2 entries (ibv_devinfo -v)",
        )
    why = (
        "the first active port"
        if not bind_address
        else f"no GID is {bind_address}; the first active port"
    )
    return Choice(_active(best[1]), best[2], why)


def _by_index(ports: list[Port], index: int, bind_address: str) -> Choice:
    for port in sorted(
        ports, key=lambda x: (not any(gid.ip == bind_address for gid in x.gids), not x.active)
    ):
        for gid in port.gids:
            if gid.index == index:
                return Choice(_active(port), gid, f"rdma.gid.index={index}")
    raise TransportError(
        f"GID index {index} is empty; present: {_table(ports)}",
        hint="correct rdma.gid.index, or leave it at -1",
    )


def _active(port: Port) -> Port:
    if not port.active:
        raise TransportError(
            f"{port.name} is {port.state}, not ACTIVE",
            hint="check the cable and bring its network interface up (ip link set <interface> up);"
            " ibv_devinfo shows the state",
        )
    return port


def _rank(port: Port, gid: Gid) -> int | None:
    if port.link_layer == LINK_INFINIBAND:
        return 3
    if gid.kind != ROCE_V2:
        return None
    if gid.address.ipv4_mapped is not None:
        return 0
    return 2 if gid.address.is_link_local else 1


def _table(ports: list[Port]) -> str:
    return "; ".join(
        f"{port.name} ({port.state}) has {', '.join(map(str, port.gids)) or 'none'}"
        for port in ports
    )


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0].strip("[]"))
    except ValueError:
        return None
