"""Sealed segments that stay mapped: the event loop reads them, and gives them back, without a
thread."""

from __future__ import annotations

from kdirect.log import segment as segment_module
from kdirect.log.idle import IdleMappings
from kdirect.log.segment import Segment
from tests.log.test_partition import offsets


def test_a_sealed_segment_is_read_without_a_thread_once_it_was_read(open_partition, batch) -> None:
    """Also from its first offset, for which no index is looked at; and given back without one."""
    p = open_partition()
    for _ in range(3):
        for _ in range(4):
            assert p.append(batch()).error == 0
        p.roll()
    first = p.sources[0].segment
    assert p.read_nowait(0, 1) is None, "nobody has mapped it"
    assert offsets(p.read(0, 1, fault_in=True)) == [0]
    given_back: list[bool] = []

    def release(segment: Segment) -> None:
        given_back.append(segment.release_nowait())

    for offset in (0, 2, 0):
        buffers = p.read_nowait(offset, 1, release=release)
        assert buffers is not None and offsets(buffers) == [offset]
        del buffers
    assert given_back and all(given_back) and first.references == 0
    assert first.unmap_if_idle() and p.read_nowait(0, 1) is None


def test_the_last_reference_is_given_back_at_once_unless_a_file_is_touched(
    open_partition, batch, monkeypatch
) -> None:
    idle = IdleMappings(1)
    monkeypatch.setattr(segment_module, "_idle", idle)
    p = open_partition()
    for _ in range(3):
        assert p.append(batch()).error == 0
        p.roll()
    one, other, deleted = (s.segment.acquire() for s in p.sources[:3])
    for segment in (one, other):
        segment.index_entries()  # they are mapped, too
    assert one.release_nowait() and one.references == 0
    assert one.acquire_nowait() and one.release_nowait()
    assert not other.release_nowait() and other.references == 1, "`one` would be unmapped"
    other.release()
    assert one.acquire_nowait() is False, "it was unmapped"
    assert other.acquire_nowait() and other.release_nowait()
    deleted.delete()
    idle.discard(other)
    assert not deleted.release_nowait() and deleted.references == 1
    deleted.release()
