"""A model of the paper's cluster with the costs of this machine: what figure 9 would look like.

    make slash-model                      (costs measured on the spot, a few seconds each)
    make slash-model COSTS=costs.json     (costs that were written before, by --write)

Nothing here is a measurement of 2 to 16 nodes, and every line of the table says so.  Measured is
what one core of this machine pays for a record, an entry, a tuple and a byte (`measure`):

    a record: `TopicSource.of_plan` over a topic of a broker, which is how a batch reads; so with
              READs, CRC-32C, the query's filter, its event times and its columns.
    a row, an entry, a tuple: the state of the engine, in blocks of one epoch.
    a byte:   full buffers through a channel over shared memory, each end by itself, by the calls
              that a batch makes; so with the copy, which an RDMA network card would make without
              the core, and with CRC-32C at both ends.

The rest is arithmetic (`slash`, `uppar`): n nodes of 10 cores, one executor a core, one network
card of 11.8 GB/s a node (section 8.1 of the paper), weak scaling, epochs of 64 MB.

    Slash:  a core reads and updates all its records.  At the end of an epoch it sends the keys that
            other executors lead, as entries, or as tuples where an epoch hardly aggregates, and
            merges as much as it sends.
    UpPar:  half of the cores read and partition, and send every record that passes the filter as a
            tuple; the other half aggregate.  The core that leads the hottest key bounds the rate.

The model leaves out: waiting, credits, watermarks, results, memory bandwidth shared by the cores of
a node, and partitioning through software queues, which the paper's UpPar pays for and this one does
not.  So gains here are lower than the paper's by construction.  A figure over the link of this
machine's own cores is what `make bench ROWS=slash-engine` measures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where PYTHONSAFEPATH keeps it out

from rows_direct import broker_process

import kdirect
from kdirect import workloads
from kdirect.format.fixed_layout import FixedLayout
from kdirect.model import TopicPartition
from kdirect.options import ENGINE
from kdirect.rdma import open_device
from kdirect.rdma.channel import ChannelSet
from kdirect.rdma.contract import Memory
from kdirect.state import AggregatePlan, Input, JoinPlan, Session, Tumbling
from kdirect.state.append import AppendState
from kdirect.state.arena import PageMemory, StateMemory
from kdirect.state.backend import Backend
from kdirect.state.source import TopicSource

NODES = (2, 4, 8, 16)
CORES = 10
LINK_BYTES_S = 11.8e9
EPOCH_BYTES = 64e6
ADAPTIVE_RATIO = float(ENGINE.resolve({})["adaptive_ratio"])
ROUNDS = 3
READ_BYTES = 256 << 20  # of a topic that is read: eight times what the caches here hold
READ_ROWS = 8  # times as many records are read as rows are updated, if they fit
SENT_BYTES = 4 << 20  # that buffers are sent from in turn: about what an epoch sends
MINUTE = 60_000_000
MARK = "MODEL"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A query of the paper.  `kept`: records that pass the filter, of all; `hottest`: the share of
    the most frequent key; `paper`: what section 8.2 says of figure 9.  `made`: the records that the
    cost of reading is measured with, and `query` the plan over them that says what is read."""

    name: str
    kept: float
    keys: int
    skew: float  # exponent of the Pareto distribution of keys; 0: uniform
    paper: str
    join: bool = False
    made: Callable[[], workloads.Workload] = workloads.ysb
    query: str = "ysb"


def _nexmark() -> workloads.Workload:
    return workloads.nexmark(paper=True, pareto=1.1)


