"""One flipped bit in a segment, seen by Spark: the query fails and says where, whatever
failOnDataLoss says, or has every row.

`KDIRECT_SPARK_FLIPS=n` flips n bits drawn by the seed in place of a few.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from kdirect.format.batch import iterate_batches

pytestmark = pytest.mark.spark

SAMPLE = int(os.environ.get("KDIRECT_SPARK_FLIPS", "6"))
ROWS = 1000
BASE_OFFSET, BATCH_LENGTH, LEADER_EPOCH, MAGIC = 0, 8, 12, 16


@pytest.fixture
def filled(broker, topics):
    """(topic, path of its one segment, headers of its batches of 40 records)."""
    for _ in range(5):  # a producer that is interrupted cuts its batches elsewhere
        name = topics.create()
        topics.fill(
            name, [b"%d" % i for i in range(ROWS)], **{"batch.num.messages": 40, "linger.ms": 1000}
        )
        path = broker.log_dir / f"{name}-0" / f"{0:020d}.log"
        batches = list(iterate_batches(path.read_bytes()[: 1 << 20].rstrip(b"\0") + bytes(8)))
        if [b.base_offset for b in batches] == list(range(0, ROWS, 40)):
            break
    else:
        pytest.fail("no topic got batches of 40 records")
    return name, path, batches


@contextlib.contextmanager
def flipped(path, position, bit):
    """In the pages that the broker has mapped."""

    def flip():
        with open(path, "r+b", buffering=0) as f:
            byte = os.pread(f.fileno(), 1, position)[0]
            os.pwrite(f.fileno(), bytes([byte ^ 1 << bit]), position)

    flip()
    try:
        yield
    finally:
        flip()


def offsets(frame):
    return sorted(row.offset for row in frame.select("offset").collect())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("loss", ["true", "false"])
def test_a_batch_that_says_it_lies_elsewhere_fails_the_query(
    read, filled, refused, transport, loss
):
    """320 of 1,000 rows once were the answer."""
    name, path, batches = filled
    position = batches[8].position
    with (
        flipped(path, position + BASE_OFFSET, 6),  # base offset 320 becomes 2**62 + 320
        refused(
            "Corrupt",
            "offset 320",
            "restore the segment",
            *([f"position {position} of the segment"] if transport == "shm" else []),
        ),
    ):
        found = offsets(read(name, transport=transport, failOnDataLoss=loss))
        pytest.fail(f"{len(found)} rows were returned")
    assert offsets(read(name, transport=transport)) == list(range(ROWS))


def test_a_stream_over_a_damaged_batch_fails_and_hands_on_what_was_before(
    read_stream, filled, refused, tmp_path
):
    name, path, batches = filled
    seen: list[int] = []
    with flipped(path, batches[8].position + BASE_OFFSET, 6), refused("Corrupt", "offset 320"):
        query = (
            read_stream(name, startingOffsets="earliest", maxOffsetsPerTrigger=100)
            .writeStream.foreachBatch(lambda frame, _: seen.extend(offsets(frame)))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
    assert sorted(seen) == list(range(300)), "micro-batches before the damaged one, no more"


def test_a_flipped_bit_is_an_error_or_changes_nothing(read, filled, seed):
    name, path, batches = filled
    rng = random.Random(seed)
    for i in range(SAMPLE):
        batch = rng.choice(batches)
        at = rng.choice(
            [
                BASE_OFFSET + rng.randrange(8),
                BATCH_LENGTH + rng.randrange(4),
                LEADER_EPOCH + rng.randrange(4),
                MAGIC,
            ]
        )
        position, bit = (
            batch.position + (at if i % 3 else rng.randrange(batch.size)),
            rng.randrange(8),
        )
        where = (
            f"byte {position - batch.position} bit {bit} of the batch at offset {batch.base_offset}"
        )
        with flipped(path, position, bit):
            try:
                found = offsets(read(name, transport=rng.choice(["shm", "tcp"])))
            except Exception as e:
                assert "Corrupt" in str(e) or "UnsupportedFormatError" in str(e), where
                assert "offset" in str(e) and "restore the segment" in str(e), (
                    f"{where}: {str(e)[-2000:]}"
                )
            else:
                assert found == list(range(ROWS)), where
    assert offsets(read(name)) == list(range(ROWS))
