"""Build of the compiled rooms.  Everything declarative is in pyproject.toml.

Every ``.pyx`` under python/kdirect becomes the extension module of the same name; there is no list
to keep. KDIRECT_EXT=kdirect.log,kdirect.rdma.shm limits a build to modules whose names start with
one of these (for a quick rebuild while working on one room); KDIRECT_LINETRACE=1 keeps annotations
and debug symbols.
"""

import os
import shutil
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SOURCE = Path("python")
JOBS = len(os.sched_getaffinity(0))


class FreshBuildPy(build_py):
    """Copies the Python files into a build directory that holds nothing of removed or renamed
    sources.

    build/ is kept between builds for the sake of the compiled modules; setuptools never deletes
    from it, so a deleted file would live on in every later wheel.
    """

    def run(self) -> None:
        for built in Path(self.build_lib).rglob("*"):
            source = (
                ROOT
                / SOURCE
                / built.relative_to(self.build_lib).parent
                / f"{built.name.split('.')[0]}.pyx"
            )
            if built.is_file() and not (built.suffix == ".so" and source.exists()):
                built.unlink()
        super().run()
        # The sources of the JVM shim travel with the connector, which compiles them for the Spark
        # at hand.
        shutil.copytree(
            ROOT / "jvm_shim" / "src" / "main",
            Path(self.build_lib, "kdirect_spark", "jvm_shim", "src", "main"),
            dirs_exist_ok=True,
        )


def extensions() -> list[Extension]:
    only = [p for p in os.environ.get("KDIRECT_EXT", "").split(",") if p]
    headers = sorted(str(h.relative_to(ROOT)) for h in (ROOT / SOURCE / "kdirect").rglob("*.h"))
    found = []
    for pyx in sorted((ROOT / SOURCE / "kdirect").rglob("*.pyx")):
        relative = pyx.relative_to(ROOT)
        name = ".".join(relative.relative_to(SOURCE).with_suffix("").parts)
        if only and not any(name.startswith(p) for p in only):
            continue
        found.append(
            Extension(
                name,
                [str(relative)],
                include_dirs=[
                    str(SOURCE / "kdirect" / room) for room in ("", "format", "rdma", "state")
                ],
                depends=[*headers, "setup.py"],
                extra_compile_args=[
                    "-O3",
                    "-std=gnu11",
                    "-fno-strict-aliasing",
                    "-Wno-unused-function",
                ]
                + (["-g"] if os.environ.get("KDIRECT_LINETRACE") else ["-g0"]),
                extra_link_args=["-pthread"],
                define_macros=[("_GNU_SOURCE", "1")],
            )
        )
    return found


setup(
    cmdclass={"build_py": FreshBuildPy},
    options={"build_ext": {"parallel": JOBS}},
    ext_modules=cythonize(
        extensions(),
        include_path=[str(SOURCE)],
        nthreads=JOBS,
        language_level=3,
        annotate=bool(os.environ.get("KDIRECT_LINETRACE")),
        compiler_directives={
            "embedsignature": True,
            "binding": True,
            "freethreading_compatible": False,
        },
    ),
)
