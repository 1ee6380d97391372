"""Names of a package that are loaded when they are first used.

A package that only names what users need costs next to nothing to import then.  Its stub, or its
table, says where each name comes from.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names live in the modules of `home`."""

    def load(name: str) -> object:
        module = home.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        found = sys.modules[package].__all__
        return sorted({*found, "__all__", "__doc__", "__file__", "__name__", "__path__"})

    return load, names
