"""Commit slots of a broker: what counts, what is refused, who is cut, and when a slot ends."""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

import kdirect
from kdirect.client import connect as open_session
from kdirect.client.transaction import GroupMetadata
from kdirect.errors import KdirectError
from kdirect.format import layout
from kdirect.format import protocol as p
from kdirect.format.codec import decode_records
from kdirect.format.error_codes import ErrorCode as E
from kdirect.format.schema import build
from kdirect.model import TopicPartition
from tests.broker.slot_rig import SlotMember, connect, fetched, tcp_commit
from tests.support import alter_topic, wait_until

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
REVOKED = layout.ACK_FLAG_REVOKED


@pytest.fixture
def broker(tmp_path):
    with kdirect.Broker(log_dirs=str(tmp_path / "log"), group_min_session_timeout_ms=100) as b:
        create(b)
        yield b


def create(broker, name="t", partitions=2):
    with open_session(broker.bootstrap_servers) as session:
        session.admin.create_topic(name, partitions)


@pytest.fixture
def member(broker):
    with contextlib.closing(SlotMember(broker.bootstrap_servers)) as m:
        m.join()
        assert m.ask({"t": [0, 1]}).error_code == 0
        yield m


def slots(broker):
    return broker.statistics()["rdma_commit_slots"]


def offset_records(broker):
    """(key, value) of all offsets in the log."""
    found = []
    for tp, partition in broker.server.logs.partitions.items():
        for data in partition.read(0, 1 << 20) if tp.topic == "__consumer_offsets" else ():
            rows = decode_records(data, tp.topic, tp.partition, 0)[0]
            found += [(r.key, r.value) for r in rows if r.key[:2] == b"\0\1"]
    return found


def test_a_commit_is_what_one_over_tcp_is(broker, member):
    assert member.commit([(0, 5), (1, 7)]) == 0
    assert fetched(member.connection, "g") == {A: 5, B: 7}
    assert member.commit([(1, 8)]) == 0
    assert tcp_commit(member.connection, "g", {A: 5}, member.generation, member.member_id) == [0]
    assert fetched(member.connection, "g") == {A: 5, B: 8}
    records = offset_records(broker)
    assert len(records) == 4
    (first_key, first), (last_key, last) = records[0], records[-1]
    assert first_key == last_key and first[:-8] == last[:-8], "but for the time they are the same"
    assert broker.statistics()["rdma_offset_commits_deferred"] == 0


def test_it_is_there_after_a_restart(tmp_path, broker, member):
    for offset in range(100):
        assert member.commit([(0, offset)]) == 0
    broker.stop()
    with kdirect.Broker(log_dirs=str(tmp_path / "log")) as again:
        assert fetched(connect(again.bootstrap_servers), "g") == {A: 99}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"guard": 1}, E.CORRUPT_MESSAGE),
        ({"sequence": 4}, E.CORRUPT_MESSAGE),
        ({"count": 2}, E.CORRUPT_MESSAGE),
        ({"count": 0}, E.CORRUPT_MESSAGE),
        ({"count": 1 << 31}, E.CORRUPT_MESSAGE),
        ({"token": 7}, E.UNKNOWN_MEMBER_ID),
        ({"generation": 0}, E.ILLEGAL_GENERATION),
        ({"entries": [(2, 1)]}, E.INVALID_REQUEST),
        ({"entries": [(1 << 31, 1)]}, E.INVALID_REQUEST),
        ({"entries": [(0, -1)]}, E.INVALID_REQUEST),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("deferred", [False, True], ids=["direct", "deferred"])
def test_a_commit_that_says_something_wrong_is_refused(broker, member, changed, code, deferred):
    changed = dict(changed)
    wrong = changed.pop("entries", [(0, 1)])
    if not deferred:
        assert member.commit(wrong, **changed) == code
    else:
        (offsets,) = broker.server.groups.happened.__self__._logs.values()
        offsets.pause()
        member.write([(1, 3)])
        member.write(wrong, **changed)
        assert sorted((a.order, a.error) for a in member.answers(2)) == [(0, 0), (1, code)]
        offsets.resume()
    assert fetched(member.connection, "g") == ({B: 3} if deferred else {})
    assert member.commit([(0, 2)]) == 0, "the next one counts"


@pytest.mark.parametrize("changed", [{"order": 1}, {"length": 24}, {"length": 41}])
def test_who_breaks_the_protocol_is_cut(broker, member, changed):
    member.write([(0, 1), (1, 1)], **changed)
    assert member.is_cut()
    wait_until(lambda: slots(broker) == 0, "the end of the slot")
    assert fetched(connect(broker.bootstrap_servers), "g") == {}
    with contextlib.closing(SlotMember(broker.bootstrap_servers, "other")) as other:
        other.join()
        other.ask({"t": [0]})
        assert other.commit([(0, 1)]) == 0


