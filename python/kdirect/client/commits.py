"""What a consumer commits for its group: what is to be committed, what was sent, what was answered.

Owns: the offsets stored to be committed, the commits that are under way, and the offsets that the
group is known to have.  When to commit is the consumer's, the requests are the group's.

One thread at a time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from kdirect.client.direct_commits import DirectCommit, DirectCommits
from kdirect.client.group_member import GroupMember
from kdirect.client.reading import Reading
from kdirect.errors import BrokerError, BrokerUnavailableError, ConfigError, KdirectError
from kdirect.format.error_codes import ErrorCode
from kdirect.model import TopicPartition
from kdirect.wire.connection import Pending

log = logging.getLogger("kdirect.client")

Sent: TypeAlias = Pending | DirectCommit | KdirectError
OnCommit = Callable[[KdirectError | None, dict[TopicPartition, int]], None]


class Commits:
    """See the module.  Without `auto_store`, what is committed by default is what was stored, not
    what was handed out."""

    def __init__(
        self,
        membership: GroupMember,
        reading: Reading,
        direct: DirectCommits,
        *,
        auto_store: bool,
    ) -> None:
        self._membership = membership
        self._direct = direct
        self._reading = reading
        self._auto_store = auto_store
        self._sent: deque[tuple[Sent, dict[TopicPartition, int]]] = deque()
        self._committed: dict[TopicPartition, int | None] = {}
        self._stored: dict[TopicPartition, int] = {}

    @property
    def under_way(self) -> bool:
        """Are there commits that `settle` has not taken an answer of?"""
        return bool(self._sent)

    @property
    def direct_commits(self) -> int:
        """How many were made one-sidedly."""
        return self._direct.commits

    def due(self) -> dict[TopicPartition, int]:
        """What was handed out, or stored, and is not committed."""
        if self._auto_store:
            reading = self._reading
            offsets = {tp: reading.next_offset(tp) for tp in reading.partitions}
        else:
            offsets = self._stored
        # A position below 0 is that of a partition whose broker was not reached yet.
        return {tp: o for tp, o in offsets.items() if o >= 0 and self._committed.get(tp) != o}

    def store(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Mark as done, to be committed later.  ConfigError for a partition that is not read."""
        for tp, offset in offsets.items():
            if tp not in self._reading:
                raise ConfigError(
                    f"{tp} is not assigned",
                    hint="it was given to another member: what it had stored is not committed",
                )
            self._stored[tp] = offset

    def send(self, offsets: dict[TopicPartition, int]) -> None:
        """Commit without waiting: `settle` takes the answer."""
        sent: Sent | None = None
        # Over one way at a time: the coordinator may take the later of two ways first.
        if all(earlier.wait(0) for earlier, _ in self._sent if isinstance(earlier, Pending)):
            sent = self._direct.begin(offsets)
        try:
            if sent is None:
                self._finish_direct()
                sent = self._membership.send_commit(offsets)
        except (BrokerError, BrokerUnavailableError) as e:
            sent = e  # reported as if the coordinator had said it
        self._sent.append((sent, offsets))

    def _finish_direct(self) -> None:
        """Have what was committed one-sidedly answered, or made once more over TCP."""
        for i, (sent, offsets) in enumerate(self._sent):
            if isinstance(sent, DirectCommit):
                try:
                    if not self._counts(sent, offsets, self._direct.deadline()):
                        sent.made_over_tcp()
                except KdirectError as e:
                    self._sent[i] = e, offsets

    def _counts(
        self, direct: DirectCommit | None, offsets: dict[TopicPartition, int], until: float
    ) -> bool:
        """Did it succeed one-sidedly?  Else (False) it was made once more over TCP, in what time is
        left.  BrokerError when that is refused."""
        if direct is not None and direct.succeeded(self._direct.share_ms(until)):
            return True
        self._membership.commit(offsets, self._direct.left_ms(until))
        return False

    def commit(self, offsets: dict[TopicPartition, int]) -> None:
        """Commit and wait for the answer, request.timeout.ms at most, whichever ways it takes.
        BrokerError when it is refused.  None is under way."""
        until = self._direct.deadline()
        self._counts(self._direct.begin(offsets, until), offsets, until)
        self._committed.update(offsets)

    def settle(self, on_commit: OnCommit | None, *, wait: bool = False) -> None:
        """Take the answers that are there, or all of them with `wait`, and report each to
        `on_commit`; without one, failures are logged."""
        while self._sent:
            sent, offsets = self._sent[0]
            if not (wait or isinstance(sent, KdirectError) or sent.done):
                return
            self._sent.popleft()
            error: KdirectError | None = None
            try:
                if isinstance(sent, KdirectError):
                    raise sent
                if isinstance(sent, DirectCommit):
                    self._counts(sent, offsets, self._direct.deadline())
                else:
                    self._check(sent, offsets)
                self._committed.update({tp: o for tp, o in offsets.items() if tp in self._reading})
            except KdirectError as e:
                error = e
                if on_commit is None:
                    log.warning("%s", e)
            if on_commit is not None:
                on_commit(error, offsets)

    def _check(self, sent: Pending, offsets: dict[TopicPartition, int]) -> None:
        """The answer to a commit over TCP.  One with the epoch of before is made once more."""
        try:
            self._membership.check_commit(sent.result())
        except BrokerError as e:
            if e.code != ErrorCode.STALE_MEMBER_EPOCH:
                raise
            later = set().union(*(those for _, those in self._sent))
            self._membership.commit({tp: o for tp, o in offsets.items() if tp not in later})

    def close(self) -> None:
        """The member leaves: nothing is committed any more."""
        self._direct.close()

    def look_up(self, tps: list[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The group's committed offsets of partitions that begin to be read."""
        found = self._membership.committed(tps)
        self._committed.update(found)
        return found

    def keep(self, tps: Iterable[TopicPartition]) -> None:
        """Forget what concerns other partitions."""
        kept = set(tps)
        self._committed = {tp: o for tp, o in self._committed.items() if tp in kept}
        self._stored = {tp: o for tp, o in self._stored.items() if tp in kept}
