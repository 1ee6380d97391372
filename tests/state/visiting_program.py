"""A process that visits a planned job for one batch: a program for the tests.

    python visiting_program.py '{"settings": .., "batch": .., "task": .., "start": .., ..}'

Its part of the rows goes to the file `output`; what else it has is printed.  ``"die": [step,
number, mark]`` lets it kill itself at a step, as failing_executor.py does.  An error is printed by
its class.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from kdirect.errors import KdirectError
from kdirect.state.batch_run import Observer, Step
from kdirect.state.executor import ExecutorSettings
from kdirect.state.visitor import visit

sys.path.insert(0, str(Path(__file__).parent))
from failing_executor import KillAt


def main(given: dict[str, Any]) -> int:
    observer = Observer()
    if given.get("die"):
        step, number, mark = given["die"]
        observer = KillAt(Step(step), number, mark, os.getpid(), given["how"])
    settings = ExecutorSettings.from_json(given["settings"])
    try:
        found = visit(
            settings,
            batch=given["batch"],
            task=given["task"],
            start=given["start"],
            observer=observer,
        )
    except KdirectError as e:
        print(json.dumps({"error": type(e).__name__, "message": e.message, "hint": e.hint}))
        return 1
    with pa.ipc.new_file(given["output"], found.rows.schema) as writer:
        for batch in found.rows:
            writer.write_batch(batch)
    print(json.dumps({"executor": found.executor, "counts": dict(found.counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
