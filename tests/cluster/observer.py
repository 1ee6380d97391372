"""What must hold of a cluster's nodes after every commit to the store.

An `Observer` is shown every commit that happened, in order, and repeats it in a tree of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdirect.cluster import paths, records
from kdirect.cluster.partition_state import NO_LEADER
from kdirect.cluster.records import Changes, StoredState, TopicAssignment
from kdirect.model import TopicPartition
from kdirect.store.contract import Check, Committed, Conflict, Operation
from kdirect.store.tree import Tree


class Observer:
    """`controllers`: version of `/controller_epoch` -> the session that wrote with it."""

    def __init__(self) -> None:
        self.tree = Tree()
        self.controllers: dict[int, int] = {}
        self._leaders: dict[tuple[TopicPartition, object, int], int] = {}
        self._states: dict[TopicPartition, tuple[object, StoredState]] = {}
        self._changes = Changes()

    def see(self, operations: Sequence[Operation], session: int) -> None:
        """A commit that happened elsewhere."""
        answer = self.commit(operations, session)
        assert isinstance(answer, Committed), answer

    def commit(self, operations: Sequence[Operation], session: int) -> Committed | Conflict:
        """What the tree says to a commit."""
        answer, touched = self.tree.commit(operations, session)
        if isinstance(answer, Conflict):
            return answer
        first = operations[0]
        if (
            isinstance(first, Check)
            and first.path == paths.CONTROLLER_EPOCH
            and len(operations) > 2
        ):
            owner = self.controllers.setdefault(first.version, session)
            assert owner == session, "two controllers wrote in one controller epoch"
            assert max(self.controllers) == first.version, "an older controller wrote"
        for path in touched.values:
            tp = paths.partition_of_state(path)
            if tp is not None:
                self._see_state(tp, path)
            elif path == paths.CHANGES:
                self._see_changes(path, touched.values)
        self.check()
        return answer

    def _see_changes(self, path: str, values: frozenset[str]) -> None:
        node = self.tree.get(path)
        if node is None:
            return
        changes = records.decode_changes(path, node.value)
        if node.version > 0:
            assert changes.generation > self._changes.generation
            named = changes.since(self._changes.generation)
            if named is not None:
                for value in values:
                    if paths.partition_of_state(value) is not None and self.tree.get(value):
                        assert value in named, "brokers do not learn of a change"
        self._changes = changes

    def _see_state(self, tp: TopicPartition, path: str) -> None:
        node = self.tree.get(path)
        if node is None:
            self._states.pop(tp, None)
            return
        stored = records.decode_state(path, node.value, node.version)
        epoch = self.tree.get(paths.CONTROLLER_EPOCH)
        assert epoch is not None
        assert stored.controller_epoch == int(epoch.value), "a controller of another epoch wrote"
        topic = self._topic(tp.topic).topic_id
        state = stored.state
        of_epoch = (tp, topic, state.leader_epoch)
        assert self._leaders.setdefault(of_epoch, state.leader) == state.leader, (
            f"{tp} has two leaders in epoch {state.leader_epoch}"
        )
        known = self._states.get(tp)
        if known is not None and known[0] == topic:
            before = known[1]
            assert state.leader_epoch >= before.state.leader_epoch
            assert stored.controller_epoch >= before.controller_epoch
        self._states[tp] = (topic, stored)

    def _topic(self, name: str) -> TopicAssignment:
        node = self.tree.get(paths.topic(name))
        assert node is not None, f"{name} has states and no assignment"
        return records.decode_topic(paths.topic(name), node.value)

    def check(self) -> None:
        """Every state fits the replicas of its partition."""
        topics: dict[str, TopicAssignment] = {}
        for tp, (_, stored) in self._states.items():
            if tp.topic not in topics:
                topics[tp.topic] = self._topic(tp.topic)
            replicas = topics[tp.topic].replicas[tp.partition]
            state = stored.state
            assert len(set(replicas)) == len(replicas)
            assert state.in_sync
            assert {*state.in_sync, *state.eligible} <= set(replicas), (tp, state, replicas)
            assert not set(state.in_sync) & set(state.eligible)
            assert state.leader == NO_LEADER or state.leader in state.in_sync
            assert set(stored.incarnations) <= {*state.in_sync, *state.eligible}

    def states(self) -> dict[TopicPartition, StoredState]:
        return {tp: stored for tp, (_, stored) in self._states.items()}


class Unchecked(Observer):
    """For trees that are damaged on purpose, or large."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = tree

    def commit(self, operations: Sequence[Operation], session: int) -> Committed | Conflict:
        return self.tree.commit(operations, session)[0]
