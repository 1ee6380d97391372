"""The files of the tree, as the laws of this room look at them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"kdirect": ROOT / "python/kdirect", "kdirect_spark": ROOT / "kdirect_spark"}
# What is generated or installed.
SKIPPED = {"build", "dist", "__pycache__", "target", "out"}


def sources(*suffixes: str) -> list[Path]:
    """Files of the tree with one of these suffixes; what is generated, installed or hidden is left
    out."""
    found = []
    for directory, inner, names in os.walk(ROOT):
        inner[:] = [d for d in inner if d not in SKIPPED and not d.startswith(".")]
        found += [Path(directory, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


def written_by_hand() -> list[Path]:
    """Code, prose, settings and scripts: everything but data."""
    suffixes = (
        ".py", ".pyi", ".pyx", ".pxd", ".h", ".scala", ".sbt", ".md", ".sh", ".toml", ".in",
    )  # fmt: skip
    return [*sources(*suffixes), ROOT / "Makefile", ROOT / ".ci/run"]