WORKLOADS = (
    Workload(name="YSB", kept=1 / 3, keys=10_000_000, skew=0,
             paper="up to 12x UpPar, 25x Flink; up to 2 G records/s"),
    Workload(name="CM", kept=1, keys=12_500, skew=1.1, made=workloads.cm, query="cm",
             paper="up to two orders of magnitude over UpPar and Flink"),
    Workload(name="NB7", kept=1, keys=1_000_000, skew=1.1, made=_nexmark, query="nb7",
             paper="up to 22x UpPar, 104x Flink; up to 2 G records/s"),
    Workload(name="NB8", kept=1, keys=1_000_000, skew=0, made=_nexmark, query="nb8",
             paper="up to 8x UpPar, 128x Flink", join=True),
    Workload(name="NB11", kept=1, keys=1_000_000, skew=0, made=_nexmark, query="nb11",
             paper="up to 1.7x UpPar, 40x Flink", join=True),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one core, and bytes, of one workload on this machine."""

    read: float  # a record, out of a topic into the columns of the query
    update: float  # a row that passes the filter, into the state
    merge: float  # an entry of a delta, at its leader
    partition: float  # a row, into the pages of its leader
    apply: float  # a tuple of a page, at its leader
    send_byte: float  # into a channel, the copy included
    receive_byte: float  # out of a channel, until it can be merged
    record_bytes: float  # in the log, as epochs count them
    entry_bytes: float
    tuple_bytes: float


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Records a second of the whole cluster, and what bounds them."""

    records_s: float
    bound: str


def draw_keys(load: Workload, rows: int, seed: int = 1) -> np.ndarray:
    """Keys of so many rows."""
    random = np.random.default_rng(seed)
    if not load.skew:
        return random.integers(0, load.keys, rows)
    return np.minimum(random.pareto(load.skew, rows) * 8, load.keys - 1).astype(np.int64)


def distinct(load: Workload, rows: float) -> float:
    """How many keys so many rows have."""
    if not load.skew:
        return load.keys * -np.expm1(rows * np.log1p(-1 / load.keys))
    sample = int(min(rows, 1_000_000))
    return len(np.unique(draw_keys(load, sample))) * (rows / sample) ** 0.5


def hottest(load: Workload) -> float:
    """The share of the most frequent key."""
    if not load.skew:
        return 1 / load.keys
    return float(np.bincount(draw_keys(load, 1_000_000)).max() / 1_000_000)


def slash(load: Workload, costs: Costs, nodes: int) -> Rate:
    """Records a second of Slash on `nodes` nodes."""
    executors = nodes * CORES
    records = EPOCH_BYTES / costs.record_bytes
    rows = records * load.kept
    away = rows * (executors - 1) / executors
    entries = distinct(load, rows) * (executors - 1) / executors
    own = rows - away
    if load.join or away / entries < ADAPTIVE_RATIO:
        cpu = away * (costs.partition + costs.apply) + own * costs.update
        sent = away * costs.tuple_bytes
    else:
        cpu = rows * costs.update + entries * costs.merge
        sent = entries * costs.entry_bytes
    cpu += records * costs.read + sent * (costs.send_byte + costs.receive_byte)
    return _rate(nodes, records, cpu, sent * (nodes - 1) / nodes * executors / (executors - 1))


def uppar(load: Workload, costs: Costs, nodes: int) -> Rate:
    """Records a second of RDMA UpPar: half of the cores read and partition."""
    half = CORES / 2
    send = costs.read + load.kept * (costs.partition + costs.tuple_bytes * costs.send_byte)
    receive = load.kept * (costs.apply + costs.tuple_bytes * costs.receive_byte)
    bounds = {
        "partitioning": nodes * half / send,
        "aggregating": nodes * half / receive,
        "the network": nodes * LINK_BYTES_S
        / (load.kept * costs.tuple_bytes * (nodes - 1) / nodes),
    }  # fmt: skip
    if hottest(load) > 1 / (nodes * half):
        bounds["the hottest key"] = 1 / (receive * hottest(load))
    bound = min(bounds, key=lambda name: bounds[name])
    return Rate(records_s=bounds[bound], bound=bound)


def _rate(nodes: int, records: float, cpu: float, sent: float) -> Rate:
    """Every core does an epoch of `records` in `cpu` seconds and sends so many bytes to others."""
    network = sent * CORES / LINK_BYTES_S
    bound = "the cores" if cpu >= network else "the network"
    return Rate(records_s=nodes * CORES * records / max(cpu, network), bound=bound)


def lines(costs: dict[str, Costs]) -> list[str]:
    """The table; every line begins with the word that it is a model."""
    out = [
        f"{MARK}: figure 9 of the paper from the costs of one core of this machine; nothing below"
        " was measured on more than one node",
        f"{MARK}: {'query':5} {'nodes':>5} {'Slash M/s':>10} {'UpPar M/s':>10} {'gain':>6}"
        "  bounded by / the paper's figure 9",
    ]
    for load in WORKLOADS:
        for nodes in NODES:
            ours, theirs = (f(load, costs[load.name], nodes) for f in (slash, uppar))
            out.append(
                f"{MARK}: {load.name:5} {nodes:5} {ours.records_s / 1e6:10.0f}"
                f" {theirs.records_s / 1e6:10.0f} {ours.records_s / theirs.records_s:5.1f}x"
                f"  {ours.bound} / {theirs.bound}"
            )
        out.append(f"{MARK}: {load.name:5} the paper, measured on its cluster: {load.paper}")
    return out


# -- costs of this machine -------------------------------------------------------------------------


class _Chunk:
    def __init__(self, length: int) -> None:
        self.words = np.zeros(length // 8, np.uint64)
        self.address, self.length = self.words.ctypes.data, length


def _pages() -> PageMemory:
    return PageMemory(_Chunk, 1 << 16, 64, 1 << 30)


def _least(rounds: int, turn: Any) -> float:
    """The least CPU time of some rounds of `turn`, which returns the seconds of one."""
    return min(turn() for _ in range(rounds))


def _cpu(call: Any) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


@dataclass(frozen=True, kw_only=True)
class Read:
    """What a record costs to read, in CPU seconds and in bytes of the log."""

    seconds: float
    record_bytes: float


@contextlib.contextmanager
def broker() -> Iterator[kdirect.Session]:
    """A broker in a process of its own, and a session that READs it over shared memory."""
    with (
        broker_process() as (servers, _),
        kdirect.connect({"bootstrap.servers": servers, "transport": "shm"}) as session,
    ):
        yield session


def write_topics(session: kdirect.Session, load: Workload, rows: int) -> AggregatePlan | JoinPlan:
    """A topic for each input of the query, of about `READ_ROWS` times so many records in all, in
    the mixture of its streams; the plan that reads them."""
    made = load.made()
    topics = {name: f"{load.name}-{name}" for name in made.streams}
    plan = made.plan(topics, load.query)
    streams = [made.streams[given.name] for given in plan.inputs]
    each = sum(s.mixture[0] * s.layout.size for s in streams) / sum(s.mixture[0] for s in streams)
    records = min(rows * READ_ROWS, int(READ_BYTES / each))
    events = records * streams[0].mixture[2] // sum(s.mixture[0] for s in streams)
    for stream in streams:
        workloads.write(session, stream, topics[stream.name], records=stream.among(events))
    return plan


def read_topic(
    session: kdirect.Session, plan: AggregatePlan | JoinPlan, side: int
) -> tuple[int, int]:
    """Read one input of a plan as a batch of a job does, and drop it: records, and their bytes."""
    tp = TopicPartition(plan.inputs[side].topic, 0)
    end = session.latest_offsets([tp])[tp]
    records = size = 0
    with TopicSource.of_plan(
        session, plan, side, tp, 0, end, now_us=time.time_ns() // 1000
    ) as source:
        for block in source.blocks():
            records += block.records
            size += block.input_bytes
    if records != end or source.transport != "shm":
        raise RuntimeError(f"{records} of {end} records of {tp} were read by {source.transport}")
    return records, size


def _read_costs(session: kdirect.Session, load: Workload, rows: int) -> Read:
    plan = write_topics(session, load, rows)
    records = size = 0
    seconds = 0.0
    for side, given in enumerate(plan.inputs):
        read = partial(read_topic, session, plan, side)
        seconds += _least(ROUNDS + 1, partial(_cpu, read))
        found = read_topic(session, plan, side)
        records, size = records + found[0], size + found[1]
        session.admin.delete_topic(given.topic)
    return Read(seconds=seconds / records, record_bytes=size / records)


def channel_costs(turns: int = 64) -> tuple[float, float]:
    """CPU seconds of the sender, and of the receiver, for a byte of full buffers through a channel.
    The sender fills all slots, then the receiver empties them, so that neither waits.  Both ends
    are in this thread: what it costs to move cache lines to another core is left out, as an RDMA
    network card writes into the receiver's memory by itself."""
    memory = Memory.anonymous(SENT_BYTES)
    memoryview(memory)[:] = bytes(range(256)) * (SENT_BYTES // 256)
    channels = ChannelSet(open_device("shm"), most=2)
    source = channels.register(memory)
    sender, receiver = channels.sender("itself"), channels.receiver("itself")
    receiver.connect(sender.offer)
    sender.connect(receiver.offer)
    pages = SENT_BYTES // sender.slot_bytes

    def fill(turn: int) -> None:
        sender.refresh()
        for i in range(turn * sender.slots, (turn + 1) * sender.slots):
            position = i % pages * sender.slot_bytes
            if not sender.send_from(source, position, sender.payload_bytes, kind=1):
                raise RuntimeError("there is no room in the channel")

    def drain() -> None:
        for _ in range(receiver.slots):
            if not receiver.poll():
                raise RuntimeError("a buffer that was sent is not there")
            receiver.release()
        channels.wait(0)  # returns the credits that are due

    best: tuple[float, float] | None = None
    for number in range(ROUNDS + 1):
        spent = [0.0, 0.0]
        for turn in range(number * turns, (number + 1) * turns):
            spent[0] += _cpu(partial(fill, turn))
            spent[1] += _cpu(drain)
        if best is None or sum(spent) < sum(best):
            best = spent[0], spent[1]
    channels.close()
    assert best is not None
    size = turns * sender.slots * sender.payload_bytes
    return best[0] / size, best[1] / size


def _aggregate(load: Workload, owner: int, mode: str, memory: StateMemory) -> Backend:
    plan = AggregatePlan(
        input=Input(topic="t", value_format="fixed", time="at",
                    layout=FixedLayout.of("k:int64", "at:int64", "x:float64")),
        keys=("k",),
        window=Tumbling(size_us=10 * MINUTE),
        aggregates={"CM": (("avg", "x"),), "NB7": (("max", "x"),)}.get(load.name, ("count",)),
    )  # fmt: skip
    return Backend(plan, executor=0 if mode != "lead" else 1, executors=2, owners=[owner] * 256,
                   memory=memory, pages=_pages(), mode="uppar" if mode == "uppar" else "slash",
                   adaptive_ratio=0)  # fmt: skip


def _aggregate_costs(load: Workload, rows: int) -> dict[str, float]:
    keys = draw_keys(load, rows)
    columns = {"k": pa.array(keys), "x": pa.array(np.ones(rows))}
    times = np.zeros(rows, np.int64)
    memory = StateMemory.anonymous(1 << 30)
    own = _aggregate(load, 0, "slash", memory)
    timed: dict[str, list[float]] = {n: [] for n in ("update", "entries", "tuples", "part")}
    sizes: dict[str, float] = {}
    helpers = {name: _aggregate(load, 1, mode, StateMemory.anonymous(1 << 30))
               for name, mode in (("entries", "slash"), ("tuples", "uppar"))}  # fmt: skip
    for _ in range(ROUNDS):
        timed["update"].append(_cpu(lambda: own.update(columns, rows, time_us=times)) / rows)
        for name, helper in helpers.items():
            spent = _cpu(partial(helper.update, columns, rows, time_us=times))
            if name == "tuples":
                timed["part"].append(spent / rows)
            delta = helper.flush(1)
            leader = _aggregate(load, 1, "lead", memory)
            count = delta.entries + delta.tuples
            sizes[name] = sum(p.length for p in delta.pages) / count
            timed[name].append(_cpu(partial(_merge_all, leader, delta)) / count)
            helper.release(delta.pages)
            leader.clear()
    return {
        "update": min(timed["update"]),
        "merge": min(timed["entries"]),
        "partition": min(timed["part"]),
        "apply": min(timed["tuples"]),
        "entry_bytes": sizes["entries"],
        "tuple_bytes": sizes["tuples"],
    }


def _join_costs(load: Workload, rows: int) -> dict[str, float]:
    window = Session(gap_us=MINUTE) if load.name == "NB11" else Tumbling(size_us=720 * MINUTE)
    layouts = [FixedLayout.of(f"k{i}:int64", f"at{i}:int64", f"v{i}:int64") for i in range(2)]
    plan = JoinPlan(
        left=Input(topic="l", layout=layouts[0], time="at0", value_format="fixed"),
        right=Input(topic="r", layout=layouts[1], time="at1", value_format="fixed"),
        left_keys=("k0",), right_keys=("k1",), window=window,
        columns=((0, "k0", "k"), (0, "v0", "v"), (1, "v1", "w")),
    )  # fmt: skip
    keys = draw_keys(load, rows)
    sides = [slice(0, rows // 5), slice(rows // 5, rows)]
    blocks = [{f"{c}{i}": pa.array(keys[part]) for c in ("k", "at", "v")}
              for i, part in enumerate(sides)]  # fmt: skip
    times = [np.zeros(len(b[f"k{i}"]), np.int64) for i, b in enumerate(blocks)]
    memory = StateMemory.anonymous(1 << 30)

    def state(executor: int, owner: int) -> AppendState:
        return AppendState(plan, memory, _pages(), executor=executor, executors=2,
                           owners=[owner] * 256)  # fmt: skip

    def update(into: AppendState) -> None:
        for side, block in enumerate(blocks):
            into.update(block, times[side], side)

    def emit(from_: AppendState) -> float:
        return _cpu(lambda: [None for _ in from_.trigger(1 << 50)])

    best: dict[str, float] = {}
    size = 0.0
    for _ in range(ROUNDS):
        own, helper, leader = state(0, 0), state(0, 1), state(1, 1)
        spent = {"update": _cpu(partial(update, own))}
        spent["update"] += emit(own)
        spent["partition"] = _cpu(partial(update, helper))
        delta = helper.flush(1)
        size = sum(used for _, used in delta.pages) / rows
        pages = [_view(*page) for page in delta.pages]
        spent["apply"] = _cpu(partial(_merge_views, leader, pages)) + emit(leader)
        for name, seconds in spent.items():
            best[name] = min(best.get(name, seconds), seconds)
        leader.clear()
        own.clear()
    each = {name: seconds / rows for name, seconds in best.items()}
    return {**each, "merge": each["apply"], "entry_bytes": size, "tuple_bytes": size}


def _merge_all(leader: Backend, delta: Any) -> None:
    for page in delta.pages:
        leader.merge(0, page.address, page.length)


def _merge_views(leader: AppendState, pages: list[bytes]) -> None:
    for page in pages:
        leader.merge(0, page)


def _view(address: int, length: int) -> bytes:
    import ctypes

    return ctypes.string_at(address, length)


def measure(rows: int = 1 << 19) -> dict[str, Costs]:
    """What each workload costs on this machine, from `rows` rows at a time."""
    send_byte, receive_byte = channel_costs()
    found = {}
    with broker() as session:
        for load in WORKLOADS:
            read = _read_costs(session, load, rows)
            found[load.name] = Costs(
                read=read.seconds,
                record_bytes=read.record_bytes,
                send_byte=send_byte,
                receive_byte=receive_byte,
                **(_join_costs if load.join else _aggregate_costs)(load, rows),
            )
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", help="a file that --write has made; without it: measure")
    parser.add_argument("--write", help="where the costs are written")
    parser.add_argument("--rows", type=int, default=1 << 19, help="rows a measurement takes")
    given = parser.parse_args(argv)
    if given.costs:
        read = json.loads(Path(given.costs).read_text())
        costs = {name: Costs(**values) for name, values in read.items()}
    else:
        costs = measure(given.rows)
    if given.write:
        written = {name: vars(c) for name, c in costs.items()}
        Path(given.write).write_text(json.dumps(written, indent=1))
    for name, c in costs.items():
        sys.stdout.write(
            f"{MARK}: input measured here: {name} read {c.read * 1e9:.1f}, update"
            f" {c.update * 1e9:.1f}, merge {c.merge * 1e9:.1f}, partition {c.partition * 1e9:.1f},"
            f" apply {c.apply * 1e9:.1f} ns; a byte sent {c.send_byte * 1e9:.3f}, received"
            f" {c.receive_byte * 1e9:.3f} ns; {c.record_bytes:.0f} B a record,"
            f" {c.entry_bytes:.0f} B an entry, {c.tuple_bytes:.0f} B a tuple\n"
        )
    sys.stdout.write("\n".join(lines(costs)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
