"""``pytest --beside``: several processes make one run, three of them at a time.

Most tests start brokers and clients and wait for them, one test at a time, while a core stands
still.  So the tests are in parts, each a process of its own: those of `APART`, most of which start
several brokers, JVMs or Spark, and all others.  `LANES` parts run side by side, the calm one among
them; when one has ended the next begins, so that however long each of them takes, some run until
nearly all is done.

The tests of `CALM` take what they leave: nothing in them depends on how fast they are, no process
on the other side, no socket, no deadline that is meant; they compute, in simulated time if any.  So
their process has a low priority, and runs from the beginning, even while `FREE` has the others wait
for a core (.ci/run).  One exception measures real systems: its figures are held against nothing,
and its patience is minutes.

The first process collects, hands each part to a process of its own, and tells what they found, as
if it had run it: one summary, one status.  A test of which nothing was heard has failed.  A test
that failed beside others is run once more, alone, and that result counts; of more than `MOST_AGAIN`
nobody says that it was for want of a core.  The summary names what passed only then.

If one part has all tests that were chosen, the first process runs them itself, and none of them
twice.  So it does for an option that asks for a look at a single process (``--pdb``, ``-s``,
``--collect-only``, ``--stepwise``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CALM = (
    "tests/cluster",
    "tests/format",
    "tests/replication",
    "tests/simulation",
    "tests/tidy",
    "tests/state/test_backend.py",
    "tests/state/test_chains.py",
    "tests/state/test_collisions.py",
    "tests/state/test_delta_laws.py",
    "tests/state/test_fragments.py",
    "tests/state/test_joins.py",
    "tests/state/test_reference.py",
    "tests/state/test_sessions.py",
    "tests/state/test_simulation.py",
    "tests/state/test_table.py",
    "tests/state/test_texts.py",
    "tests/rdma/test_channel_model.py",
    "tests/rdma/test_channel_sim.py",
    "tests/packaging/test_bench_versus.py",  # the exception
    "tests/packaging/test_distribution.py",
    "tests/packaging/test_one_jar.py",
    "tests/packaging/test_sbt.py",
    "tests/packaging/test_types.py",
    "tests/test_architecture.py",
    "tests/test_stubs.py",
)
OTHERS, CALM_NAME, AGAIN = "all others", "calm", "second try"
# In the order in which they begin, the longest first, all others before them.
APART = {
    "Spark": ("tests/parity", "tests/spark"),
    "several brokers": ("tests/members",),
    "Java": ("tests/examples", "tests/java", "tests/packaging/test_jar_in_spark.py"),
}
LANES = 3  # parts that run side by side
# A file by which somebody says that cores are free: until it is there, the calm part runs alone.
FREE = "KDIRECT_LANES_FREE"
# Set in the process of a part only: the directory in which it finds what to run and leaves what
# came of it.
PLACE = "KDIRECT_BESIDE"
WANTED, REPORTS, SAID = "wanted", "reports", "said"
CALM_TIMEOUT = 900  # of a calm test, as long as the others leave it little
# As nice as this while the others run: a tenth of a core that both want.  Where the kernel shares
# cores among sessions first, that is said of the session too, and taken back in the end.
NICE = 10
MOST_AGAIN = 5
EVERY_S = 0.1  # a look at what the parts have said
END_S = 30  # for the fixtures of a part that is told to end
PR_SET_PDEATHSIG = 1
LINES = 100  # of what a part said, if it did not end well

Reports = list[Any]  # of one test: its setup, call and teardown


def is_below(item: pytest.Item, paths: Iterable[str]) -> bool:
    path = os.path.relpath(item.path, item.config.rootpath)
    return any(path == one or path.startswith(f"{one}/") for one in paths)


def part_of(item: pytest.Item) -> str:
    if is_below(item, CALM):
        return CALM_NAME
    found = (name for name, paths in APART.items() if is_below(item, paths))
    return next(found, OTHERS)


def register(config: pytest.Config, environment: dict[str, str]) -> None:
    """What this process does, by its options.  `environment`: for the processes of the parts."""
    option = config.option
    # Taken away: a pytest that a test starts is no part.
    if place := os.environ.pop(PLACE, None):
        config.pluginmanager.register(Part(Path(place), config), "part")
    elif option.beside and not (
        option.usepdb
        or option.trace
        or option.collectonly
        or option.capture == "no"
        or getattr(option, "stepwise", False)
    ):
        config.pluginmanager.register(Whole(environment), "whole")


def be_nice(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # no such share: `os.nice` does
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def has_failed(reports: Reports) -> bool:
    return any(report.failed for report in reports)


class Whole:
    """The first process: hands out the parts, and tells of all."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        # Taken away: of this run, and of none that a test starts.
        free = os.environ.pop(FREE, None)
        self.free = Path(free) if free else None
        self.parts: dict[str, list[pytest.Item]] = {}
        self.running: list[Running] = []
        # Tests that failed and may have a second try; None: there is none any more.
        self.held: list[Reports] | None = []
        self.passed_alone: list[Reports] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        parts: dict[str, list[pytest.Item]] = {}
        for item in items:
            parts.setdefault(part_of(item), []).append(item)
        if len(parts) > 1:
            order = (CALM_NAME, OTHERS, *APART)
            self.parts = {name: parts[name] for name in order if name in parts}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if not self.parts or session.testsfailed:  # the collection failed
            return None
        self.session, self.config = session, session.config
        self.begun = time.monotonic()
        self.reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        if self.config.option.maxfail:
            self.held = None
        sizes = [f"{len(items)} of part {name!r}" for name, items in self.parts.items()]
        self.reporter.write_line(f"processes side by side: {', '.join(sizes)}")
        with tempfile.TemporaryDirectory(prefix="kdirect-beside-") as directory:
            try:
                self._follow(Path(directory))
                self._try_again(Path(directory, "again"))
            finally:
                for part in self.running:
                    part.tell_to_end()
                for part in self.running:
                    part.end()
        return True

    def _start(self, name: str, items: Sequence[pytest.Item], place: Path) -> Running:
        part = Running(name, items, self.config, self.environment, place)
        self.running.append(part)
        return part

    def _follow(self, directory: Path) -> None:
        """Until all parts have ended: start one after the other, and tell what they have done, one
        file after the other."""
        waiting: list[Running] = []
        to_begin = list(self.parts.items())
        while waiting or to_begin:
            while to_begin and (to_begin[0][0] == CALM_NAME or self._has_lane(waiting)):
                place = directory / str(len(self.running))
                waiting.append(self._start(*to_begin.pop(0), place))
            # Nobody is left to be nice to?
            if not to_begin and all(part.is_calm for part in waiting):
                for part in waiting:
                    be_nice(part.process.pid, 0)
            for part in list(waiting):
                over = part.is_over()  # before the look: what comes after it is the last
                found = part.look(over)
                self._warn(part)
                for reports in found:
                    self._done(reports)
                if over:
                    waiting.remove(part)
                    part.ended = time.monotonic()
                    self._tell_lost(part)
            if waiting or to_begin:
                time.sleep(EVERY_S)

    def _has_lane(self, waiting: list[Running]) -> bool:
        """May one more part begin that is not calm?"""
        if self.free is not None and not self.free.exists():
            return False
        return len(waiting) < LANES

    def _done(self, reports: Reports) -> None:
        if self.held is None or not has_failed(reports):
            self._tell(reports)
            return
        self.held.append(reports)
        if len(self.held) > MOST_AGAIN:
            self._give_up()

    def _give_up(self) -> None:
        """What is held has failed, and so has what fails from now on."""
        held, self.held = self.held or [], None
        for reports in held:
            self._tell(reports)

    def _tell(self, reports: Reports) -> None:
        hook, first = self.config.hook, reports[0]
        where = {"nodeid": first.nodeid, "location": first.location}
        hook.pytest_runtest_logstart(**where)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(**where)
        if self.session.shouldfail:  # --maxfail, reached by what was told
            raise self.session.Failed(self.session.shouldfail)

    def _warn(self, part: Running) -> None:
        for text, name, file, line, nodeid in part.take_warnings():
            category = type(name, (Warning,), {})
            message = warnings.WarningMessage(category(text), category, file, line)
            self.config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": message,
                    "when": "runtest",
                    "nodeid": nodeid,
                    "location": None,
                }
            )

    def _tell_lost(self, part: Running) -> None:
        if (why := part.what_is_wrong()) is None:
            return
        nodeid = (part.lost or part.wanted)[0]
        self._tell(
            [
                pytest.TestReport(
                    nodeid=nodeid,
                    location=(nodeid.split("::")[0], None, f"the process of part {part.name!r}"),
                    keywords={},
                    outcome="failed",
                    longrepr=why,
                    when="call",
                )
            ]
        )

    def _try_again(self, place: Path) -> None:
        """Run what failed once more, when nothing else runs."""
        if not self.held:
            return
        first = {reports[0].nodeid: reports for reports in self.held}
        self.reporter.ensure_newline()
        self.reporter.write_line(f"once more, alone: {len(first)} tests that failed")
        items = [item for part in self.parts.values() for item in part if item.nodeid in first]
        part = self._start(AGAIN, items, place)
        while not (over := part.is_over()):
            time.sleep(EVERY_S)
        for reports in part.look(over):
            before = first.pop(reports[0].nodeid)
            if not has_failed(reports):
                self.passed_alone.append(before)
            self._tell(reports)
        for reports in first.values():  # of which nothing was heard the second time
            self._tell(reports)
        self._tell_lost(part)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for part in self.running:
            if part.ended is not None:
                took_s = part.ended - part.begun
                terminalreporter.write_line(
                    f"part {part.name!r} took {took_s:.0f} s, from {part.begun - self.begun:.0f} s"
                )
        if not self.passed_alone:
            return
        terminalreporter.section("failed beside others, and passed alone")
        for reports in self.passed_alone:
            for report in reports:
                if report.failed:
                    terminalreporter.write_sep("_", f"{report.nodeid} ({report.when})")
                    terminalreporter.write_line(report.longreprtext)
        names = [reports[0].nodeid for reports in self.passed_alone]
        for nodeid in names:
            terminalreporter.write_line(f"PASSED ALONE {nodeid}")
        # Into the line that closes the run.
        counted = [SimpleNamespace(nodeid=nodeid) for nodeid in names]
        terminalreporter._add_stats("passed alone only", counted)


