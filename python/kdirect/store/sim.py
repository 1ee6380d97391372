"""A metadata store in memory, with simulated time: delays, lost connections, lost sessions, late
watches, from a seed.

Owns: one `SimServer` (the tree, its sessions, what is under way) and a `SimStore` for each session.
A session reads from a *view*, a copy of the tree that may lag, as from a ZooKeeper server that
follows the leading one; it has caught up with what the session itself committed. Nothing happens by
itself: whoever drives the simulation calls `SimServer.step`, which lets one of the things under way
happen, or moves time. The order is drawn from the seed, within what the contract promises: requests
of one session stay in order, and so do their answers.

Faults, which the driver causes by name:

- `cut(store)`: the session's connection is lost.  Each request under way happens at once, later or
  never, by chance; its answer does not come (`Unknown`).  "Later" is until the connection is back
  or the session ends, as with a server that has stopped for a while.  Watches go.
- `mend(store)`: it is back, if the session still lives; else it has expired.
- time: a session that is cut for longer than `session_timeout_ns` expires on the server; its store
  learns of that when it is mended, as with ZooKeeper.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kdirect.store.contract import (
    Changed,
    ChildrenAnswer,
    CommitAnswer,
    Committed,
    Delete,
    Event,
    MetadataStore,
    Operation,
    ReadAnswer,
    SessionState,
    Unknown,
    check_operations,
    check_path,
)
from kdirect.store.tree import Tree, Watches

# What is done at the server for a session; returns the answer.
_Request = Callable[[], Any]


class _Change(NamedTuple):
    """A commit that happened, for a session."""

    operations: tuple[Operation, ...]
    session: int


class _Delivery(NamedTuple):
    """What is on its way back: an answer for whoever asked, or an event."""

    to: Callable[[Any], None]
    what: Any
    is_answer: bool


class SimServer:
    """The servers of a store, as one: they answer as if there were one."""

    def __init__(self, seed: int | random.Random, *, session_timeout_ns: int = 10**9) -> None:
        self.tree = Tree()
        self.history: list[_Change] = []  # what made the tree; views repeat it
        self.session_timeout_ns = session_timeout_ns
        self.now_ns = 0
        self.away = False  # no session reaches the servers, and no session expires meanwhile
        self._random = seed if isinstance(seed, random.Random) else random.Random(seed)
        self._sessions: dict[int, SimStore] = {}  # those that live at the servers
        self._stores: list[SimStore] = []  # in order of their start, ended ones included

    # -- what drives it ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one thing happen that is under way, chosen by chance; False if there is none."""
        ready = [store for store in self._stores if store.has_work()]
        if not ready:
            return False
        self._random.choice(ready).work(self._random)
        return True

    def drain(self) -> None:
        """Let everything happen that is under way."""
        while self.step():
            pass

    def pass_time(self, ns: int) -> None:
        """Move time on; sessions that were cut for too long expire on the server."""
        self.now_ns += ns
        if self.away:
            return
        for number, store in list(self._sessions.items()):
            if store.cut_at_ns is not None and (
                self.now_ns - store.cut_at_ns >= self.session_timeout_ns
            ):
                self._expire(number)

    def cut(self, store: SimStore) -> None:
        """Take the session's connection away."""
        store.lose(self._random, self.now_ns)

    def mend(self, store: SimStore) -> None:
        """Give it back."""
        if not self.away:
            store.find_again(alive=store.session in self._sessions)

    def expire(self, store: SimStore) -> None:
        """End a session on the server, as if it had been cut for long."""
        self.cut(store)
        self.leave(store)

    def go_away(self) -> None:
        """All servers are gone, for all sessions; nothing that is stored is lost."""
        self.away = True
        for store in self._stores:
            self.cut(store)

    def come_back(self) -> None:
        """They are back; sessions have all of their timeout left, as after a new leader's
        election."""
        self.away = False
        for store in self._stores:
            self.mend(store)

    # -- for the stores ----------------------------------------------------------------------------

    def enter(self, store: SimStore) -> int:
        self._stores.append(store)
        self._sessions[len(self._stores)] = store
        return len(self._stores)

    def lives(self, session: int) -> bool:
        """Does the session live at servers that work?"""
        return session in self._sessions and not self.away

    def some_of(self, count: int) -> int:
        """How many of so many things happened, by chance."""
        return self._random.randint(0, count)

    def leave(self, store: SimStore) -> None:
        if store.session in self._sessions:
            self._expire(store.session)

    def commit(self, operations: Sequence[Operation], session: int) -> CommitAnswer:
        answer = self.tree.commit(operations, session)[0]
        if isinstance(answer, Committed):
            self.history.append(_Change(tuple(operations), session))
        return answer

    def _expire(self, number: int) -> None:
        del self._sessions[number]
        owned = self.tree.owned_by(number)
        if owned:
            self.commit([Delete(path) for path in owned], number)


