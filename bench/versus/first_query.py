"""One Spark session, whose first query is an AvailableNow stream: prints its seconds, from load()
to its end.

    python first_query.py FORMAT ADDRESS TOPIC RECORDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(name: str, address: str, topic: str, records: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # PYTHONSAFEPATH keeps it out
    from versus import rows_spark

    spark = rows_spark.session()
    begin = time.perf_counter()
    frame = (
        spark.readStream.format(name)
        .option("kafka.bootstrap.servers", address)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    rows_spark.run_to_end(frame, int(records))
    print(time.perf_counter() - begin)
    rows_spark.systems.stop_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
