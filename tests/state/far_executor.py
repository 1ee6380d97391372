"""An executor as on another host, or one that is slow: a program for the tests.

python far_executor.py far        does not see the directory of the job
python far_executor.py far-busy   neither; it is time to say that it goes on after each step
python far_executor.py elsewhere  is on another host
python far_executor.py slow       takes 80 ms for each block that it reads
python far_executor.py slow-part  takes 3 s for its part of a snapshot, 250 ms for each piece
python far_executor.py slow-check  does so when it checks a part, before it restores it
"""

from __future__ import annotations

import itertools
import sys
import time

from kdirect.state import exchange, heartbeat, part_transfer, snapshots
from kdirect.state.batch_run import Observer, Step
from kdirect.state.executor import main


class Slow(Observer):
    def at(self, step: Step, batch: int) -> None:
        if step is Step.READ:
            time.sleep(0.08)


if __name__ == "__main__":
    how = sys.argv[1]
    if how.startswith("far"):
        part_transfer.sees = lambda root, mark: False
    if how == "far-busy":
        part_transfer.FRAME_BYTES = 256
        heartbeat.Heart.wait = lambda self: self._say(self.steps) or True
    if how in ("slow-part", "slow-check"):
        snapshots.WRITE_BYTES = snapshots.READ_BYTES = 256
        crc = snapshots.crc32c
        left = itertools.repeat(0.25, 12)

        def slowly(piece: memoryview, before: int) -> int:
            time.sleep(next(left, 0))
            return crc(piece, before)

        snapshots.crc32c = slowly
    if how == "elsewhere":
        exchange.place = lambda: (b"another host 123", 1)
    sys.exit(main(Slow() if how == "slow" else None))
