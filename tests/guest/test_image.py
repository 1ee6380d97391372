"""What can be said of the guest without booting one: its packages are named wherever they have to
be, and a missing one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.guest import image

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_documentation_names_every_package() -> None:
    words = (ROOT / "docs/rdma.md").read_text().replace("\\\n", " ")
    assert f"apt-get install --no-install-recommends {' '.join(image.packages())}" in " ".join(
        words.split()
    )


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(image.PACKAGES, "no-such-package", "/nonexistent/evidence")
    assert "no-such-package" in image.missing_packages()
    if image.platform.machine() == "x86_64":
        with pytest.raises(
            image.GuestError,
            match=r"missing: .*\bno-such-package\b.*apt-get install .*\bno-such-package\b",
        ):
            image.prepare()


def test_no_kernel_with_soft_roce_is_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "kernel_release", lambda: None)
    assert image.KERNEL_PACKAGE in image.missing_packages()


def test_the_runner_names_them_without_the_environment() -> None:
    """Continuous integration asks it before there is one."""
    run = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "tests/guest/run.py"), "--packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.split() == image.packages(), run.stderr
