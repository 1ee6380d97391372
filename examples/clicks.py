"""Count clicks by campaign in windows of two seconds, in two processes that share no key.

    python examples/clicks.py

It starts a broker, writes a million clicks, and runs the plan up to the end of the topic.
The last window stays open: no click is later than its end.
"""

from __future__ import annotations

import kdirect
import kdirect.state
import kdirect.workloads
from kdirect.state import AggregatePlan, Tumbling, column


def main() -> None:
    with kdirect.Broker() as broker, kdirect.connect(broker.bootstrap_servers) as session:
        events = kdirect.workloads.ysb(keys=100)
        (stream,) = events.streams.values()
        kdirect.workloads.write(session, stream, "clicks", records=1_000_000, partitions=4)
        plan = AggregatePlan(
            input=stream.input("clicks", where=column("event_type").equals(0)),
            keys="campaign",
            window=Tumbling(size_us="2 seconds"),
            aggregates=["count"],
        )
        with kdirect.state.run(plan, broker.bootstrap_servers, executors=2, until="latest") as job:
            for batch, table in job:
                print(f"batch {batch}: {table.num_rows} windows of a campaign")
                print(table.slice(0, 3).to_pandas())
            print(f"{job.counts['rows']} clicks, {job.counts['sent_bytes']} bytes of deltas")


if __name__ == "__main__":
    main()