def test_who_writes_under_another_file_is_cut_and_the_other_is_not(broker, member):
    with contextlib.closing(SlotMember(broker.bootstrap_servers, "other")) as other:
        other.join()
        other.ask({"t": [0]})
        other.write([(0, 9)], file_id=member.slot.file_id)
        assert other.is_cut()
    assert member.commit([(0, 1)]) == 0
    assert fetched(member.connection, "g") == {A: 1}


def test_who_has_more_commits_under_way_than_cells_is_cut(broker, member, monkeypatch):
    offsets = broker.server.groups.happened.__self__
    monkeypatch.setattr(offsets, "_take_news", lambda *news: None)  # nobody answers
    (log,) = offsets._logs.values()
    log.pause()
    for i in range(layout.OFFSETS_CELLS):
        member.write([(0, i)])
    wait_until(
        lambda: broker.statistics()["rdma_offset_commits_deferred"] == layout.OFFSETS_CELLS,
        "the commits that fill the cells",
    )
    member.write([(0, 9)])
    assert member.is_cut()


@pytest.mark.parametrize(
    ("topics", "changed", "code"),
    [
        ({"t": [2]}, {}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"u": [0]}, {}, E.UNKNOWN_TOPIC_OR_PARTITION),
        ({"t": []}, {}, E.INVALID_REQUEST),
        ({"t": [0, 0]}, {}, E.INVALID_REQUEST),
        ({"t": [0]}, {"generation_id_or_member_epoch": 0}, E.ILLEGAL_GENERATION),
        ({"t": [0]}, {"generation_id_or_member_epoch": -1, "member_id": ""}, E.INVALID_REQUEST),
        ({"t": [0]}, {"member_id": "who"}, E.UNKNOWN_MEMBER_ID),
        ({"t": [0]}, {"group_id": "h"}, E.ILLEGAL_GENERATION),
        ({"t": [0]}, {"ack_entries": 12}, E.INVALID_REQUEST),
        ({"t": [0]}, {"ack_entries": 4}, E.INVALID_REQUEST),
        ({"t": [0]}, {"ack_entries": 1 << 20}, E.INVALID_REQUEST),
        ({"t": [0]}, {"ack_rkey": 1 << 32}, E.INVALID_REQUEST),
        ({"t": [0]}, {"connection_id": 1}, layout.ERROR_UNKNOWN_CONNECTION),
    ],
)
def test_a_request_for_a_slot_that_cannot_be_is_refused(member, topics, changed, code):
    assert member.ask(topics, **changed).error_code == code


