"""Writes ``layout.pxd`` from ``layout.py``, in every room that has layouts of its own.

Law: a room's layouts are read as a file, never as a module of the room, so that this runs before
anything is compiled.  ``make layout`` runs this file; a test fails where the two files of a room
differ.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def rooms(root: Path = ROOT) -> list[str]:
    """Names of the rooms of the package at `root` that have layouts."""
    return sorted(path.parent.name for path in root.glob("*/layout.py"))


def constants(room: str, root: Path = ROOT) -> dict[str, int]:
    """Name and value of every constant of the room's layouts, in order of definition."""
    names = runpy.run_path(str(root / room / "layout.py"))
    return {k: v for k, v in names.items() if k.isupper() and isinstance(v, int)}


def render(room: str, root: Path = ROOT) -> str:
    """The text of the room's ``layout.pxd``."""
    every = constants(room, root)
    small = {name: value for name, value in every.items() if value < 1 << 31}
    large = {name: value for name, value in every.items() if name not in small}
    lines = ["# Written by `make layout`; edit layout.py instead."]
    if large:
        lines += ["from libc.stdint cimport uint64_t", ""]
    lines += ["cdef enum:", *(f"    {name} = {value}" for name, value in small.items())]
    if large:
        lines += [
            "",
            "# C's enumerators are ints: these need more.",
            "cdef extern from *:",
            '    """',
            *(f"    #define {name} {value}ULL" for name, value in large.items()),
            '    """',
            *(f"    const uint64_t {name}" for name in large),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    for room in rooms():
        (ROOT / room / "layout.pxd").write_text(render(room))
        sys.stdout.write(f"{room}/layout.pxd written\n")


if __name__ == "__main__":
    main()
