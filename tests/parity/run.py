"""Run the scenarios with both formats against one broker: ``python -m tests.parity.run``.

Prints a line for each scenario, and fails if an outcome is not as expected and no known difference,
or if a known difference is none.  ``--write`` writes the table of differences into docs/spark.md,
after a run of all scenarios; ``--keep`` lets a run that was interrupted go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.conftest import _jars
from tests.parity import (  # noqa: F401  they enter their scenarios
    changes,
    limits,
    ranges,
    relation,
    sinks,
    starts,
    stream_sinks,
    streams,
)
from tests.parity.differences import KNOWN
from tests.parity.scenario import SCENARIOS, Scenario
from tests.parity.world import FORMATS, World, outcome
from tests.support import BrokerProcess

FINE = ("same", "known")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"
# As the brokers of Spark's suites: a topic that is not there stays so.
BROKER = {"auto.create.topics.enable": "false"}
BEGIN, END = "<!-- parity: written by `make parity` -->\n", "<!-- end of parity -->\n"


def session() -> Any:
    from kdirect_spark import session_builder

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.pop("PYTHONPATH", None)  # Spark's workers take the package that is installed
    builder = session_builder("parity", "local[2]")
    jars = [builder._options.get("spark.jars", ""), *map(str, _jars("connector"))]
    for name, value in {
        "spark.jars": ",".join(jar for jar in jars if jar),
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "OFF",
        # Hundreds of short queries: compiling each for speed takes longer than running it.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def verdict(case: Scenario, found: dict[str, str]) -> str:
    """``same``, ``known``, or what is wrong."""
    if found["kafka"] != case.expected:
        return f"kafka gives {found['kafka']}, not {case.expected}"
    if found["kdirect"] == case.expected:
        return "same" if case.name not in KNOWN else "is in differences.KNOWN, and is none"
    if case.name in KNOWN:
        return "known"
    return f"kdirect gives {found['kdirect']}, not {case.expected}"


def table(outcomes: dict[str, dict[str, str]]) -> str:
    """The section of docs/spark.md."""
    rows = "".join(
        f"| {name} | `{found['kafka']}` | `{found['kdirect']}` | {KNOWN[name]} |\n"
        for name, found in outcomes.items()
        if name in KNOWN
    )
    head = f"Of {len(outcomes)} scenarios of Spark's Kafka suites, run with both formats, "
    head += f"{sum(name not in KNOWN for name in outcomes)} come out alike.\n"
    if not rows:
        return head
    return f"{head}\n| scenario | kafka | kdirect | why |\n| --- | --- | --- | --- |\n{rows}"


def play_all(cases: list[Scenario], outcomes: dict[str, dict[str, str]], keep: Path | None) -> int:
    """Run the scenarios with both formats, print the verdicts and enter the outcomes; how many are
    wrong.  One that goes wrong has a second try, as tests have; both are printed."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kdirect-parity-") as directory:
        broker = BrokerProcess(Path(directory) / "log", BROKER).start()
        spark = session()

        def play(case: Scenario) -> str:
            begin = time.monotonic()
            outcomes[case.name] = {
                form: outcome(
                    case.run, World(spark, broker.bootstrap_servers, Path(directory), form)
                )
                for form in FORMATS
            }
            said = verdict(case, outcomes[case.name])
            took = time.monotonic() - begin
            print(f"{case.suite}: {case.name}: {said} ({took:.1f} s)", flush=True)
            return said

        try:
            for case in cases:
                if play(case) not in FINE and play(case) not in FINE:
                    wrong += 1
                elif keep:
                    with open(keep, "a") as kept:
                        kept.write(json.dumps([case.name, outcomes[case.name]]) + "\n")
        finally:
            spark.stop()
            broker.stop()
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scenarios whose suite or name has this text")
    parser.add_argument("--every", type=int, default=1, help="one scenario of so many")
    parser.add_argument("--names", nargs="+", help="the scenarios of these names")
    parser.add_argument("--write", action="store_true", help="write docs/spark.md")
    parser.add_argument(
        "--keep", type=Path, help="a file of outcomes: scenarios that it has are not run again"
    )
    chosen = parser.parse_args(argv)
    cases = [c for c in SCENARIOS if chosen.only in f"{c.suite}: {c.name}"][:: chosen.every]
    if chosen.names:
        cases = [c for c in cases if c.name in chosen.names]
        if lost := set(chosen.names) - {c.name for c in cases}:
            parser.error(f"no scenario has the name {', '.join(sorted(lost))}")
    outcomes: dict[str, dict[str, str]] = {}
    if chosen.keep and chosen.keep.exists():
        outcomes = dict(map(json.loads, chosen.keep.read_text().splitlines()))
    left = [c for c in cases if c.name not in outcomes or verdict(c, outcomes[c.name]) not in FINE]
    wrong = play_all(left, outcomes, chosen.keep) if left else 0
    print(f"{len(cases)} scenarios, {wrong} wrong")
    if chosen.write and not wrong and len(cases) == len(SCENARIOS):
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        outcomes = {case.name: outcomes[case.name] for case in cases}
        PAGE.write_text(before + BEGIN + table(outcomes) + END + rest.split(END)[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
