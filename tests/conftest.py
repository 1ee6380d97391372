"""What all tests share: the printed seed, and the flag that turns skips into failures.

KDIRECT_SEED=n repeats a run's random choices.  KDIRECT_NO_SKIPS=1 (continuous integration sets it) makes a skipped test fail, but for
one whose reason begins with a word of `MAY_SKIP`: what a machine cannot be made to have by installing something.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings

MAY_SKIP = ("needs root", "needs an RNIC")
SEED = int(os.environ.get("KDIRECT_SEED") or random.SystemRandom().randrange(2**32))

# No deadline: two busy cores say nothing about an example.  The blob repeats a failure elsewhere.
settings.register_profile("kdirect", deadline=None, print_blob=True)
settings.load_profile("kdirect")


def pytest_report_header() -> list[str]:
    import kdirect

    strict = "skips fail" if no_skips() else "skips are told"
    return [f"kdirect: {os.path.dirname(kdirect.__file__)}; KDIRECT_SEED={SEED}; {strict}"]


def no_skips() -> bool:
    return os.environ.get("KDIRECT_NO_SKIPS", "0") not in ("", "0")


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not no_skips():
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(MAY_SKIP):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {reason}; KDIRECT_NO_SKIPS=1 makes a skip a failure: install what is missing"


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
    """A seed of this test's own, the same whenever KDIRECT_SEED is; printed, so a failure shows it."""
    own = random.Random(f"{SEED}:{request.node.nodeid}").randrange(2**32)
    print(f"seed {own} (KDIRECT_SEED={SEED})")
    return own
