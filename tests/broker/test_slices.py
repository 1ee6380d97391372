"""What many rings of one link share: registered memory, and the queue of their completions."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from kdirect.broker.engine import Engine
from kdirect.broker.slices import REST_S, WHOLE_BYTES, Slices
from kdirect.rdma.contract import Access
from kdirect.rdma.sim import SimNetwork

WRITTEN = Access.LOCAL_WRITE | Access.REMOTE_WRITE


class Domain:
    """Counts what is registered."""

    def __init__(self) -> None:
        self.real = SimNetwork(1).device("a").alloc_pd()
        self.regions: list[Any] = []

    def register(self, memory: Any, access: int) -> Any:
        self.regions.append(self.real.register(memory, access))
        return self.regions[-1]


def test_a_thousand_slots_are_one_region() -> None:
    domain = Domain()
    slices = Slices(domain)
    slots = [slices.take(64, WRITTEN, "slots") for _ in range(WHOLE_BYTES // 64)]
    assert len(domain.regions) == 1
    whole = domain.regions[0]
    taken = sorted((s.address, s.address + s.length) for s in slots)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert whole.address <= taken[0][0] and taken[-1][1] <= whole.address + whole.length
    assert {(s.rkey, s.lkey) for s in slots} == {(whole.rkey, whole.lkey)}
    slices.take(64, WRITTEN, "slots")
    slices.take(64, Access.LOCAL_WRITE, "images")  # no peer may write that
    assert len(domain.regions) == 3
    assert len(memoryview(slices.take(2 * WHOLE_BYTES, WRITTEN, "large").memory)) >= 2 * WHOLE_BYTES


def test_a_slice_rests_before_it_is_used_again() -> None:
    now = [0.0]
    slices = Slices(Domain(), lambda: now[0])
    used = slices.take(100, WRITTEN, "acks")
    start = used.address - used.memory.address
    memoryview(used.memory)[start : start + 4] = b"late"
    used.give_back()
    assert slices.take(100, WRITTEN, "acks").address != used.address
    now[0] = REST_S
    assert slices.take(100, Access.LOCAL_WRITE, "images").address != used.address
    again = slices.take(100, WRITTEN, "acks")
    assert again.address == used.address
    assert bytes(memoryview(again.memory)[start : start + 128]) == bytes(128)


def test_links_that_open_together_share_one_queue() -> None:
    """The produce worker polls one; a link with another would never be taken."""
    made: list[Any] = []
    waiting = threading.Barrier(2)
    device = SimNetwork(1).device("a")

    class Device:
        def create_cq(self, depth: int) -> Any:
            made.append(device.create_cq(depth))
            if len(made) > 2:  # of links
                try:
                    waiting.wait(0.2)
                except threading.BrokenBarrierError:
                    pass
            return made[-1]

    nothing: Any = lambda *arguments: None  # noqa: E731
    engine = Engine(
        "sim",
        Device(),
        spin_us=0,
        on_cut=nothing,
        on_append=nothing,
        on_head=nothing,
        on_broker_requests=nothing,
        sync=nothing,
    )
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(engine.link_cq)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] and len(made) == 3
