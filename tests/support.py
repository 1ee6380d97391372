"""What tests of several rooms work with: broker processes, waiting, processor time, jars.

Import it by name: ``from tests.support import wait_until``.  Fixtures stand in the `conftest.py` of
each room.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
READY = "kdirect broker ready on "
END_TIMEOUT_S = 30
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def wait_until(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "it",
    timeout_s: float = 30,
    every_s: float = 0.01,
) -> Any:
    """The condition's value as soon as it is true.  AssertionError after `timeout_s`: `what` names
    what was waited for; a callable is asked then, and says the whole."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"{what} did not happen within {timeout_s} s" if isinstance(what, str) else what()
            )
        time.sleep(every_s)
    return value


def poll_until(condition: Callable[[], Any], *consumers: Any, timeout_s: float = 30) -> list[Any]:
    """Poll all consumers until the condition is true; the messages that they handed out."""
    out = []
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {timeout_s} s"
        for consumer in consumers:
            message = consumer.poll(0.01)
            if message is not None:
                assert message.error() is None
                out.append(message)
    return out


def alter_topic(servers: str, topic: str, **properties: Any) -> None:
    """Set properties of a topic, dots as underscores."""
    import kdirect

    configs = {name.replace("_", "."): value for name, value in properties.items()}
    with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
        session.admin.alter_configs(topic, configs)


def stop_process(pid: int) -> None:
    """SIGSTOP to a child, until every thread of it stands: sending the signal alone does not wait
    for that, and a broker that is asked meanwhile may still answer."""
    os.kill(pid, signal.SIGSTOP)
    state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert state is not None and state.si_code == os.CLD_STOPPED, "it ended before it stood"


def die_with_parent() -> None:
    """`preexec_fn` of a process that the one which starts it must not leave behind, even when
    killed.  Start it on the main thread: the kernel takes the end of the thread for that of the
    parent."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def cpu_ticks(pid: int) -> int:
    """Clock ticks that a process has used, in user and kernel mode; a hundred are a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def jars_module() -> Any:
    """bench/versus/jars.py: by its path, because the benchmark's modules are not a package that is
    installed."""
    spec = importlib.util.spec_from_file_location(
        "kdirect_test_jars", ROOT / "bench/versus/jars.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BrokerProcess:
    """`kdirect broker` in a process of its own.  `start` after `kill` or `stop` brings it back:
    same port, same log.

    `address`: where it listens; by default on a free port, which is known once it has started.
    `environment`: variables that it has beside those of this process.
    """

    def __init__(
        self,
        log_dir: Path,
        properties: dict[str, Any] | None = None,
        address: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log_dir = log_dir
        self._environment = environment or {}
        self.properties = properties or {}
        self.bootstrap_servers = address
        self.errors = log_dir.with_name(log_dir.name + ".err")  # what it wrote to standard error
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the broker does not run"
        return self.process.pid

    def start(self) -> BrokerProcess:
        command = [sys.executable, "-m", "kdirect.cli", "broker", "--log-dirs", str(self.log_dir)]
        for name, value in {
            "listeners": self.bootstrap_servers or "127.0.0.1:0",
            **self.properties,
        }.items():
            command += ["--set", f"{name}={value}"]
        self.log_dir.parent.mkdir(parents=True, exist_ok=True)
        with open(self.errors, "a") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **self._environment},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(READY):
            self.process.wait(END_TIMEOUT_S)
            raise AssertionError(f"the broker did not start: {self.errors.read_text()[-3000:]}")
        self.bootstrap_servers = line.removeprefix(READY).strip()
        return self

    def _end(self, number: int) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        if number != signal.SIGKILL:
            process.send_signal(signal.SIGCONT)
        try:
            return process.wait(END_TIMEOUT_S)
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)


def spark_workers() -> list[int]:
    """The Python workers of the tasks of this process's Spark session, also idle ones."""
    children: dict[int, list[int]] = {}
    args: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(entry.name))
        args[int(entry.name)] = command.replace(b"\0", b" ").decode().strip()
    mine, todo = [], [os.getpid()]
    while todo:
        for pid in children.get(todo.pop(), []):
            mine.append(pid)
            todo.append(pid)
    daemons = [p for p in mine if args[p].endswith(".daemon pyspark.worker")]
    return [p for p in daemons if p not in children or not children[p]]
