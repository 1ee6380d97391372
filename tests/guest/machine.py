"""One guest: a QEMU process that runs one command on this machine's own root file system, with
soft-RoCE.

Owns: the QEMU process, its sockets and its scratch directory, from `start` to `close`.  The command
sees every file of the machine, read-only beneath a tmpfs: what it writes ends with the guest, but
for the directories in `shares`.  Its standard output and error arrive here line by line, what
`send` says arrives at its standard input, and its exit status is `wait`'s.

Two guests that were given the ends of one `cable()` are on one Ethernet; `set_link` pulls the plug
and puts it back, `set_loss` loses frames on the way.

Invariants: a guest never outlives its time limit, counted by this process and, should it die, by
the guest itself; QEMU dies with the thread that started it.  The console is kept and shown when a
guest fails to do its work.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.guest import image as images
from tests.guest.image import GuestError, Image

# Fewer mitigations, no randomness, no timer calibration: an emulated boot in seconds.
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr nopti nosmap"
    " no_timer_check tsc=reliable audit=0 apparmor=0 selinux=0"
    " nowatchdog rcupdate.rcu_expedited=1 random.trust_cpu=on cgroup_disable=memory"
)
# Not PYTHONDONTWRITEBYTECODE: what is compiled once inside serves every process there.
PASSED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|RDMAV_DRIVERS|HOME|XDG_CACHE_HOME|LANG|LC_.*|TERM|CI|"
    r"JAVA_HOME|PYTHON(PATH|SAFEPATH|UNBUFFERED)|(KDIRECT|SPARK|PYSPARK|PYTEST).*"
)
BOOT_LIMIT_S = 120
QUEUES = {
    "in": "tx",
    "out": "rx",
}  # as the guest sees a frame go: QEMU names the queues of the network behind the device
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Network:
    """Where the guest's soft-RoCE device lives.  `cable` is this guest's end of one, or None: a
    network of its own."""

    address: str = "192.168.77.1"
    name: str = "guest"
    cable: socket.socket | None = None
    mac: str = "02:00:00:77:00:01"
    hosts: Mapping[str, str] = field(default_factory=dict)  # name to address of the others


def cable() -> tuple[socket.socket, socket.socket]:
    """The two ends of an Ethernet cable; each belongs to the guest it is given to."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def environment_of(image: Image, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the command inherits: this process's settings of Python, Spark and kdirect, no others,
    then `extra`."""
    out = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    out.update(extra or {})
    if image.pyverbs is not None:
        out["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(image.pyverbs), out.get("PYTHONPATH", "")])
        )
    out["TMPDIR"] = (
        "/run/guest/tmp"  # a tmpfs: RNICs do not register writable mappings of every file system
    )
    return out


class Machine:
    """See the module.  `on_line(line)` gets each line of the command's output, without its end, on
    a thread of this object."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        limit_s: float,
        network: Network | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        shares: Sequence[Path] = (),
        memory_mib: int = 3072,
        cpus: int = 2,
        takes_input: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.command = list(command)
        self.limit_s = limit_s
        self.network = network or Network()
        self.cwd = (cwd or Path.cwd()).resolve()
        self.environment = dict(environment or {})
        self.shares = [Path(s).resolve() for s in shares]
        self.memory_mib = memory_mib
        self.cpus = cpus
        self.takes_input = takes_input
        self.on_line = on_line
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._scratch: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, socket.socket] = {}
        self._readers: list[threading.Thread] = []
        self._status = b""
        self._qmp_buffer = b""
        self._deadline = 0.0

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> Machine:
        """Boot.  Returns at once; GuestError when something that it needs is missing."""
        image = images.prepare()
        self._scratch = Path(tempfile.mkdtemp(prefix="kdirect-guest-"))
        initramfs = self._scratch / "initramfs"
        initramfs.write_bytes(image.initramfs.read_bytes() + self._job(image))
        passed: list[socket.socket] = []

        def port(name: str) -> str:
            self._ports[name], theirs = socket.socketpair()
            passed.append(theirs)
            return f"socket,id={name},fd={theirs.fileno()}"

        accelerator = os.environ.get("KDIRECT_GUEST_ACCEL", "tcg,thread=multi")
        arguments = [
            "qemu-system-x86_64",
            "-accel",
            accelerator,
            "-cpu",
            "host" if accelerator.startswith("kvm") else "Nehalem",
        ]
        arguments += [
            "-m",
            str(self.memory_mib),
            "-smp",
            str(self.cpus),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]
        arguments += [
            "-kernel",
            str(image.kernel),
            "-initrd",
            str(initramfs),
            "-append",
            KERNEL_ARGUMENTS,
        ]
        arguments += [
            "-chardev",
            f"file,id=console,path={self._scratch / 'console'}",
            "-serial",
            "chardev:console",
        ]
        arguments += [
            "-chardev",
            port("qmp"),
            "-mon",
            "chardev=qmp,mode=control",
            "-device",
            "virtio-serial-pci",
        ]
        for name in ("out", "err", "status", "in"):
            arguments += [
                "-chardev",
                port(name),
                "-device",
                f"virtserialport,chardev={name},name={name}",
            ]
        for i, directory in enumerate([Path("/"), *self.shares]):
            tag = "machine" if i == 0 else f"share{i - 1}"
            only = ",readonly=on" if i == 0 else ""
            arguments += [
                "-fsdev",
                f"local,id={tag},path={directory},security_model=none,multidevs=remap{only}",
            ]
            arguments += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        if self.network.cable is not None:
            passed.append(self.network.cable)
            arguments += ["-netdev", f"socket,id=net,fd={self.network.cable.fileno()}"]
            arguments += ["-device", f"virtio-net-pci,netdev=net,mac={self.network.mac}"]
            for way, queue in QUEUES.items():  # a character device serves one filter
                arguments += ["-chardev", f"null,id=nowhere-{way}"]
                arguments += [
                    "-object",
                    f"filter-redirector,id=lose-{way},netdev=net,queue={queue},"
                    f"outdev=nowhere-{way},status=off",
                ]
        self._deadline = time.monotonic() + self.limit_s
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stderr=open(self._scratch / "qemu", "wb"),  # noqa: SIM115 - the child's
            pass_fds=[s.fileno() for s in passed],
            preexec_fn=_die_with_parent,
        )
        for s in passed:
            s.close()
        for name in ("out", "err", "status"):
            reader = threading.Thread(
                target=self._read, args=(name,), name=f"guest-{name}", daemon=True
            )
            reader.start()
            self._readers.append(reader)
        return self

    def _job(self, image: Image) -> bytes:
        """What this run adds to the initramfs."""
        environment = {**environment_of(image), **self.environment}
        script = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items())
        )
        script += f"cd {shlex.quote(str(self.cwd))}\nexec {shlex.join(self.command)}\n"
        settings = {
            "NAME": self.network.name,
            "NETWORK": "own" if self.network.cable is None else "pair",
            "ADDRESS": self.network.address,
            "LIMIT_S": str(int(self.limit_s) + 5),
            "INPUT": str(int(self.takes_input)),
        }
        files = {
            "settings": "".join(
                f"{name}={shlex.quote(value)}\n" for name, value in settings.items()
            ),
            "shares": "".join(f"{directory}\n" for directory in self.shares),
            "hosts": "".join(f"{address} {name}\n" for name, address in self.network.hosts.items()),
            "job.sh": script,
        }
        return images.cpio(
            [
                ("job", 0o040755, b""),
                *((f"job/{name}", 0o100644, text.encode()) for name, text in files.items()),
            ]
        )

    def wait(self) -> int:
        """The command's exit status.  GuestError, with the console, when there is none: no boot, a
        crash, out of time."""
        assert self._process is not None, "not started"
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise GuestError(
                f"guest {self.network.name}: no end within {self.limit_s:.0f} s{self._evidence()}"
            ) from None
        for reader in self._readers:
            reader.join(10)
        if not self._status.strip().isdigit():
            raise GuestError(f"guest {self.network.name} ended without a result{self._evidence()}")
        return int(self._status)

    def wait_for(
        self, pattern: str, timeout_s: float = BOOT_LIMIT_S, after: int = 0
    ) -> re.Match[str]:
        """The first line of the command's output from line `after` on that matches; GuestError when
        it does not come."""
        wanted = re.compile(pattern)
        deadline = min(time.monotonic() + timeout_s, self._deadline)
        with self._news:
            while True:
                for line in self.lines[after:]:
                    match = wanted.search(line)
                    if match:
                        return match
                after = len(self.lines)
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    why = "the command ended" if self._ended else f"{timeout_s:.0f} s went by"
                    last = "\n".join(self.lines[-40:])
                    raise GuestError(
                        f"guest {self.network.name}: {why} without a line {pattern!r};"
                        f" its last lines:\n{last}{self._evidence()}"
                    )
                self._news.wait(left)

    def send(self, line: str) -> None:
        """One line for the command's standard input."""
        self._ports["in"].sendall(line.encode() + b"\n")

    def set_link(self, up: bool) -> None:
        """Pull the guest's network plug, or put it back: no frame passes in either direction while
        it is out."""
        self._qmp("set_link", name="net", up=up)

    def set_loss(self, lossy: bool, ways: Collection[str] = ("in", "out")) -> None:
        """Lose every frame that comes in, goes out, or both, or none again, with the plug in:
        neither end is told, as of a switch."""
        for way in ways:
            self._qmp(
                "qom-set",
                path=f"/objects/lose-{way}",
                property="status",
                value="on" if lossy else "off",
            )

    def close(self) -> None:
        """Kill what still runs and forget everything."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(10)
        for s in self._ports.values():
            s.close()
        self._ports.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def __enter__(self) -> Machine:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------

    def _read(self, name: str) -> None:
        rest = b""
        while True:
            try:
                data = self._ports[name].recv(1 << 16)
            except OSError:
                data = b""
            if name == "status":
                self._status += data
            else:
                *whole, rest = (rest + data).split(b"\n")
                self._say(
                    [
                        line.decode(errors="replace").rstrip("\r")
                        for line in ([*whole, rest] if not data and rest else whole)
                    ]
                )
            if not data:
                break
        if name == "out":
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _say(self, lines: list[str]) -> None:
        with self._news:
            self.lines += lines
            self._news.notify_all()
            for line in lines:
                if self.on_line is not None:
                    self.on_line(line)

    def _qmp(self, command: str, **arguments: object) -> None:
        port = self._ports["qmp"]
        port.settimeout(30)
        if not self._qmp_buffer:
            self._answer("QMP")
            port.sendall(b'{"execute": "qmp_capabilities"}\n')
            self._answer("return")
        port.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self._answer("return")

    def _answer(self, key: str) -> None:
        """Wait for a message with `key`; events on the way are passed over."""
        while True:
            while b"\n" not in self._qmp_buffer.lstrip():
                data = self._ports["qmp"].recv(1 << 16)
                if not data:
                    raise GuestError(f"guest {self.network.name}: QEMU is gone{self._evidence()}")
                self._qmp_buffer += data
            line, _, self._qmp_buffer = self._qmp_buffer.lstrip().partition(b"\n")
            self._qmp_buffer = self._qmp_buffer or b" "
            message = json.loads(line)
            if "error" in message:
                raise GuestError(f"guest {self.network.name}: QEMU refuses: {message['error']}")
            if key in message:
                return

    def _evidence(self) -> str:
        assert self._scratch is not None
        parts = []
        for name, what in (("qemu", "QEMU says"), ("console", "its console")):
            path = self._scratch / name
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            if text:
                parts.append(f"\n--- {what}:\n{text[-6000:]}")
        return "".join(parts)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(machine: Machine) -> int:
    """Run one guest to its end, its output on ours; the command's exit status, or 125 when there is
    none."""
    out = sys.stdout

    def show(line: str) -> None:
        out.write(line + "\n")
        out.flush()

    machine.on_line = show
    try:
        with machine:
            return machine.wait()
    except GuestError as e:
        print(f"guest: {e}", file=sys.stderr)
        return 125
