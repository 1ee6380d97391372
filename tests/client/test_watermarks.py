"""The same question for watermarks again and again: what has not changed is not looked at, and
every answer is what a session that asks for the first time gets."""

from __future__ import annotations

import random

import pytest

import kdirect
from kdirect.broker import read_access
from kdirect.errors import UnknownTopicError
from kdirect.model import LATEST_OFFSET, TopicPartition
from tests.support import wait_until

SHARE = 0.2  # of the partitions get records between two questions


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_answers_follow_what_changes(broker, isolation, seed) -> None:
    chance = random.Random(seed)
    settings = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": isolation}
    admin = kdirect.connect(settings).admin
    admin.create_topic("t", 20)
    admin.create_topic("u", 5)
    ids = {name: admin.list_topics()[name].topic_id for name in "tu"}
    tps = [TopicPartition("t", p) for p in range(20)] + [TopicPartition("u", p) for p in range(5)]
    logs = broker.server.logs.partitions
    open_ = 0
    with (
        kdirect.connect(settings) as session,
        kdirect.connect(settings) as writing,
        writing.producer() as producer,
        kdirect.connect(settings | {"transactional.id": "x"}) as session_x,
        session_x.producer() as in_transactions,
    ):
        in_transactions.init_transactions()
        for turn in range(60):
            for tp in tps:
                if chance.random() < SHARE:
                    producer.produce(tp.topic, b"v", partition=tp.partition)
            producer.flush()
            if not open_ and chance.random() < 0.3:
                in_transactions.begin_transaction()
                in_transactions.produce("t", b"in a transaction", partition=0)
                in_transactions.flush()
                open_ = 3
            elif open_:
                open_ -= 1
                if not open_:
                    in_transactions.commit_transaction()
            if chance.random() < 0.2:
                logs[chance.choice(tps)].roll()
            if chance.random() < 0.1:
                logs[tps[0]].delete_records(logs[tps[0]].last_stable_offset)
            wanted = tps if turn % 10 else chance.sample(tps, 7)
            asked = ids if turn % 7 else None
            with kdirect.connect(settings | {"client.id": f"{turn}"}) as fresh:

                def is_news(fresh=fresh, wanted=wanted, asked=asked) -> bool:
                    found = session.watermarks(wanted, topic_ids=asked)
                    same = found == fresh.watermarks(wanted) and list(found) == wanted
                    found.clear()  # what was returned is the caller's
                    return same

                # Markers of transactions come when they come.
                wait_until(is_news, f"both sessions say the same in turn {turn}", timeout_s=10)
        admin.delete_topic("u")
        with pytest.raises(UnknownTopicError):
            session.watermarks(tps, topic_ids=ids)
        assert session.watermarks(tps[:20], topic_ids=ids).keys() == set(tps[:20])


def test_a_file_that_ends_while_it_is_entered_is_asked_for_again(broker, monkeypatch) -> None:
    """Its grant has no slot, so no news of the partition comes."""
    tp = TopicPartition("t", 0)
    session = kdirect.connect(broker.bootstrap_servers)
    session.admin.create_topic("t", 1)
    with kdirect.connect(broker.bootstrap_servers) as writing, writing.producer() as producer:

        def write(count: int) -> None:
            for _ in range(count):
                producer.produce("t", b"v", partition=0)
            producer.flush()

        write(3)
        ends = [3]  # where the log ends when the grant is begun; then others write, and it rolls
        write(2)
        broker.server.logs.partitions[tp].roll()
        real = read_access._readable

        def readable(partition, offset):
            return ends.pop() if offset == LATEST_OFFSET and ends else real(partition, offset)

        monkeypatch.setattr(read_access, "_readable", readable)
        assert session.watermarks([tp]) == {tp: (0, 5)} and not ends
        for count in range(6, 9):
            write(1)
            assert session.watermarks([tp]) == {tp: (0, count)}
