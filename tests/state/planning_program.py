"""A process that plans batches, and waits to be killed: a program for the tests.

It takes JSON from its command line, and says where its job listens.  Its visitors are started by
the test.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from kdirect.state.batches import ranges_from_json
from kdirect.state.plan import plan_from_json
from kdirect.state.planned_stream import PlannedJob


def main(given: dict[str, Any]) -> None:
    job = PlannedJob(
        plan_from_json(given["plan"]),
        given["source"],
        executors=given["executors"],
        directory=given["directory"],
        options=given["options"],
    )
    job.plan(given["batch"], ranges_from_json(given["ranges"]), ranges_from_json(given["ends"]))
    print(job.settings.to_json(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
