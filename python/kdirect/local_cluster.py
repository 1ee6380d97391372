"""Several brokers on this machine, each in a process of its own: `kdirect.Cluster`.

Owns: the processes that it starts, their directories and addresses, and the ZooKeeper server unless
one is named.  For trials and tests, where a process may be killed; in production each broker is
started where it runs.  What the cluster decides is none of its business.
"""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdirect.broker.broker import temporary_directory
from kdirect.errors import BrokerUnavailableError, ConfigError, TimedOutError
from kdirect.option_table import config_text
from kdirect.options import BROKER
from kdirect.store.zookeeper_server import ZookeeperServer

log = logging.getLogger("kdirect.cluster")

READY = "kdirect broker ready on "
START_TIMEOUT_S = 120.0  # recovering a large log takes long
STOP_TIMEOUT_S = 60.0
MOST_BROKERS = 100
_running: weakref.WeakSet[Cluster] = weakref.WeakSet()


class _Process:
    """One broker: its directory and address, which outlive its processes."""

    def __init__(self, node_id: int, directory: Path, properties: Mapping[str, Any]) -> None:
        self.node_id = node_id
        self.directory = directory / f"broker-{node_id}"
        self.log_file = directory / f"broker-{node_id}.log"
        self.address = ""
        self.properties = dict(properties)
        self.process: subprocess.Popen[str] | None = None

    def launch(self) -> None:
        given = {
            "node.id": self.node_id,
            "log.dirs": self.directory,
            **self.properties,
            "listeners": self.address or self.properties.get("listeners", "127.0.0.1:0"),
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kdirect.cli", "broker"]
        secrets = {name: given.pop(name) for name in list(given) if BROKER.find(name).secret}
        if secrets:
            command += ["--config", str(self._write_secrets(secrets))]
        for name, value in given.items():
            command += ["--set", f"{name}={config_text(value)}"]
        with open(self.log_file, "a") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def _write_secrets(self, secrets: Mapping[str, Any]) -> Path:
        """A properties file that only its owner reads: everybody sees a command line."""
        path = self.directory.with_suffix(".properties")
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            for name, value in secrets.items():
                text = config_text(value).replace("\\", "\\\\").replace("\n", "\\n")
                # A space is escaped, for one at the beginning would not count.
                file.write(f"{name}={text.replace(' ', chr(92) + ' ')}\n")
        return path

    def wait_ready(self, deadline: float) -> None:
        """Wait for the line that says where it serves."""
        process = self.process
        assert process is not None and process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        line = process.stdout.readline() if ready else ""
        if line.startswith(READY):
            self.address = line.removeprefix(READY).strip()
            return
        why = "is not ready" if not ready else "ended with its start"
        self.end(signal.SIGKILL)
        said = self.log_file.read_text(errors="replace")[-2000:]
        raise BrokerUnavailableError(
            f"broker {self.node_id} {why}:\n{said}", hint=f"its log is {self.log_file}"
        )

    def end(self, how: int) -> int | None:
        """Send a signal that ends it, and wait; its exit status, None if it did not run."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.send_signal(how)
        if how != signal.SIGKILL:
            process.send_signal(signal.SIGCONT)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise TimedOutError(
                f"broker {self.node_id} did not stop within {STOP_TIMEOUT_S:g} s; it was killed",
                hint=f"its log is {self.log_file}",
            ) from None
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


class Cluster:
    """Brokers 1 to `brokers` in processes of their own, over one ZooKeeper::

        with kdirect.Cluster(brokers=3) as cluster:
            session = kdirect.connect(cluster.bootstrap_servers)

    `directory`: where logs and files are kept; None: a temporary one, in shared memory if there is
    room, which is removed by `stop`.  `zookeeper_connect`: a ZooKeeper that runs; without it a
    server is started from PySpark's jars.  `racks`: the rack of each broker, in order.  Other
    properties of all brokers are keyword arguments with underscores for dots, or go into the
    mapping `properties` under their own names.

    Unless given, offsets.topic.replication.factor, transaction.state.log.replication.factor and
    default.replication.factor are the number of brokers, at most 3; min.insync.replicas and
    transaction.state.log.min.isr are 2 with three brokers or more.

    A broker that was stopped or killed keeps its directory and its address, and `start` brings it
    back.  Use it from one thread.
    """

    def __init__(
        self,
        brokers: int = 3,
        directory: str | Path | None = None,
        *,
        zookeeper_connect: str = "",
        racks: Iterable[str] = (),
        properties: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if isinstance(brokers, bool) or not 1 <= brokers <= MOST_BROKERS:
            raise ConfigError(
                f"a cluster of {brokers} brokers", hint=f"give a number from 1 to {MOST_BROKERS}"
            )
        self._racks = list(racks)
        if self._racks and len(self._racks) != brokers:
            raise ConfigError(
                f"{len(self._racks)} racks for {brokers} brokers", hint="name one for each broker"
            )
        self._given = {
            "offsets.topic.replication.factor": min(3, brokers),
            "transaction.state.log.replication.factor": min(3, brokers),
            "default.replication.factor": min(3, brokers),
            "transaction.state.log.min.isr": 2 if brokers >= 3 else 1,
            "min.insync.replicas": 2 if brokers >= 3 else 1,
            # The last brokers of a cluster that stops have nobody to hand over to.
            "controlled.shutdown.retry.backoff.ms": 500,
            **(properties or {}),
            **{name.replace("_", "."): value for name, value in keywords.items()},
        }
        self._directory = Path(directory).absolute() if directory is not None else None
        self._temporary: Path | None = None
        self._zookeeper_connect = zookeeper_connect
        self._count = brokers
        self._processes: dict[int, _Process] = {}
        self.zookeeper: ZookeeperServer | None = None  # the server that was started, if one was

    # -- life --------------------------------------------------------------------------------------

    def start(self, node_id: int | None = None) -> Cluster:
        """Start the cluster, or one broker of it that does not run, and wait until it serves.
        BrokerUnavailableError has the end of a broker's log."""
        if node_id is not None:
            process = self._process(node_id)
            if node_id not in self.running:
                process.end(signal.SIGKILL)  # one that has ended by itself leaves its pipe
                process.launch()
                process.wait_ready(time.monotonic() + START_TIMEOUT_S)
        elif not self._processes:
            try:
                self._start_all()
            except BaseException:
                self.stop()
                raise
            _running.add(self)
        return self

    def _start_all(self) -> None:
        if self._directory is None:
            self._temporary = temporary_directory()
        directory = self.directory
        directory.mkdir(parents=True, exist_ok=True)
        connect = self._zookeeper_connect
        if not connect:
            self.zookeeper = ZookeeperServer(directory / "zookeeper")
            self.zookeeper.start()
            connect = self.zookeeper.connect
        for place in range(self._count):
            rack = {"broker.rack": self._racks[place]} if self._racks else {}
            properties = {**self._given, **rack, "zookeeper.connect": connect}
            self._processes[place + 1] = self._new_process(place + 1, properties)
        for process in self._processes.values():
            process.launch()
        deadline = time.monotonic() + START_TIMEOUT_S
        for process in self._processes.values():
            process.wait_ready(deadline)
        self.wait_for_members(deadline - time.monotonic())

    def _new_process(self, node_id: int, properties: Mapping[str, Any]) -> _Process:
        return _Process(node_id, self.directory, properties)

    def wait_for_members(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every broker that runs tells of all that run, and of a controller."""
        from kdirect.client.session import connect

        running = self.running
        deadline = time.monotonic() + timeout_s
        for node_id in running:
            settings = {"bootstrap.servers": self.address(node_id), "transport": "tcp"}
            with connect(settings) as session:
                while True:
                    found = session.admin.describe_cluster(node_id)
                    known = [broker.node_id for broker in found.brokers]
                    if known == running and found.controller in running:
                        break
                    if time.monotonic() >= deadline:
                        raise TimedOutError(
                            f"broker {node_id} knows brokers {known} and controller"
                            f" {found.controller}, while {running} run",
                            hint=f"its log is {self._process(node_id).log_file}",
                        )
                    time.sleep(0.02)

    def stop(self, node_id: int | None = None) -> None:
        """Stop one broker (SIGTERM), which hands over what it leads; or the whole cluster."""
        if node_id is not None:
            self._process(node_id).end(signal.SIGTERM)
            return
        _running.discard(self)
        processes = list(self._processes.values())
        try:
            # All at once: the last ones have nobody to hand over to, and would try in vain.
            for process in processes:
                if process.process is not None:
                    process.process.send_signal(signal.SIGTERM)
                    process.process.send_signal(signal.SIGCONT)
            for process in processes:
                try:
                    process.end(signal.SIGTERM)
                except TimedOutError as e:
                    log.error("%s", e)
        finally:
            self._processes = {}
            zookeeper, self.zookeeper = self.zookeeper, None
            if zookeeper is not None:
                zookeeper.stop()
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._temporary = None

    def kill(self, node_id: int) -> None:
        """End a broker as by a crash of its process (SIGKILL)."""
        self._process(node_id).end(signal.SIGKILL)

    def pause(self, node_id: int) -> None:
        """Stop a broker's process in its tracks (SIGSTOP); `resume` lets it go on."""
        pid = self.pid(node_id)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)  # all its threads have

    def resume(self, node_id: int) -> None:
        """Let a broker go on that was paused."""
        os.kill(self.pid(node_id), signal.SIGCONT)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # -- looking -----------------------------------------------------------------------------------

    def _process(self, node_id: int) -> _Process:
        found = self._processes.get(node_id)
        if found is None:
            raise ConfigError(
                f"the cluster has no broker {node_id}",
                hint=f"its brokers are {sorted(self._processes)}"
                if self._processes
                else "call start(), or use it in a with statement",
            )
        return found

    @property
    def directory(self) -> Path:
        """Where everything is kept: ``broker-N`` and ``broker-N.log`` for each broker."""
        directory = self._directory or self._temporary
        assert directory is not None, "the cluster was not started"
        return directory

    @property
    def node_ids(self) -> list[int]:
        """The brokers, whether they run or not."""
        return sorted(self._processes)

    @property
    def running(self) -> list[int]:
        """The brokers whose processes have not ended."""
        return [
            node_id
            for node_id, found in sorted(self._processes.items())
            if found.process is not None and found.process.poll() is None
        ]

    def describe_end(self, node_id: int) -> str:
        """How a broker that has ended by itself did so, and where its log is."""
        found = self._process(node_id)
        status = found.process.returncode if found.process is not None else None
        return f"broker {node_id} ended{_how(status)}; its log is {found.log_file}"

    def check(self) -> None:
        """BrokerUnavailableError if the cluster cannot go on: the ZooKeeper server that was started
        with it has ended, or every broker."""
        if self.zookeeper is not None and not self.zookeeper.is_running:
            raise BrokerUnavailableError(
                f"the cluster's ZooKeeper at {self.zookeeper.connect} ended"
                f"{_how(self.zookeeper.exit_status)}: no leader can be elected any more",
                hint=f"its log is {self.zookeeper.log_file}; start the cluster again on its"
                " directory",
            )
        if self._processes and not self.running:
            raise BrokerUnavailableError(
                "no broker of the cluster runs any more: "
                + "; ".join(self.describe_end(node_id) for node_id in self.node_ids),
                hint="start the cluster again on its directory",
            )

    @property
    def bootstrap_servers(self) -> str:
        """``host:port,host:port``, for clients."""
        return ",".join(self.address(node_id) for node_id in self.node_ids)

    @property
    def zookeeper_connect(self) -> str:
        """What zookeeper.connect says."""
        return self._zookeeper_connect or (self.zookeeper.connect if self.zookeeper else "")

    def address(self, node_id: int) -> str:
        """``host:port`` of a broker."""
        return self._process(node_id).address

    def pid(self, node_id: int) -> int:
        """The process of a broker; BrokerUnavailableError if it does not run."""
        process = self._process(node_id).process
        if process is None:
            raise BrokerUnavailableError(
                f"broker {node_id} does not run", hint=f"call start({node_id})"
            )
        return process.pid

    def log_dirs(self, node_id: int) -> list[Path]:
        """Where a broker keeps its partitions."""
        return [self._process(node_id).directory]

    def log_file(self, node_id: int) -> Path:
        """What a broker has written to standard error."""
        return self._process(node_id).log_file

    def __repr__(self) -> str:
        return f"Cluster({self.bootstrap_servers or 'stopped'})"


@atexit.register
def _stop_all() -> None:
    """A notebook or test that forgot `stop` leaves no processes."""
    for cluster in list(_running):
        try:
            cluster.stop()
        except Exception:
            log.exception("stopping %r at exit failed", cluster)


def _how(status: int | None) -> str:
    """The end of a process, by its exit status as `subprocess` has it."""
    if status is None:
        return ""
    if status >= 0:
        return f" with exit status {status}"
    try:
        return f" by {signal.Signals(-status).name}"
    except ValueError:
        return f" by signal {-status}"
