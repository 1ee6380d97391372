"""The files of a sealed segment, as the log leaves them, make a sound object."""

from __future__ import annotations

import itertools
import random
import struct
import time
import uuid

import pytest

from kdirect.format.batch import crc32c
from kdirect.format.object_check import check_object
from kdirect.format.segment_files import pack_leader_epochs
from kdirect.format.segment_object import (
    Section,
    SegmentFacts,
    SegmentIdentity,
    pack_tail,
    parse_tail,
)

NOW = int(time.time() * 1000)


@pytest.mark.parametrize("interval", [0, 1000, 4096])
def test_every_sealed_segment_is_a_sound_object(open_partition, batch, seed, interval) -> None:
    rng = random.Random(seed)
    p = open_partition(segment_bytes=64 << 10, index_interval_bytes=interval)
    for _ in range(900):
        times = [NOW + rng.randrange(-5000, 5000) for _ in range(rng.randrange(1, 5))]
        data = batch(len(times), value_bytes=rng.randrange(300), timestamps=times)
        assert p.append(data).error == 0
    logs = sorted(p.directory.glob("*.log"))
    assert len(logs) > 3
    for path, after in itertools.pairwise(logs):
        base, end = int(path.stem), int(after.stem)
        log = path.read_bytes()
        parts = {
            Section.OFFSET_INDEX: path.with_suffix(".index").read_bytes(),
            Section.TIME_INDEX: path.with_suffix(".timeindex").read_bytes(),
            Section.PRODUCERS: (p.directory / f"{after.stem}.snapshot").read_bytes(),
            Section.LEADER_EPOCHS: pack_leader_epochs([(0, base)]),
        }
        facts = SegmentFacts(
            identity=SegmentIdentity(
                cluster_id="c",
                topic="t",
                topic_id=uuid.uuid4(),
                partition=0,
                segment_id=uuid.uuid4(),
            ),
            base_offset=base,
            end_offset=end,
            log_bytes=len(log),
            max_timestamp_ms=max(
                t for t, _ in struct.iter_unpack(">qI", parts[Section.TIME_INDEX])
            ),
            min_timestamp_ms=-1,
            broker_id=0,
            leader_epoch=0,
        )
        data = log + pack_tail(facts, crc32c(log), parts)
        assert list(check_object(lambda at, n, d=data: d[at : at + n], len(data))) == []
        _, sections = parse_tail(data, len(data))
        assert sections == {
            Section.LOG: log,
            Section.TRANSACTION_INDEX: b"",
            Section.TOPIC: b"",
            **parts,
        }
        # An entry of an index that was moved is found.
        at = rng.randrange(len(parts[Section.OFFSET_INDEX]) // 8) * 8 + 7
        moved = bytearray(parts[Section.OFFSET_INDEX])
        moved[at] ^= 1
        parts[Section.OFFSET_INDEX] = bytes(moved)
        data = log + pack_tail(facts, crc32c(log), parts)
        (found, *_) = check_object(lambda at, n, d=data: d[at : at + n], len(data))
        assert found.section is Section.OFFSET_INDEX
