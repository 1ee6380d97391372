"""``pytest --beside``: tests that need only a core run beside all others, in a second process.

Most tests start brokers and clients and wait for them, one test at a time, while a core stands
still.  The tests of `CALM` use that core.  Nothing in them depends on how fast they are: no
process on the other side, no socket, no deadline that is meant; they compute, in simulated time if
any.  So their process has a low priority, and takes what the others leave.  One exception measures
real systems: its figures are held against nothing, and its patience is minutes.  Nothing else may
enter, for two tests of real processes at once would wait for each other.

What the second process finds is told by the first when its own tests are done, as if it had run
them: one summary, one status.  A test of which nothing was heard has failed.  An option of pytest
that asks for a look at a single process (``--pdb``, ``--collect-only``) takes precedence.
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
from collections.abc import Iterator
from pathlib import Path
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
    "tests/packaging/test_types.py",
    "tests/test_architecture.py",
    "tests/test_stubs.py",
)
# Set in the second process only: the directory in which it finds what to run and leaves what came
# of it.
PLACE = "KDIRECT_BESIDE"
WANTED, REPORTS, SAID = "wanted", "reports", "said"
TIMEOUT = 900  # of a calm test, as long as the others leave it little
# As nice as this while the others run: a tenth of a core that both want.  Where the kernel shares
# cores among sessions first, that is said of the session too, and taken back in the end.
NICE = 10
PR_SET_PDEATHSIG = 1
LINES = 60  # of what the second process said, if it did not end well


def is_calm(item: pytest.Item) -> bool:
    path = os.path.relpath(item.path, item.config.rootpath)
    return any(path == calm or path.startswith(f"{calm}/") for calm in CALM)


def register(config: pytest.Config, environment: dict[str, str]) -> None:
    """What this process does, by its options.  `environment`: for the second one."""
    option = config.option
    if place := os.environ.get(PLACE):
        config.pluginmanager.register(Calm(Path(place), config), "calm")
    elif option.beside and not (option.usepdb or option.trace or option.collectonly):
        config.pluginmanager.register(Others(environment), "others")


def be_nice(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # no such share: `os.nice` does
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


class Others:
    """The first process: hands out the calm tests, runs the others, and tells of both."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.calm: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        calm = [item for item in items if is_calm(item)]
        if not calm or len(calm) == len(items):
            return
        items[:] = [item for item in items if not is_calm(item)]
        self.calm = [item.nodeid for item in calm]
        self.files = list(dict.fromkeys(str(item.path) for item in calm))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        if not self.calm or session.testsfailed:  # the collection failed
            return (yield)
        with tempfile.TemporaryDirectory(prefix="kdirect-beside-") as name:
            place = Path(name)
            self.start(session.config, place)
            session.testscollected += len(self.calm)  # of which the progress is told
            try:
                result = yield
                self.tell(session, place)
            finally:
                self.end()
        if session.shouldfail:  # --maxfail, reached by what was told
            raise session.Failed(session.shouldfail)
        return result

    def start(self, config: pytest.Config, place: Path) -> None:
        (place / WANTED).write_text(json.dumps(self.calm))
        # Paths are replaced by those of the calm tests; every option holds for both.
        options = [a for a in config.invocation_params.args if a not in config.args]
        with open(place / SAID, "wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, "--timeout", str(TIMEOUT), *self.files],
                env={**os.environ, **self.environment, PLACE: str(place)},
                cwd=config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"beside these: {len(self.calm)} tests that need only a core")

    def tell(self, session: pytest.Session, place: Path) -> None:
        """Wait for the second process, and report what it did as one's own."""
        assert self.process is not None
        config = session.config
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        be_nice(self.process.pid, 0)  # nobody is left to be nice to
        begun = time.monotonic()
        status = self.process.wait()
        waited = time.monotonic() - begun
        reporter.ensure_newline()
        reporter.write_line(f"beside these (it took {waited:.0f} s more):")
        told = set()
        with contextlib.suppress(FileNotFoundError), open(place / REPORTS) as reports:
            for line in reports:
                data = json.loads(line)
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                if report.when == "setup":
                    config.hook.pytest_runtest_logstart(
                        nodeid=report.nodeid, location=report.location
                    )
                config.hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    told.add(report.nodeid)
                    config.hook.pytest_runtest_logfinish(
                        nodeid=report.nodeid, location=report.location
                    )
        lost = [nodeid for nodeid in self.calm if nodeid not in told]
        if lost or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            said = (place / SAID).read_text(errors="replace").splitlines()[-LINES:]
            why = f"it ended with status {status}, and nothing was heard of {len(lost)} tests"
            first = lost[0] if lost else self.calm[-1]
            config.hook.pytest_runtest_logreport(
                report=pytest.TestReport(
                    nodeid=first,
                    location=(first.split("::")[0], None, "the tests beside these"),
                    keywords={},
                    outcome="failed",
                    longrepr="\n".join([*said, f"the process beside this one: {why}"]),
                    when="call",
                )
            )

    def end(self) -> None:
        """Nothing of the second process outlives this one."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()


class Calm:
    """The second process: runs what it was told to, at the low priority."""

    def __init__(self, place: Path, config: pytest.Config) -> None:
        self.place = place
        self.config = config
        self.reports = open(place / REPORTS, "a", buffering=1)  # noqa: SIM115 (until the end)
        os.nice(NICE)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # and of the first, if killed
        be_nice(os.getpid(), NICE)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = set(json.loads((self.place / WANTED).read_text()))
        items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.write(json.dumps(data) + "\n")

    def pytest_unconfigure(self) -> None:
        self.reports.close()
