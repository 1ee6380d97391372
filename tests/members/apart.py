"""A cluster of which each broker is in a network namespace, with a cable to a switch on which
clients and ZooKeeper are too.  Cables are pulled, and packets to some neighbours are lost, in one
direction or in both.

Brokers that are apart share no memory, so that followers fetch over TCP.  Nothing but iproute2's
`ip` is needed, and root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kdirect
from kdirect.local_cluster import _Process
from kdirect.store.zookeeper_server import ZookeeperServer

CLONE_NEWNET = 0x40000000
IP = "ip"  # see `why_not`
NAMESPACES = Path("/run/netns")
MOST_NETWORKS = 250
PORT = 9092
NOBODY = "02:00:00:00:00:fe"  # no machine of any network here has this address


def _ip(*arguments: str) -> None:
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def why_not() -> str:
    """Why no namespaces can be made here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which(IP) is None:
        return "network namespaces are made with ip (apt-get install iproute2)"
    try:
        Network(0).close()
    except OSError as e:
        return f"needs root that may make network namespaces: {e}"
    return ""


class Network:
    """Hosts 1 to `hosts` on one switch, and this machine's own namespace, which has the last
    address.  No host has a default route: what it cannot send to a neighbour is lost."""

    def __init__(self, hosts: int) -> None:
        self._hosts = range(1, hosts + 1)
        for number in range(MOST_NETWORKS):
            self._number = number
            try:
                _ip("link", "add", self._switch, "type", "bridge")
                break
            except OSError as e:
                if "File exists" not in str(e):
                    raise
        else:
            # No OSError: `why_not` would take it for what this machine may not do.
            raise RuntimeError(f"{MOST_NETWORKS} networks of tests are left over: ip link")
        try:
            _ip("addr", "add", f"{self.outside}/24", "dev", self._switch)
            _ip("link", "set", self._switch, "up")
            for host in self._hosts:
                name, cable = self._name(host), self._cable(host)
                _ip("netns", "add", name)
                _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", cable, "master", self._switch, "up")
                _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Once nobody runs in it."""
        for host in self._hosts:
            for what in (("link", "del", self._cable(host)), ("netns", "del", self._name(host))):
                with contextlib.suppress(OSError):
                    _ip(*what)
        _ip("link", "del", self._switch)

    @property
    def _switch(self) -> str:
        return f"kdirect{self._number}"

    def _name(self, host: int) -> str:
        return f"kdirect{self._number}-{host}"

    def _cable(self, host: int) -> str:
        return f"kdirect{self._number}c{host}"

    def address(self, host: int) -> str:
        return f"10.213.{self._number}.{host}"

    @property
    def outside(self) -> str:
        """The address of this machine's own namespace."""
        return f"10.213.{self._number}.254"

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """What this thread starts meanwhile runs in the host's namespace."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        with (
            open("/proc/thread-self/ns/net") as before,
            open(NAMESPACES / self._name(host)) as there,
        ):
            if setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                assert setns(before.fileno(), CLONE_NEWNET) == 0, "this thread is lost"

    # -- faults ------------------------------------------------------------------------------------

    def unplug(self, host: int) -> None:
        """Nothing comes to the host or from it."""
        _ip("link", "set", self._cable(host), "down")

    def plug_in(self, host: int) -> None:
        _ip("link", "set", self._cable(host), "up")

    def lose(self, sender: int, receivers: Iterable[int]) -> None:
        """What the sender sends to these is lost, as it goes on; the other direction is whole."""
        for receiver in receivers:
            to = (self.address(receiver), "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
            _ip("-n", self._name(sender), "neigh", "replace", *to)

    def lose_no_more(self, sender: int, receivers: Iterable[int]) -> None:
        for receiver in receivers:
            there = (self.address(receiver), "dev", "eth0")
            _ip("-n", self._name(sender), "neigh", "del", *there)


class _Inside(_Process):
    """A broker in the namespace of its number."""

    network: Network

    def launch(self) -> None:
        with self.network.inside(self.node_id):
            super().launch()


class ClusterApart(kdirect.Cluster):
    """`kdirect.Cluster` on a network of its own, with a ZooKeeper outside of the namespaces."""

    def __init__(self, brokers: int, directory: Path, properties: Mapping[str, Any]) -> None:
        self.network = Network(brokers)
        self._outside = ZookeeperServer(directory / "zookeeper", host=self.network.outside)
        connect = self._outside.connect
        super().__init__(brokers, directory, zookeeper_connect=connect, properties=properties)

    def start(self, node_id: int | None = None) -> ClusterApart:
        if node_id is None:
            self._outside.start()
        super().start(node_id)
        return self

    def stop(self, node_id: int | None = None) -> None:
        super().stop(node_id)
        if node_id is None:
            self._outside.stop()
            self.network.close()

    def _new_process(self, node_id: int, properties: Mapping[str, Any]) -> _Process:
        made = _Inside(node_id, self.directory, properties)
        made.network = self.network
        made.address = f"{self.network.address(node_id)}:{PORT}"
        return made