class Running:
    """A part as the first process sees it.  `end` it."""

    def __init__(
        self,
        name: str,
        items: Sequence[pytest.Item],
        config: pytest.Config,
        environment: dict[str, str],
        place: Path,
    ) -> None:
        self.name = name
        self.wanted = [item.nodeid for item in items]
        self.is_calm = name == CALM_NAME
        self.begun = time.monotonic()
        self.ended: float | None = None  # seen to have ended
        self._config = config
        self._place = place
        self._unread = b""
        self._position = 0
        self._tests: dict[str, Reports] = {}  # begun, and not all of it heard
        self._file: list[Reports] = []  # tests of the file that runs
        self._heard: set[str] = set()
        self._warnings: list[list[Any]] = []
        place.mkdir()
        nice = NICE if self.is_calm else 0
        (place / WANTED).write_text(json.dumps([nice, self.wanted]))
        (place / REPORTS).touch()
        # Paths are replaced by those of the part's tests; every option holds for all parts.
        options = [a for a in config.invocation_params.args if a not in config.args]
        if any(part_of(item) == CALM_NAME for item in items):
            options += ["--timeout", str(CALM_TIMEOUT)]
        files = dict.fromkeys(str(item.path) for item in items)
        with open(place / SAID, "wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *files],
                env={**os.environ, **environment, PLACE: str(place)},
                cwd=config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """Has it ended?  Then nothing of it is left."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # its number is its group's until it is reaped
        if self.process.returncode is None and os.waitid(os.P_PID, self.process.pid, ended):
            self._signal_group(signal.SIGKILL)
            self.process.wait()
        return self.process.returncode is not None

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def look(self, over: bool) -> list[Reports]:
        """The tests of files that are done, `over`: all that were begun."""
        out: list[Reports] = []
        with open(self._place / REPORTS, "rb") as file:
            file.seek(self._position)
            found = file.read()
        self._position += len(found)
        *lines, self._unread = (self._unread + found).split(b"\n")
        for line in lines:
            what, data = json.loads(line)
            if what == "warning":
                self._warnings.append(data)
                continue
            hook = self._config.hook
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            if report.skipped and isinstance(report.longrepr, list):  # JSON knows no tuples
                report.longrepr = tuple(report.longrepr)
            if self._file and self._file[0][0].location[0] != report.location[0]:
                out += self._file
                self._file = []
            self._tests.setdefault(report.nodeid, []).append(report)
            if report.when == "teardown":
                self._heard.add(report.nodeid)
                self._file.append(self._tests.pop(report.nodeid))
        if over:
            out += [*self._file, *self._tests.values()]
            self._file, self._tests = [], {}
        return out

    def take_warnings(self) -> list[list[Any]]:
        found, self._warnings = self._warnings, []
        return found

    @property
    def lost(self) -> list[str]:
        """Tests of which not everything was heard."""
        return [nodeid for nodeid in self.wanted if nodeid not in self._heard]

    def what_is_wrong(self) -> str | None:
        """Why a part that is over has failed, whatever its tests say; None: it has not."""
        status, lost = self.process.returncode, self.lost
        if not lost and status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return None
        said = (self._place / SAID).read_text(errors="replace").splitlines()[-LINES:]
        why = f"the process of part {self.name!r} ended with status {status}"
        names = [f", and nothing was heard of {len(lost)} tests:", *lost] if lost else [""]
        return "\n".join([*said, why + names[0], *names[1:]])

    def tell_to_end(self) -> None:
        if not self.is_over():
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait until it has ended: nothing of it outlives the first process."""
        until = time.monotonic() + END_S
        while not self.is_over():
            if time.monotonic() > until:
                self._signal_group(signal.SIGKILL)
            time.sleep(0.02)


class Part:
    """The process of a part: runs what it was told to."""

    def __init__(self, place: Path, config: pytest.Config) -> None:
        self.config = config
        self.reports = open(place / REPORTS, "a", buffering=1)  # noqa: SIM115 (until the end)
        nice, wanted = json.loads((place / WANTED).read_text())
        self.wanted = set(wanted)
        os.nice(nice)
        be_nice(os.getpid(), nice)
        # Told to end, and when the first process was killed: by way of the fixtures, which end what
        # they have started.
        self.pid = os.getpid()
        signal.signal(signal.SIGTERM, self._interrupt)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # What is told and kept of a run is for the first process.
        config.option.xmlpath = None
        for name in ("lfplugin", "nfplugin", "lfplugin-collwrapper"):
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)

    def _interrupt(self, number: int, frame: object) -> None:
        if os.getpid() == self.pid:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a process that was forked off
        os.kill(os.getpid(), number)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.wanted]

    def _write(self, what: str, data: Any) -> None:
        self.reports.write(json.dumps([what, data]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        self._write("report", data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str
    ) -> None:
        if when == "runtest":  # the first process has those of the collection itself
            w = warning_message
            self._write(
                "warning", [str(w.message), w.category.__name__, w.filename, w.lineno, nodeid]
            )

    def pytest_unconfigure(self) -> None:
        self.reports.close()
