"""Memberships over a simulated store, through lost connections, lost sessions, killed brokers and a
store that goes away, by seeds.  When the weather is good again:

- all brokers know the same brokers and the same controller, and each knows of every topic what the
  store has, although it has read changes only;
- a topic whose creation was answered is there with its id, and one whose deletion was is not;
- no question was answered that another one of it had been, and no producer id was given twice.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from pathlib import Path
from typing import Any

import pytest

from kdirect.cluster.codes import Code
from kdirect.cluster.image import absorb
from kdirect.cluster.requests import CreateTopic, DeleteTopic, GrowTopic
from kdirect.errors import KdirectError, TimedOutError
from kdirect.member.metadata import NO_IMAGE
from kdirect.member.picture import _rank
from kdirect.store.tree import Tree
from tests.members.virtual import SESSION_S, World

BROKERS = (1, 2, 3)
EVENTS = 25
SEEDS = range(12)


class Story:
    """What happens in one world, and what must be true of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = world.chance
        self.created: dict[str, uuid.UUID] = {}  # answered so
        self.doubtful: set[str] = set()  # neither yes nor no was heard
        self.deleted: set[str] = set()
        self.blocks: list[tuple[int, int]] = []
        self.asking: list[asyncio.Task[None]] = []
        self.starting: dict[int, asyncio.Task[Any]] = {}

    async def run(self) -> None:
        await asyncio.gather(*(self.world.start(n) for n in BROKERS))
        self.world.weather_is_bad = True
        for number in range(EVENTS):
            self.something_happens(number)
            await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.1, 1.0, SESSION_S)))
        self.world.weather_is_bad = False
        self.heal()
        for task in self.asking:
            await task
        await self.all_is_well()

    # -- events ------------------------------------------------------------------------------------

    def something_happens(self, number: int) -> None:
        node_id = self.chance.choice(BROKERS)
        there = node_id in self.world.members
        settled = self.starting.get(node_id) is None or self.starting[node_id].done()
        what = self.chance.random()
        if what < 0.45 and there:
            self.asking.append(asyncio.ensure_future(self.ask(node_id, f"t{number}")))
        elif what < 0.6 and there:
            self.world.server.cut(self.world.store(node_id))
            later = self.chance.choice((0.0, 0.1, SESSION_S / 2, SESSION_S + 1))
            self.world.loop.call_later(later, self.mend, node_id)
        elif what < 0.7 and there:
            self.world.server.expire(self.world.store(node_id))
            self.world.loop.call_later(self.chance.random(), self.mend, node_id)
        elif what < 0.8 and there and settled and len(self.world.members) > 1:
            self.world.kill(node_id)
        elif what < 0.95 and not there and settled:
            self.starting[node_id] = asyncio.ensure_future(self.world.start(node_id))
        elif what >= 0.95:
            self.world.server.go_away()
            self.world.loop.call_later(self.chance.random() * 2, self.world.come_back)

    def mend(self, node_id: int) -> None:
        self.world.server.mend(self.world.store(node_id))

    def heal(self) -> None:
        """The store works again for all that live, and all brokers run."""
        self.world.come_back()
        for node_id in BROKERS:
            settled = self.starting.get(node_id) is None or self.starting[node_id].done()
            if node_id in self.world.members:
                self.mend(node_id)
            elif settled:
                self.starting[node_id] = asyncio.ensure_future(self.world.start(node_id))

    async def ask(self, node_id: int, name: str) -> None:
        member = self.world.members[node_id]
        topic_id = uuid.UUID(int=self.chance.getrandbits(128), version=4)
        try:
            block = await member.producer_id_block()
            self.blocks.append((block.first, block.limit))
            self.doubtful.add(name)
            answer = await member.ask(
                CreateTopic(None, name, topic_id, partitions=3, start=self.chance.randrange(3)), 20
            )
            assert answer.outcome.code is Code.NONE, answer
            self.created[name] = topic_id
            self.doubtful.discard(name)
            if self.chance.random() < 0.5:
                answer = await member.ask(GrowTopic(None, name, 5), 20)
                assert answer.outcome.code is Code.NONE, answer
            elif self.chance.random() < 0.5:
                del self.created[name]
                self.doubtful.add(name)
                answer = await member.ask(DeleteTopic(None, name), 20)
                assert answer.outcome.code is Code.NONE, answer
                self.doubtful.discard(name)
                self.deleted.add(name)
        except (TimedOutError, asyncio.CancelledError):
            pass  # or its broker was killed

    # -- in the end --------------------------------------------------------------------------------

    async def all_is_well(self) -> None:
        await asyncio.gather(*(task for task in self.starting.values()))
        members = [self.world.members[n] for n in BROKERS]
        for _ in range(40):
            if self.agree(members):
                break
            await asyncio.sleep(1)
        assert self.agree(members), [(m.metadata, m.reports.told) for m in members]
        # The changes of one more commit reach all.
        answer = await members[0].ask(CreateTopic(None, "last", uuid.uuid4(), factor=3), 20)
        assert answer.outcome.code is Code.NONE, answer
        self.created["last"] = answer.rows[0].topic_id
        await asyncio.sleep(5)
        stored = self.stored()
        for member in members:
            assert member.metadata.image.topics == stored
            assert not member.reports.told
        for name, topic_id in self.created.items():
            assert stored[name].record.topic_id == topic_id
        assert not self.deleted & stored.keys()
        assert stored.keys() <= {*self.created, *self.doubtful}
        firsts = sorted(self.blocks)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(firsts))

    def stored(self) -> Any:
        nodes = dict(self.world.server.tree.walk())
        return absorb(NO_IMAGE, {path: nodes[path] for path in sorted(nodes, key=_rank)}).topics

    @staticmethod
    def agree(members: list[Any]) -> bool:
        first = members[0].metadata
        return first.controller_id in BROKERS and all(
            m.metadata.controller_id == first.controller_id
            and m.metadata.brokers == first.brokers
            and set(first.brokers) == set(BROKERS)
            and m.metadata.incarnation == first.brokers[m.node_id].incarnation
            for m in members
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_members_agree_when_the_weather_is_good_again(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed, tmp_path)
    try:
        world.run(Story(world).run(), monkeypatch)
    except KdirectError as e:
        raise AssertionError(f"seed {seed}") from e


def test_a_store_that_is_emptied_while_brokers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep what they know, say so, found no new cluster, and go on when it is back."""
    world = World(1, tmp_path)

    async def story() -> None:
        members = [await world.start(n) for n in BROKERS]
        answer = await members[0].ask(CreateTopic(None, "t", uuid.uuid4(), factor=3), 20)
        assert answer.outcome.code is Code.NONE
        await asyncio.sleep(SESSION_S)
        for store in [world.store(n) for n in BROKERS]:
            world.server.expire(store)
            world.server.mend(store)
        full = world.server.tree
        world.server.tree = Tree()
        world.server.tree.changes = full.changes
        await asyncio.sleep(2 * SESSION_S)
        for member in members:
            assert any("knows no cluster" in text for text in member.reports.told)
            assert member.metadata.incarnation == -1
            assert member.metadata.image.topics.keys() == {"t"}
        assert dict(world.server.tree.walk()).keys() <= {"/"}
        world.server.tree = full
        await asyncio.sleep(2 * SESSION_S)
        assert Story.agree(members)
        answer = await members[0].ask(CreateTopic(None, "after", uuid.uuid4(), factor=3), 20)
        assert answer.outcome.code is Code.NONE

    world.run(story(), monkeypatch)
