"""Holds the client's one-sided READs, and channels, against perftest's READs and WRITEs over the
same RDMA device, with the harness of bench/run.py.

make bench-rdma JSON=out.json      (in a guest with soft-RoCE: only the ratios mean something there)
python bench/verbs.py              (on a host with an RDMA device, pyverbs and perftest)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where PYTHONSAFEPATH keeps it out

from catalogue import Row
from run import main

ROWS = (
    Row(
        "verbs-read",
        "rows_verbs",
        2,
        "data READs of 64 KiB against ib_read_bw, READs of a slot against ib_read_lat;"
        " the broker is stopped",
    ),
    Row(
        "channel-verbs",
        "rows_channel",
        2,
        "buffers of 64 KiB through a channel against ib_write_bw; WRITEs are counted",
    ),
)

if __name__ == "__main__":
    sys.exit(main(None, ROWS, Path(__file__).resolve()))
