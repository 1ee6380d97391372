"""Nobody runs Python code while a kernel's mutex is held: what the collector calls may take it."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: what stands for ever there holds the GIL.  The collector, which runs at
# every other object that is made, and everything that the kernel is given, look at the kernel.
LOOK_AT_EVERY_OBJECT = """
import gc
from kdirect.log.kernel import CommitKernel
from kdirect.log.kernel_producers import known_producers, set_producers
from kdirect.log.kernel_transactions import (
    aborted_index, aborted_transactions, first_unstable_segment, load_aborted_index,
    restore_transactions, settle_transactions, unstable_transactions)
from kdirect.log.producers import ProducerEntry
from kdirect.log.views import SealedSegment

kernel = CommitKernel(log_end_offset=1000)

class Looking(tuple):
    def __iter__(self):
        kernel.view()
        return super().__iter__()

looks = 0
def look(phase, info):
    global looks
    looks += 1
    kernel.view()

gc.callbacks.append(look)
gc.set_threshold(1)
set_producers(kernel, (ProducerEntry(i, 0, 0, 0, -1, ((0, 0, i, i),)) for i in range(50)))
load_aborted_index(kernel, (Looking((i, 2 * i, 2 * i + 1, 2 * i + 2)) for i in range(50)))
restore_transactions(kernel, 400, [Looking((7, 500, 0, 10)), Looking((8, 501, 0, 20))])
settle_transactions(kernel, (SealedSegment(0, 100, 900) for _ in range(1)))
gc.set_threshold(1)
before = looks
found = [unstable_transactions(kernel), aborted_transactions(kernel, 10, 30),
         aborted_index(kernel, 0, 400), known_producers(kernel)[0]]
assert looks > before + 10, looks - before
gc.set_threshold(0)
print([len(x) for x in found], first_unstable_segment(kernel), found[1][0].first_offset)
"""


def test_python_code_runs_outside_of_the_mutex() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT_EVERY_OBJECT],
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[0] == "[2, 10, 50, 50] 0 10"
