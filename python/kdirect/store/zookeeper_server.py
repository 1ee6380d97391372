"""A ZooKeeper server for one machine: trials, examples and tests.

PySpark carries ZooKeeper's jars and what they need; this starts a server from them, in a process of
its own, with one node and little memory.  For production, run an ensemble.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from kdirect.errors import ConfigError

MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
_JARS = (
    "zookeeper", "zookeeper-jute", "netty-handler", "netty-transport", "netty-common",
    "netty-buffer", "netty-codec", "netty-codec-base", "netty-resolver",
    "netty-transport-classes-epoll", "netty-transport-native-unix-common", "metrics-core",
    "snappy-java", "slf4j-api", "commons-io",
)  # fmt: skip
READY_S = 30.0


def jars() -> list[Path]:
    """The jars of a server, out of PySpark's; ConfigError says what is missing."""
    spark = find_spec("pyspark")
    if spark is None or not spark.submodule_search_locations:
        raise ConfigError(
            "a ZooKeeper server is started from PySpark's jars, and pyspark is not installed",
            hint="pip install 'kdirect[spark]', or name a ZooKeeper that runs: --zookeeper-connect",
        )
    directory = Path(spark.submodule_search_locations[0]) / "jars"
    found = []
    for name in _JARS:
        # By the digit of the version: `zookeeper-3.9.5.jar` and not `zookeeper-jute-3.9.5.jar`.
        matches = sorted(directory.glob(f"{name}-[0-9]*.jar"))
        if not matches:
            raise ConfigError(
                f"{directory} has no {name}, which a ZooKeeper server needs",
                hint="install the pyspark that kdirect names, or start a ZooKeeper yourself",
            )
        found.append(matches[-1])
    return found


def free_port(host: str) -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


class ZookeeperServer:
    """One server process.  Its data is kept in `directory`; `start` after `kill` goes on with it.

    `tick_ms`: ZooKeeper's tickTime; a session lasts for at least two and at most twenty of them.
    `settings`: more lines of its configuration.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tick_ms: int = 500,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.host = host
        self.port = port or free_port(host)
        self._tick_ms = tick_ms
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def connect(self) -> str:
        """What ``zookeeper.connect`` says to reach it."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was not started"
        return self._process.pid

    @property
    def log_file(self) -> Path:
        """What the server says."""
        return self.directory / "zookeeper.log"

    @property
    def exit_status(self) -> int | None:
        """Of a process that has ended by itself, as `subprocess` has it; None: it has not."""
        return self._process.poll() if self._process is not None else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers; ConfigError with the end of its log if it does not
        come up, or if something else has its port."""
        if self._process is not None:
            raise ConfigError(f"the ZooKeeper server at {self.connect} was started already")
        java = shutil.which("java")
        if java is None:
            raise ConfigError(
                "a ZooKeeper server needs Java, and there is no `java` on the PATH",
                hint="install Java 17, or name a ZooKeeper that runs: --zookeeper-connect",
            )
        self._check_port()  # whatever has the port may answer as this server would
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "zoo.cfg"
        config.write_text(
            f"tickTime={self._tick_ms}\ndataDir={self.directory / 'data'}\n"
            f"clientPort={self.port}\nclientPortAddress={self.host}\n"
            "admin.enableServer=false\n4lw.commands.whitelist=srvr\nmaxClientCnxns=0\n"
            "autopurge.snapRetainCount=3\nautopurge.purgeInterval=1\n"
            + "".join(f"{name}={value}\n" for name, value in self._settings.items())
        )
        classpath = ":".join(map(str, jars()))
        command = [java, "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-cp", classpath, MAIN, str(config)]
        with self.log_file.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _check_port(self) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self.host, self.port))
            except OSError as e:
                raise ConfigError(
                    f"a ZooKeeper server cannot listen at {self.connect}: {e.strerror}",
                    hint="choose another port, or name the server that runs: --zookeeper-connect",
                ) from e

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while not self._answers():
            code = self._process.poll()
            if code is None and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            said = self.log_file.read_text(errors="replace")[-2000:]
            what = f"ended with {code}" if code is not None else f"is silent after {READY_S:g} s"
            raise ConfigError(f"the ZooKeeper server at {self.connect} {what}:\n{said}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as sock:
                sock.sendall(b"srvr")
                return sock.recv(64).startswith(b"Zookeeper version")
        except OSError:
            return False

    def kill(self) -> None:
        """End it as by a crash."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it, unless it has ended."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> ZookeeperServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