def rebalance(broker, member):
    other = SlotMember(broker.bootstrap_servers)

    def join():
        with contextlib.suppress(AssertionError, KdirectError):  # the broker may stop before
            other.join()

    joining = threading.Thread(target=join)
    joining.start()
    group = broker.server.groups.coordinator.groups["g"]
    wait_until(lambda: group.state == "PreparingRebalance", "the rebalance")
    assert member.commit([(0, 1)]) == 0, "members commit before they join again"
    member.connection.request(
        build(
            p.JoinGroupRequest,
            group_id="g",
            session_timeout_ms=30_000,
            rebalance_timeout_ms=10_000,
            member_id=member.member_id,
            group_instance_id=None,
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
    )


def leave(broker, member):
    r = p.LeaveGroupRequest
    member.connection.request(
        r(
            group_id="g",
            member_id=member.member_id,
            members=[r.MemberIdentity(member_id=member.member_id, group_instance_id=None)],
        )
    )


def delete_topic(broker, member):
    with open_session(broker.bootstrap_servers) as session:
        session.admin.delete_topic("t")


def expire(broker, member):
    group = broker.server.groups.coordinator.groups["g"]
    wait_until(lambda: not group.members, "the end of the session")


def ask_again(broker, member):
    before = dict(vars(member))
    assert member.ask({"t": [1]}).error_code == 0
    vars(member).update(before)  # it goes on with the slot before


def give_back(broker, member):
    member.channel.release([member.slot.file_id])


def give_up(broker, member):
    groups = broker.server.groups
    loop = broker.server._loop
    loop.call_soon_threadsafe(groups.give_up, lambda name: name == "g")


@pytest.mark.parametrize(
    "end", [rebalance, leave, delete_topic, expire, ask_again, give_back, give_up]
)
def test_the_end_of_a_slot(broker, end):
    """The member is told, its key is gone, and what it writes all the same counts for nothing."""
    member = SlotMember(broker.bootstrap_servers, session_ms=300 if end is expire else 30_000)
    with contextlib.closing(member):
        member.join()
        member.ask({"t": [0, 1]})
        assert member.commit([(0, 1)]) == 0
        end(broker, member)
        (notice,) = member.answers()
        assert notice.flags == REVOKED
        wait_until(lambda: slots(broker) == (end is ask_again), "the end of the slot")
        before = fetched(connect(broker.bootstrap_servers), "g")
        with contextlib.suppress(KdirectError):
            member.write([(0, 99)])
        assert member.is_cut(), "the key is gone"
        assert fetched(connect(broker.bootstrap_servers), "g") == before
        assert before == ({} if end is delete_topic else {A: 1})


def test_a_slot_ends_with_its_queue_pair(broker, member):
    assert slots(broker) == 1
    member.channel.close()
    wait_until(lambda: slots(broker) == 0, "the end of the slot")
    assert not broker.server.groups.happened.__self__._logs
    assert broker.statistics()["rdma_grants"] == 0


def test_it_may_be_switched_off(tmp_path):
    with kdirect.Broker(rdma_commit=False) as broker:
        create(broker)
        with contextlib.closing(SlotMember(broker.bootstrap_servers)) as member:
            member.join()
            assert member.ask({"t": [0]}).error_code == layout.ERROR_ACCESS_DISABLED


def test_a_commit_waits_for_the_disk_where_others_do(tmp_path):
    with kdirect.Broker(log_flush_before_ack=True, log_dirs=str(tmp_path / "log")) as broker:
        create(broker)
        with contextlib.closing(SlotMember(broker.bootstrap_servers)) as member:
            member.join()
            member.ask({"t": [0]})
            for i in range(5):
                assert member.commit([(0, i)]) == 0
                for tp, partition in broker.server.logs.partitions.items():
                    if tp.topic == "__consumer_offsets":
                        assert partition.recovery_point == partition.log_end_offset
            assert broker.statistics()["rdma_offset_commits_deferred"] == 5


def test_a_commit_between_an_append_of_the_loop_and_its_table(
    tmp_path, broker, member, monkeypatch
):
    """It is after that append in the log, so it has to be after it in memory."""
    appends, worker = broker.server.appends, broker.server.access.engines[0].worker
    append = appends.append_nowait
    came = []

    def append_then_wait(partition, data, at_ms, **options):
        result = append(partition, data, at_ms, **options)
        if not came:
            came.append(True)
            member.write([(0, 9)])
            wait_until(lambda: worker.statistics()["rdma_offset_commits"], "the commit")
        return result

    monkeypatch.setattr(appends, "append_nowait", append_then_wait)
    connection = connect(broker.bootstrap_servers)
    assert tcp_commit(connection, "g", {A: 5}, member.generation, member.member_id) == [0]
    assert [a.error for a in member.answers()] == [0]
    assert fetched(connection, "g") == {A: 9}
    broker.stop()
    with kdirect.Broker(log_dirs=str(tmp_path / "log")) as again:
        assert fetched(connect(again.bootstrap_servers), "g") == {A: 9}


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("when", ["before the marker", "after the marker", "in between"])
def test_a_commit_while_a_transaction_ends(tmp_path, broker, member, monkeypatch, commit, when):
    """The last offset in the log counts, and that is the member's, whichever way the transaction
    ends; what it has not committed itself is the transaction's."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "x"}
    appends, worker = broker.server.appends, broker.server.access.engines[0].worker
    append_marker, came = appends.append_marker, []

    def commit_here():
        came.append(True)
        member.write([(0, 9)])
        wait_until(lambda: worker.statistics()["rdma_offset_commits"] == 2, "the commit")

    def append_with_it(partition, batch, at_ms):
        is_offsets = partition.topic_partition.topic == "__consumer_offsets"
        if is_offsets and when == "before the marker" and not came:
            commit_here()
        result = append_marker(partition, batch, at_ms)
        if is_offsets and when == "in between" and not came:
            commit_here()
        return result

    monkeypatch.setattr(appends, "append_marker", append_with_it)
    connection = connect(broker.bootstrap_servers)
    assert member.commit([(1, 1)]) == 0
    with kdirect.Producer(settings) as made:
        made.init_transactions(10)
        made.begin_transaction()
        made.send_offsets_to_transaction({A: 5, B: 6}, GroupMetadata("g"), 10)
        if commit:
            made.commit_transaction(10)
        else:
            made.abort_transaction(10)
        if when == "after the marker":
            commit_here()
    assert [a.error for a in member.answers()] == [0]
    expected = {A: 9, B: 6 if commit else 1}
    assert fetched(connection, "g") == expected
    assert broker.statistics()["rdma_offset_commits_deferred"] == 0
    broker.stop()
    with kdirect.Broker(log_dirs=str(tmp_path / "log")) as again:
        assert fetched(connect(again.bootstrap_servers), "g") == expected


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_what_the_log_says(tmp_path, seed):
    """Two members, each with three partitions in its slot, a client of TCP, and transactions of
    which some are aborted commit at once; the log is compacted under them.  Nobody loses what was
    acknowledged to him last, where he commits alone; where several commit the last record counts,
    and so a restart finds what was in memory.
    """
    chance = random.Random(seed)
    options = {
        "log_dirs": str(tmp_path / "log"),
        "offsets_topic_num_partitions": 2,
        "log_cleaner_backoff_ms": 20,
        "log_cleaner_min_cleanable_ratio": 0.1,
    }
    with kdirect.Broker(**options) as broker:
        create(broker, partitions=5)
        servers = broker.bootstrap_servers
        # Groups of one partition of __consumer_offsets.
        names = [name for name in "abcdefgh" if ord(name) % 2 == 0][:2]
        members = [SlotMember(servers, name) for name in names]

        ended = TopicPartition("t", 4)  # of transactions alone

        def alone(key):
            return key[1].partition != 2

        last: dict[tuple[str, TopicPartition], int] = {}
        failures: list[BaseException] = []

        def by_slot(member, dice):
            for i in range(dice.randrange(1500, 2500)):
                index = dice.randrange(3)
                assert member.commit([(index, i)]) == 0
                last[member.group, TopicPartition("t", index)] = i

        def by_tcp(dice):
            connection = connect(servers)
            for i in range(dice.randrange(150, 300)):
                member = dice.choice(members)
                tp = TopicPartition("t", dice.choice([2, 3]))
                assert tcp_commit(
                    connection, member.group, {tp: i}, member.generation, member.member_id
                ) == [0]
                last[member.group, tp] = i
                if dice.random() < 0.2:
                    for key in [k for k in list(last) if k[0] == member.group and alone(k)]:
                        if key[1] == ended:
                            continue  # a transaction has ended before its markers are there
                        before = last[key]
                        assert fetched(connection, member.group)[key[1]] >= before

        def by_transactions(dice):
            settings = {"bootstrap.servers": servers, "transactional.id": "x"}
            with kdirect.Producer(settings) as made:
                made.init_transactions(10)
                for i in range(dice.randrange(60, 90)):
                    group = dice.choice(names)
                    made.begin_transaction()
                    offsets = {TopicPartition("t", 2): i, ended: i}
                    made.send_offsets_to_transaction(offsets, GroupMetadata(group), 10)
                    if dice.random() < 0.3:
                        made.abort_transaction(10)
                    else:
                        made.commit_transaction(10)
                        last.update({(group, tp): i for tp in offsets})

        def guarded(work, *arguments):
            try:
                work(*arguments)
            except BaseException as e:
                failures.append(e)

        for member in members:
            member.join()
            assert member.ask({"t": [0, 1, 2]}).error_code == 0
        alter_topic(servers, "__consumer_offsets", segment_bytes=32768)
        threads = [
            threading.Thread(target=guarded, args=(by_slot, m, random.Random(chance.random())))
            for m in members
        ]
        threads.append(
            threading.Thread(target=guarded, args=(by_tcp, random.Random(chance.random())))
        )
        threads.append(
            threading.Thread(target=guarded, args=(by_transactions, random.Random(seed)))
        )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        connection = connect(servers)
        markers = [(name, ended) for name in names]
        wait_until(
            lambda: all(fetched(connection, k[0])[k[1]] == last[k] for k in markers), "the markers"
        )
        found = {(name, tp): o for name in names for tp, o in fetched(connection, name).items()}
        assert found.keys() == last.keys()
        assert all(found[key] == last[key] for key in last if alone(key))
        assert broker.statistics()["cleaner_records_removed"] > 1000
        assert broker.statistics()["rdma_offset_commits_deferred"] > 0
        for member in members:
            member.close()
    with kdirect.Broker(**options) as again:
        connection = connect(again.bootstrap_servers)
        for name in names:
            kept = {tp: o for (group, tp), o in found.items() if group == name}
            assert fetched(connection, name) == kept
