"""The model of the paper's cluster: every line says what it is, its arithmetic holds, and what it
takes for reading a record and for sending a byte is what a batch of the engine does."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kdirect
from kdirect.options import ENGINE
from kdirect.state import leader, source
from kdirect.state.batch_run import BatchRun, Observer, Tools
from kdirect.state.batches import Partition, Range
from kdirect.state.messages import StartBatch
from kdirect.state.plan import VPARTS, Plan
from kdirect.state.source import Block
from kdirect.state.windows import TIME_MIN

HERE = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slash_model", HERE / "bench/slash_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slash_model"] = module
    spec.loader.exec_module(module)
    return module


model = load()
COSTS = model.Costs(read=1e-9, update=10e-9, merge=20e-9, partition=10e-9, apply=10e-9,
                    send_byte=0, receive_byte=0, record_bytes=64, entry_bytes=24,
                    tuple_bytes=24)  # fmt: skip
FEW = model.Workload(name="few", kept=1, keys=1000, skew=0, paper="nothing")


def test_every_line_says_that_it_is_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    assert model.main(["--rows", "4096", "--write", str(path)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert model.main(["--costs", str(path)]) == 0
    again = capsys.readouterr().out.splitlines()
    assert first == again
    assert len(again) == 5 + 2 + 5 * 5
    assert all(line.startswith("MODEL: ") for line in again)
    assert {"YSB", "CM", "NB7", "NB8", "NB11"} == set(json.loads(path.read_text()))


def test_slash_is_bounded_by_its_cores_where_an_epoch_aggregates() -> None:
    two, sixteen = (model.slash(FEW, COSTS, n) for n in (2, 16))
    assert two.bound == sixteen.bound == "the cores"
    # 11 ns a record on 20 cores, and hardly any entries.
    assert two.records_s == pytest.approx(20 / 11e-9, rel=0.02)
    assert sixteen.records_s == pytest.approx(8 * two.records_s, rel=0.02)


def test_half_of_the_cores_partition_in_uppar() -> None:
    rate = model.uppar(FEW, replace(COSTS, apply=1e-9), 2)
    assert rate.bound == "partitioning"
    assert rate.records_s == pytest.approx(10 / 11e-9)


def test_the_hottest_key_bounds_uppar_and_not_slash() -> None:
    hot = replace(FEW, skew=1.1, keys=1_000_000)
    assert model.uppar(hot, COSTS, 16).bound == "the hottest key"
    assert model.slash(hot, COSTS, 16).records_s > 5 * model.uppar(hot, COSTS, 16).records_s


def test_tuples_are_sent_where_an_epoch_hardly_aggregates() -> None:
    many = replace(FEW, keys=1 << 40)
    costs = replace(COSTS, entry_bytes=1e9, merge=1)
    assert model.slash(many, costs, 4).records_s == model.slash(many, COSTS, 4).records_s


def test_the_network_bounds_what_is_sent() -> None:
    many = replace(FEW, keys=1 << 40)
    rate = model.slash(many, replace(COSTS, tuple_bytes=1000), 2)
    assert rate.bound == "the network"
    assert rate.records_s == pytest.approx(2 * 11.8e9 / (1000 / 2), rel=0.01)


def test_a_byte_costs_both_ends_in_both_systems() -> None:
    many = replace(FEW, keys=1 << 40)
    dear = replace(COSTS, send_byte=2e-9, receive_byte=1e-9, apply=1e-12)
    # Of 21 ns a record, 39 in 40 leave: 24 bytes of 3 ns more each.
    expected = 40 / (1e-9 + 39 / 40 * (10e-9 + 24 * 3e-9) + 10e-9 / 40)
    assert model.slash(many, dear, 4).records_s == pytest.approx(expected, rel=0.01)
    uppar = model.uppar(many, dear, 4)
    assert (uppar.bound, uppar.records_s) == ("partitioning", pytest.approx(20 / 59e-9))
    slow = model.uppar(many, replace(dear, receive_byte=10e-9), 4)
    assert (slow.bound, slow.records_s) == ("aggregating", pytest.approx(20 / 240e-9, rel=0.01))


class Given:
    """In place of an executor's state: what a batch gives it."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []

    def begin_batch(self, start: StartBatch) -> None:
        """Nothing to prepare."""

    def update(self, block: Block, side: int) -> int:
        self.blocks.append(described(block, side))
        return 0

    def keys(self) -> int:
        return 0

    def trigger(self, closes: int) -> tuple[Any, ...]:
        return ()


