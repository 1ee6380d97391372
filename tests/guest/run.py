"""Runs a command in a guest with soft-RoCE; `make test-rdma` and `make bench-rdma` are made of it.

    python tests/guest/run.py [--limit SECONDS] [--share DIR] -- COMMAND ARGUMENTS...
    python tests/guest/run.py --check        say whether a guest can be made here
    python tests/guest/run.py --packages     name the Debian packages that one takes
    python tests/guest/run.py --missing      name those of them that are not installed

Those three need no environment: any Python 3 will do.  The exit status is the command's; 125 when
the guest could not be made or ended without one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.guest.image import GuestError, missing_packages, packages, prepare  # noqa: E402
from tests.guest.machine import Machine, run  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="tests/guest/run.py", description="Run a command in a guest with soft-RoCE."
    )
    parser.add_argument(
        "--check", action="store_true", help="say whether a guest can be made here, and stop"
    )
    parser.add_argument(
        "--packages", action="store_true", help="name the Debian packages that are needed, and stop"
    )
    parser.add_argument(
        "--missing", action="store_true", help="name those that are not installed, and stop"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=300,
        metavar="SECONDS",
        help="for the whole guest (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="what is written there stays",
    )
    parser.add_argument(
        "--memory", type=int, default=3072, metavar="MIB", help="default: %(default)s"
    )
    parser.add_argument("--cpus", type=int, default=2, help="default: %(default)s")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(given)
    if options.packages or options.missing:
        print(*(packages() if options.packages else missing_packages()))
        return 0
    if options.check:
        try:
            image = prepare()
        except GuestError as e:
            print(f"guest: {e}", file=sys.stderr)
            return 125
        print(f"guest: kernel {image.release}, {image.kernel.parent}")
        return 0
    if not options.command:
        parser.error("no command")
    for directory in options.share:
        directory.mkdir(parents=True, exist_ok=True)
    return run(
        Machine(
            options.command,
            limit_s=options.limit,
            shares=options.share,
            memory_mib=options.memory,
            cpus=options.cpus,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
