"""Bench rows of workloads: how fast their records are made, and how fast they become columns.

`workload-generate` holds each stream's generator against memcpy of the same bytes.  `slash-decode`
reads the topic of YSB one-sidedly and decodes the columns that its query keeps, with its filter and
event time, and drops them: this is the limit against which `slash-engine` is held.  Beside it stand
the parts of that cost: the READs alone, with the CRC, all rows without the filter, and the way that
it went before, which decodes whole values and gathers their fields by numpy.

CPU time of this process counts, the broker's does not: a broker does nothing while it is READ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rows_direct import broker_process
from sides import Figure, figure

STREAMS = ("ysb", "bid", "person", "auction", "cm", "ro", "zipf")
BLOCK_BYTES = 16 << 20
RECORDS = 2_000_000
TOPIC = "ysb"


def _take_turns(
    seconds: float, quick: bool, functions: dict[str, Callable[[], Any]]
) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall seconds) of each turn of each function, at least three."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, turns.values())) < (1 if quick else 3):
        for name, function in functions.items():
            cpu, wall = time.process_time(), time.perf_counter()
            function()
            turns[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return turns


def workload_generate(seconds: float, quick: bool) -> list[Figure]:
    """Records into warm memory, beside memcpy of as many bytes."""
    from kdirect import workloads

    made = {
        "ysb": workloads.ysb().streams["ysb"],
        **workloads.nexmark().streams,
        "cm": workloads.cm().streams["cm"],
        "ro": workloads.ro().streams["ro"],
        "zipf": workloads.named("zipf").streams["ro"],
    }
    rows: list[Figure] = []
    for name in STREAMS:
        stream = made[name]
        count = (BLOCK_BYTES // 16 if quick else BLOCK_BYTES) // stream.layout.size
        out = np.zeros(count, stream.layout.dtype())
        source, target = out.copy().view(np.uint8), out.copy().view(np.uint8)
        turns = _take_turns(
            seconds / len(STREAMS) * 0.8,
            quick,
            {
                "own": lambda stream=stream, count=count, out=out: stream.records(
                    0, count, out=out
                ),
                "memcpy": lambda source=source, target=target: np.copyto(target, source),
            },
        )
        cpu, copied = (statistics.median(c for c, _ in turns[k]) for k in ("own", "memcpy"))
        nbytes = count * stream.layout.size
        rows.append(
            figure(
                "workload-generate",
                nbytes / cpu / 1e9,
                "GB/s",
                "memcpy of as many bytes",
                nbytes / copied / 1e9,
                stream=name,
                record_bytes=stream.layout.size,
                records_per_s=count / cpu,
                turns=len(turns["own"]),
            )
        )
    return rows


def slash_decode(seconds: float, quick: bool) -> list[Figure]:
    """YSB's topic to columns that are dropped, and what of it the parts cost."""
    import kdirect
    from kdirect import workloads

    count = RECORDS // 20 if quick else RECORDS
    workload = workloads.ysb(keys=1000)
    # One segment: a decoder that wants the last record only would pass over whole files.
    with (
        broker_process(log_segment_bytes=1 << 30) as (servers, _),
        kdirect.connect({"bootstrap.servers": servers, "transport": "shm"}) as session,
    ):
        workloads.write(session, workload.streams["ysb"], TOPIC, records=count)
        ways = _ways(session, workload, count)
        turns = _take_turns(seconds * 0.7, quick, ways)
    cpu = {name: statistics.median(c for c, _ in found) for name, found in turns.items()}
    wall = {name: statistics.median(w for _, w in found) for name, found in turns.items()}
    own = "columns of the query"
    spread = [c for c, _ in turns[own]]
    return [
        figure(
            "slash-decode",
            count / cpu[own] / 1e6,
            "M rows/CPU-s",
            name,
            count / cpu[name] / 1e6,
            records=count,
            record_bytes=78,
            ns_per_row=round(cpu[own] / count * 1e9, 2),
            spread_ns=[round(c / count * 1e9, 2) for c in (min(spread), max(spread))],
            rows_per_s=count / wall[own],
            turns=len(turns[own]),
        )
        for name in ways
        if name != own
    ]


def _ways(session: Any, workload: Any, count: int) -> dict[str, Callable[[], None]]:
    from kdirect.format.codec import ArrowDecoder
    from kdirect.model import TopicPartition
    from kdirect.state.source import TopicSource

    tp = TopicPartition(TOPIC, 0)
    layout = workload.streams["ysb"].layout
    plan = workload.plan(TOPIC)

    def columns(given: Any, names: Any, bring_all: bool) -> None:
        rows = 0
        with TopicSource(session, given, tp, 0, count, columns=names) as source:
            for block in source.blocks():
                rows += block.rows
        if bring_all and rows != count:
            raise RuntimeError(f"{rows} of {count} rows")

    def bytes_only(check_crc: bool) -> None:
        # Every batch but the last ends before the first offset that the decoder wants.
        with session.reader(tp, 0, count) as reader:
            cursor = reader._open(0).cursor
            decoder = ArrowDecoder(
                TOPIC, 0, start_offset=count - 1, stop_offset=count, check_crc=check_crc
            )
            while decoder.next_offset < count:
                cursor.fill_decoder(decoder, 100)

    def gathered() -> None:
        rows = 0
        with session.reader(tp, 0, count, target_rows=1 << 16) as reader:
            for batch in reader:
                values = batch.column("value")
                fields = np.frombuffer(values.buffers()[2], layout.dtype(), count=len(values))
                kept = fields["event_type"] == 0
                fields["campaign"][kept], fields["time"][kept] * 1000
                rows += len(values)
        if rows != count:
            raise RuntimeError(f"{rows} of {count} rows")

    unfiltered = workload.streams["ysb"].input(TOPIC)
    return {
        "columns of the query": lambda: columns(plan.input, plan.columns_kept(), False),
        "READs alone": lambda: bytes_only(False),
        "READs and CRC": lambda: bytes_only(True),
        "three columns of all rows": lambda: columns(unfiltered, ("campaign", "event_type"), True),
        "values, then numpy": gathered,
    }