def described(block: Block, side: int) -> tuple[Any, ...]:
    return side, block.next_offset, block.rows, block.records, block.input_bytes, *block.columns


def run_batch(plan: Plan, session: Any, ends: Mapping[Partition, int]) -> list[Any]:
    """The blocks that a batch of a job with one executor gives to its state."""
    state: Any = Given()
    start = StartBatch(
        attempt=1, batch=0, ranges={tp: Range(0, end) for tp, end in ends.items()},
        clock=dict.fromkeys(ends, TIME_MIN), idle=frozenset(), closed_before=TIME_MIN,
        now_us=time.time_ns() // 1000,
    )  # fmt: skip
    alone: Any = SimpleNamespace(senders={}, receivers={}, sources=[], wait=lambda ms: None)
    tools = Tools(
        plan=plan, readers=1, state=state, exchange=alone, session=session,
        observer=Observer(), look=lambda: None, stepped=lambda: None, idle_wait_ms=1,
        mark=lambda phase, result: None, epoch_bytes=64 << 20,
        block_rows=ENGINE.resolve({})["block_rows"], leading=leader.begin(0, 1, ((0, VPARTS),)),
    )  # fmt: skip
    BatchRun(start, tools).run()
    return state.blocks


@pytest.mark.parametrize("name", [load.name for load in model.WORKLOADS])
def test_the_cost_of_reading_is_that_of_what_a_batch_does(
    name: str, broker_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of an executor and the model make the same decoders, which check the CRC and have the
    same columns, filter and times, and get the same blocks of them."""
    decoders: list[Any] = []
    blocks: list[Any] = []

    class Decoder(source.FixedDecoder):  # type: ignore[misc]
        def __init__(self, *given: Any, **settings: Any) -> None:
            # The only thing that is not the same is the clock on the wall.
            decoders.append((given, {**settings, "latest_us": None}))
            super().__init__(*given, **settings)

    class Source(source.TopicSource):
        def blocks(self) -> Iterator[Block]:
            for block in super().blocks():
                blocks.append(described(block, topics.index(self.tp.topic)))
                yield block

    monkeypatch.setattr(source, "FixedDecoder", Decoder)
    monkeypatch.setattr(model, "TopicSource", Source)
    [load] = [load for load in model.WORKLOADS if load.name == name]
    settings = {"bootstrap.servers": broker_process().bootstrap_servers, "transport": "shm"}
    with kdirect.connect(settings) as session:
        plan = model.write_topics(session, load, 25_000)
        topics = [given.topic for given in plan.inputs]
        ends = {}
        for side, given in enumerate(plan.inputs):
            records, size = model.read_topic(session, plan, side)
            assert size > records * given.layout.size  # as in the log, with what is around values
            ends[Partition(given.topic, 0)] = records
        assert sum(ends.values()) > 2 * ENGINE.resolve({})["block_rows"]
        of_model = decoders.copy()
        decoders.clear()
        of_batch = run_batch(plan, session, ends)
    assert sorted(of_model, key=str) == sorted(decoders, key=str)
    assert len(decoders) == len(topics)
    assert all(settings.get("check_crc", True) for _, settings in decoders)
    assert sorted(blocks) == sorted(of_batch)


def test_the_cost_of_a_byte_is_of_full_buffers_through_a_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[Any] = []

    class Kept(model.ChannelSet):  # type: ignore[misc]
        def sender(self, peer: str) -> Any:
            ends.append(super().sender(peer))
            return ends[-1]

        def receiver(self, peer: str) -> Any:
            ends.append(super().receiver(peer))
            return ends[-1]

    monkeypatch.setattr(model, "ChannelSet", Kept)
    send, receive = model.channel_costs(turns=2)
    assert send > 0 and receive > 0
    sender, receiver = ends
    # As jobs have them by default: slots, bytes of a slot; every buffer is full and one WRITE.
    options = ENGINE.resolve({})
    assert (sender.slots, sender.slot_bytes) == (options["slots"], options["slot_bytes"])
    buffers = (model.ROUNDS + 1) * 2 * sender.slots
    assert sender.sent == receiver.received == buffers
    assert sender.bytes_sent == receiver.bytes_received == buffers * sender.payload_bytes
