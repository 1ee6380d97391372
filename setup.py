"""Build of the compiled rooms.  Everything declarative is in pyproject.toml.

KDIRECT_EXT=kdirect.log,kdirect.rdma.shm limits a build to modules that start with one of these names
(for a quick rebuild while working on one room); KDIRECT_LINETRACE=1 keeps annotations and debug symbols.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
SOURCE = Path("python")


def extensions() -> list[Extension]:
    only = [p for p in os.environ.get("KDIRECT_EXT", "").split(",") if p]
    found = []
    for pyx in sorted((ROOT / SOURCE / "kdirect").rglob("*.pyx")):
        relative = pyx.relative_to(ROOT)
        name = ".".join(relative.relative_to(SOURCE).with_suffix("").parts)
        if only and not any(name.startswith(p) for p in only):
            continue
        headers = sorted(str(h.relative_to(ROOT)) for h in (ROOT / SOURCE / "kdirect").rglob("*.h"))
        found.append(
            Extension(
                name,
                [str(relative)],
                include_dirs=[str(SOURCE / "kdirect" / "format"), str(SOURCE / "kdirect" / "rdma")],
                depends=headers,
                extra_compile_args=["-O3", "-std=gnu11", "-fno-strict-aliasing", "-Wno-unused-function"]
                + (["-g"] if os.environ.get("KDIRECT_LINETRACE") else []),
                extra_link_args=["-pthread"],
                define_macros=[("_GNU_SOURCE", "1")],
            )
        )
    return found


setup(
    ext_modules=cythonize(
        extensions(),
        include_path=[str(SOURCE)],
        language_level=3,
        annotate=bool(os.environ.get("KDIRECT_LINETRACE")),
        compiler_directives={"embedsignature": True, "binding": True, "freethreading_compatible": False},
    ),
)
