"""What log directories say of the replicas in them, when one of several is another disk by now."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from kdirect.cluster.election import (
    LOST,
    Fleet,
    How,
    LiveBroker,
    Partition,
    Rules,
    Standing,
    candidates,
    note_lost,
    review,
    standing,
)
from kdirect.cluster.image import Image, Topic
from kdirect.cluster.partition_state import PartitionState
from kdirect.cluster.records import (
    OWN,
    BrokerRegistration,
    Endpoint,
    TopicAssignment,
    decode_broker,
    encode_broker,
)
from kdirect.errors import CorruptMetadataError
from kdirect.log import checkpoint
from kdirect.member.identity import (
    FILE,
    Identity,
    Kept,
    Past,
    find_lost,
    read_past,
    write_identity,
)
from kdirect.model import TopicPartition

ID = uuid.UUID(int=1)
T = [TopicPartition("t", number) for number in range(3)]
RULES = Rules(min_in_sync=2)


def image(*known: int, in_sync: tuple[int, ...] = (1, 2)) -> Image:
    """Topic t, whose partitions brokers 1 and 2 have; broker 1 was in sync as these."""
    partitions = tuple(
        Partition((1, 2), state=PartitionState(-1, 3, in_sync, 5), incarnations=((1, n), (2, 20)))
        for n in known
    )
    record = TopicAssignment(ID, ((1, 2),) * len(partitions))
    return Image(1, 1, topics={"t": Topic(record, partitions)})


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for directory in found:
        directory.mkdir()
    write_identity({directory: Identity("boot", 10, 4) for directory in found})
    return found


def test_a_directory_that_is_new_speaks_for_its_own_replicas(dirs: list[Path]) -> None:
    a, b = dirs
    kept = {T[0]: Kept(ID, a), T[1]: Kept(ID, b)}
    assert find_lost(image(10, 10), 1, read_past(dirs, "boot"), kept) == {}
    shutil.rmtree(b)
    b.mkdir()
    past = read_past(dirs, "boot")
    assert (past.intact_since, past.own_incarnation) == (4, 10)
    del kept[T[1]]
    assert find_lost(image(10, 10), 1, past, kept) == {T[1]: OWN}
    # A replica that is there, in a directory that remembers nothing, is no better.
    assert find_lost(image(10, 10), 1, past, {**kept, T[1]: Kept(ID, b)}) == {T[1]: OWN}
    # The next process: the directory begins with the one before.
    write_identity({a: Identity("boot", 30, 4), b: Identity("boot", 30, 30)})
    past = read_past(dirs, "boot")
    kept[T[1]] = Kept(ID, b)
    assert past.intact_since == 4
    assert find_lost(image(10, 10), 1, past, kept) == {T[1]: 30}
    assert find_lost(image(10, 30), 1, past, kept) == {}  # it was in sync since


def test_a_replica_that_was_made_again_is_remembered(dirs: list[Path]) -> None:
    """No controller may have seen the process that found it missing."""
    kept = {T[0]: Kept(ID, dirs[0])}
    past = read_past(dirs, "boot")
    assert find_lost(image(10, 10), 1, past, kept) == {T[1]: OWN}
    write_identity({d: Identity("boot", 30, 4, {T[1]: 30}) for d in dirs})
    kept[T[1]] = Kept(ID, dirs[1])
    past = read_past(dirs, "boot")
    assert find_lost(image(10, 10), 1, past, kept) == {T[1]: 30}
    assert find_lost(image(10, 31), 1, past, kept) == {}
    assert find_lost(image(10, 10, in_sync=(2,)), 1, past, kept) == {}  # nobody believes in it


def test_a_topic_of_the_same_name_is_another_one(dirs: list[Path]) -> None:
    kept = {T[0]: Kept(uuid.UUID(int=2), dirs[0])}
    assert find_lost(image(10), 1, read_past(dirs, "boot"), kept) == {T[0]: OWN}


@pytest.mark.parametrize("clean", [False, True])
def test_each_directory_has_its_own_mark_of_a_clean_end(dirs: list[Path], clean: bool) -> None:
    """Under another boot."""
    a, b = dirs
    (a / checkpoint.CLEAN_SHUTDOWN).touch()
    if clean:
        (b / checkpoint.CLEAN_SHUTDOWN).touch()
    assert read_past(dirs, "another").since == {a: 4, b: 4 if clean else None}


@pytest.mark.parametrize("text", ["t-0:", "t:1", "t-0:1,,x", "t-0:-1", "../t-0:1"])
def test_a_damaged_list_says_nothing(dirs: list[Path], text: str) -> None:
    path = dirs[0] / FILE
    path.write_text(f"{path.read_text()}lost={text}\n")
    assert read_past(dirs[:1], "boot") == Past(since={dirs[0]: None})


def test_what_is_lost_is_registered() -> None:
    lost = {T[0]: OWN, T[2]: 17, TopicPartition("a-b.c", 12): 9}
    there = BrokerRegistration(
        (Endpoint("P", "h", 1),), {"P": "PLAINTEXT"}, intact_since=4, lost=lost
    )
    value = encode_broker(there)
    assert decode_broker("/brokers/ids/1", value) == there
    assert there.lost_since(30) == {**lost, T[0]: 30}
    for wrong in (b'{"t":[1]}', b'{"t":{"x":1}}', b'{"t":{"0":-1}}', b'{"t":{"0":"1"}}', b"[]"):
        damaged = value.replace(b'"lost":{', b'"lost":' + wrong + b',"was":{')
        with pytest.raises(CorruptMetadataError, match="/brokers/ids/1"):
            decode_broker("/brokers/ids/1", damaged)


def test_a_lost_replica_does_not_lead_although_its_broker_is_intact() -> None:
    back = LiveBroker(30, None, 4, {T[1]: 30})
    fleet = Fleet({1: back})
    whole, lost = image(10, 10).topics["t"].partitions
    assert next(candidates(note_lost(T[0], whole, fleet), fleet, RULES)) == (1, How.RETURNED)
    noted = note_lost(T[1], lost, fleet)
    assert dict(noted.incarnations) == {1: LOST, 2: 20}
    assert standing(noted, 1, fleet) is Standing.LOSSY
    assert list(candidates(noted, fleet, RULES)) == []
    # It stays so for a process whose registration says nothing of it any more.
    again = Fleet({1: LiveBroker(40, None, 4)})
    assert list(candidates(noted, again, RULES)) == []
    both = Fleet({1: back, 2: LiveBroker(21, None, 5)})
    after = review(note_lost(T[1], noted, both), both, RULES)
    assert after.state is not None and after.state.leader == 2 and after.state.in_sync == (2,)
    # What it had as the process that lost it, or later, it has.
    state = PartitionState(2, 4, (1, 2), 6)
    joined = Partition((1, 2), state=state, incarnations=((1, 30), (2, 21)))
    assert note_lost(T[1], joined, both) is joined
