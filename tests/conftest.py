"""What all tests share: the printed seed, and the flag that turns skips into failures.

Brokers too: `broker` is one inside the test's process, `broker_process` starts real ones, which can
be killed.

KDIRECT_SEED=n repeats a run's random choices; continuous integration (CI is set) makes the same
ones every time, so that a failure there is of the change.  KDIRECT_NO_SKIPS=1 (continuous
integration sets it) makes a skipped test fail, but for one whose reason begins with a word of
`MAY_SKIP`: what a machine cannot be made to have by installing something.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import beside
from tests.support import BrokerProcess, jars_module

JARS = {
    "broker_jars",
    "connect_jars",
    "connector_jars",
    "delta_jars",
    "s3proxy_jars",
    "sbt_jars",
    "streams_jars",
}
MAY_SKIP = ("needs root", "needs an RNIC")
IN_CI = os.environ.get("CI", "").lower() not in ("", "0", "false")
# The first process's seed, in those of the parts of a run (tests/beside.py).  Not KDIRECT_SEED, by
# which some tests number their rounds.
SEED_OF_RUN = "KDIRECT_SEED_OF_RUN"
SEED = int(
    os.environ.get("KDIRECT_SEED")
    or os.environ.get(SEED_OF_RUN)
    or (1 if IN_CI else random.SystemRandom().randrange(2**32))
)

# No deadline: two busy cores say nothing about an example.  The blob repeats a failure elsewhere.
settings.register_profile("kdirect", deadline=None, print_blob=True, derandomize=IN_CI)
settings.load_profile("kdirect")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--beside",
        action="store_true",
        help="run the tests in parts side by side, each in a process of its own (tests/beside.py)",
    )


def pytest_configure(config: pytest.Config) -> None:
    beside.register(config, {SEED_OF_RUN: str(SEED)})


def pytest_report_header() -> list[str]:
    import kdirect

    strict = "skips fail" if no_skips() else "skips are told"
    return [f"kdirect: {os.path.dirname(kdirect.__file__)}; KDIRECT_SEED={SEED}; {strict}"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not any(
        os.environ.get(name, "0") not in ("", "0")
        for name in ("KDIRECT_TEST_VERBS", "KDIRECT_TEST_GUESTS")
    ):
        terminalreporter.write_line("not run here: tests over real verbs (make test-rdma)")


def no_skips() -> bool:
    return os.environ.get("KDIRECT_NO_SKIPS", "0") not in ("", "0")


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not no_skips():
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid}: {reason}; KDIRECT_NO_SKIPS=1 makes"
            " a skip a failure: install what is missing"
        )


@pytest.fixture(scope="module", autouse=True)
def sessions_end() -> Iterator[None]:
    """What a module connected to ends with it: descriptors above 1023 would be too high for py4j,
    which asks `select` about them."""
    yield
    from kdirect.client import connections

    connections.close_all()
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The first of these fetches some 50 MB.
        if (
            JARS & set(getattr(item, "fixturenames", ()))
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    _forbid_skip(report)
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, the same whenever KDIRECT_SEED is; printed, so a failure shows
    it."""
    own = random.Random(f"{SEED}:{request.node.nodeid}").randrange(2**32)
    print(f"seed {own} (KDIRECT_SEED={SEED})")
    return own


@pytest.fixture(scope="session")
def kcat() -> str:
    """The program kcat: a client that the README shows and does not ask for."""
    found = shutil.which("kcat")
    if found is None:
        pytest.skip("kcat is not installed (apt-get install kcat)")
    return found


def _jars(kind: str, whose: str = "Kafka's") -> list[Path]:
    jars = jars_module()
    try:
        found: list[Path] = jars.jars(kind)
        return found
    except jars.MissingJarsError as e:
        pytest.skip(
            f"{whose} jars cannot be fetched from Maven Central"
            f" (bench/versus/jars.txt): {str(e).splitlines()[0]}"
        )


@pytest.fixture(scope="session")
def broker_jars() -> list[Path]:
    """Kafka's broker, tools and client; fetched by the first test that asks, then kept."""
    return _jars("broker")


@pytest.fixture(scope="session")
def tiered_jars() -> list[Path]:
    """What Kafka's broker needs beside for tiered storage in a directory."""
    return _jars("tiered")


@pytest.fixture(scope="session")
def streams_jars(broker_jars: list[Path]) -> list[Path]:
    """Kafka Streams with all that it needs but RocksDB: its stores have to be in memory."""
    return [*broker_jars, *_jars("streams")]


@pytest.fixture(scope="session")
def connect_jars(broker_jars: list[Path]) -> list[Path]:
    """Kafka Connect with its file connectors.  Its own jars first: its Jackson is newer."""
    return [*_jars("connect"), *broker_jars]


@pytest.fixture(scope="session")
def connector_jars() -> list[Path]:
    """Spark's own Kafka connector, with the client that it takes."""
    return _jars("connector")


@pytest.fixture(scope="session")
def delta_jars() -> list[Path]:
    """Delta's tables, for Spark."""
    return _jars("delta", "Delta's")


@pytest.fixture(scope="session")
def sbt_jars() -> list[Path]:
    """sbt's launcher, which fetches sbt itself."""
    return _jars("sbt", whose="sbt's")


@pytest.fixture(scope="session")
def s3proxy_jars() -> list[Path]:
    """A server that speaks S3 over a directory."""
    return _jars("s3proxy", "S3Proxy's")


@pytest.fixture(scope="session")
def object_stores(
    tmp_path_factory: pytest.TempPathFactory, s3proxy_jars: list[Path]
) -> Iterator[Any]:
    """`directory`, `s3` and `gcs`: a `tests.object_servers.Place` of each; take its `fresh()`."""
    from tests import object_servers

    with object_servers.running(tmp_path_factory.mktemp("objects"), s3proxy_jars) as places:
        yield places


@pytest.fixture
def broker() -> Iterator[Any]:
    """A `kdirect.Broker` of this test's own, on a free port, with a temporary log."""
    import kdirect

    with kdirect.Broker() as b:
        yield b


@pytest.fixture
def broker_process(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """``broker_process(log_dir=None, **properties)`` starts a broker; those still running are
    killed after the test."""
    started: list[BrokerProcess] = []

    def start(log_dir: Path | None = None, **properties: Any) -> BrokerProcess:
        directory = log_dir if log_dir is not None else tmp_path / f"log{len(started)}"
        process = BrokerProcess(
            directory, {name.replace("_", "."): value for name, value in properties.items()}
        )
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.kill()
