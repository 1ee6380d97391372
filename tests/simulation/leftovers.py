"""What a broker may not keep of clients that are gone."""

from __future__ import annotations

from harness import TP, Simulation


def check_nothing_left(simulation: Simulation) -> None:
    """Once every client is gone the broker has neither a grant nor a head of theirs: no key, no
    file id, and the partition is free."""
    access = simulation.access
    for actor in simulation.actors:
        for control in actor.controls:
            access.loop.soon(access.connection_closed, control)
    simulation.network.run_for(100_000_000)
    left = {
        name: count
        for name, count in access.statistics().items()
        if name in ("rdma_grants", "rdma_produce_grants", "rdma_produce_heads", "rdma_peers")
        and count
    }
    assert not left, f"all clients are gone, but there are {left}"
    assert not access.produce.heads
    assert access.appends.is_free(TP), "nobody writes the partition, but it is held"