class SimStore(MetadataStore):
    """One session with a `SimServer`."""

    def __init__(self, server: SimServer) -> None:
        self.session = 0
        self.cut_at_ns: int | None = None
        self._server = server
        self._on_event: Callable[[Event], None] = lambda event: None
        self._ended: SessionState | None = None
        # Both in order: requests on their way to the server, and what is on its way back.
        self._requests: deque[tuple[_Request, Callable[[Any], None]]] = deque()
        self._answers: deque[_Delivery] = deque()
        self._late: deque[_Request] = deque()  # answered `Unknown`, and may happen yet
        self._view = Tree()
        self._seen = 0  # changes of the server's history that the view has
        self._watches = Watches()

    # -- the contract ------------------------------------------------------------------------------

    def start(self, on_event: Callable[[Event], None]) -> None:
        if self.session or self._ended is not None:
            raise ValueError("a store is started once, and not after it was closed")
        self._on_event = on_event
        self.session = self._server.enter(self)
        if self._server.away:
            self.cut_at_ns = self._server.now_ns
        else:
            self._tell(SessionState.CONNECTED)

    def read(
        self, paths: Sequence[str], done: Callable[[ReadAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]
        self._ask(lambda: self._watches.read(self._view, self.session, wanted, watch=watch), done)

    def children(
        self, paths: Sequence[str], done: Callable[[ChildrenAnswer], None], *, watch: bool = False
    ) -> None:
        wanted = [check_path(path) for path in paths]
        self._ask(lambda: self._watches.children(self._view, wanted, watch=watch), done)

    def commit(self, operations: Sequence[Operation], done: Callable[[CommitAnswer], None]) -> None:
        checked = check_operations(operations)

        def at_server() -> CommitAnswer:
            answer = self._server.commit(checked, self.session)
            self._catch_up()
            return answer

        self._ask(at_server, done)

    def close(self) -> None:
        if self._ended is not None:
            return
        if self.cut_at_ns is None:  # else the servers notice by the timeout alone
            for _ in range(self._server.some_of(len(self._requests))):
                request, done = self._requests.popleft()
                request()
                self._answers.append(_Delivery(done, Unknown(), is_answer=True))
            self._server.leave(self)
        self._end(SessionState.CLOSED)

    # -- driven by the server ----------------------------------------------------------------------

    def has_work(self) -> bool:
        reaches = self.cut_at_ns is None and self._ended is None
        return bool(
            self._answers or self._may_be_late() or (reaches and (self._requests or self._lags()))
        )

    def work(self, chance: random.Random) -> None:
        """Let the next request arrive, or the next answer or event, or the view see a change."""
        reaches = self.cut_at_ns is None and self._ended is None
        choices = ["answer"] * bool(self._answers)
        choices += ["request"] * (reaches and bool(self._requests))
        choices += ["see"] * (reaches and self._lags())
        choices += ["late"] * self._may_be_late()
        choice = chance.choice(choices)
        if choice == "see":
            self._see_next()
        elif choice == "late":
            if chance.random() < 0.5:
                self._late.popleft()()
            else:
                self._late.clear()  # what is lost is lost with all that was sent after it
        elif choice == "request":
            request, done = self._requests.popleft()
            answer = request()  # which may tell of changes: those come first
            self._answers.append(_Delivery(done, answer, is_answer=True))
        else:
            delivery = self._answers.popleft()
            delivery.to(delivery.what)

    def _may_be_late(self) -> bool:
        return bool(self._late) and self._server.lives(self.session)

    def _lags(self) -> bool:
        return self._seen < len(self._server.history)

    def _catch_up(self) -> None:
        while self._lags():
            self._see_next()

    def _see_next(self) -> None:
        """Repeat one change in the view: tell what is watched."""
        change = self._server.history[self._seen]
        self._seen += 1
        touched = self._view.commit(change.operations, change.session)[1]
        for path in self._watches.take(touched):
            self._tell(Changed(path))

    def lose(self, chance: random.Random, now_ns: int) -> None:
        """The connection is gone: some requests still arrived, some answers still came; each is
        a prefix, for both are in order."""
        if self.cut_at_ns is not None or self._ended is not None:
            return
        came = chance.randint(0, len(self._answers))
        for place in range(came, len(self._answers)):
            if self._answers[place].is_answer:
                self._answers[place] = self._answers[place]._replace(what=Unknown())
        arrived = chance.randint(0, len(self._requests))
        for place, (request, done) in enumerate(self._requests):
            if place < arrived:
                request()
            else:
                self._late.append(request)
            self._answers.append(_Delivery(done, Unknown(), is_answer=True))
        self._requests.clear()
        if self._server.away:
            self._late.clear()  # with the servers that had received them
        self.cut_at_ns = now_ns
        self._watches.clear()
        self._tell(SessionState.SUSPENDED)

    def find_again(self, *, alive: bool) -> None:
        """The servers can be reached again; the session may have ended there."""
        if self.cut_at_ns is None or self._ended is not None:
            return
        self._late.clear()
        self._watches.clear()  # those of requests that came late
        if alive:
            self.cut_at_ns = None
            self._catch_up()  # what the session asked for is in the view, or never happens
            self._tell(SessionState.CONNECTED)
        else:
            self._end(SessionState.EXPIRED)

    # -- inside ------------------------------------------------------------------------------------

    def _ask(self, request: _Request, done: Callable[[Any], None]) -> None:
        if not self.session and self._ended is None:
            raise ValueError("the store was not started")
        if self._ended is not None or self.cut_at_ns is not None:
            unknown = Unknown(ended=self._ended is not None)
            self._answers.append(_Delivery(done, unknown, is_answer=True))
        else:
            self._requests.append((request, done))

    def _tell(self, event: Event) -> None:
        self._answers.append(_Delivery(self._on_event, event, is_answer=False))

    def _end(self, state: SessionState) -> None:
        self._ended = state
        for _, done in self._requests:
            self._answers.append(_Delivery(done, Unknown(), is_answer=True))
        self._requests.clear()
        self._tell(state)
