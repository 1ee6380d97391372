"""A client's TCP connections to the simulated broker: requests are executed whole, answers take
their time, and either can be lost with the connection."""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any

from kdirect.broker.access import AccessAnswer
from kdirect.errors import BrokerUnavailableError, TimedOutError
from kdirect.log.clock import now_ms

if TYPE_CHECKING:
    from harness import Simulation


def append_to(access: Any, partition: Any, data: bytes) -> Any:
    """What the broker's Produce does with whole batches: the result, or a future of it."""
    at_ms = now_ms()
    result = access.produce.append_nowait(partition, data, at_ms)
    return access.produce.append(partition, data, at_ms) if result is None else result


def whole(answer: AccessAnswer) -> AccessAnswer:
    """An answer whose work, which only lets others have their turn, is done."""
    if answer.work is None:
        return answer
    while True:
        try:
            answer.work.send(None)
        except StopIteration as end:
            return AccessAnswer(end.value)


class Control:
    """A client's TCP connection: requests are executed whole; answers may take their time."""

    peer = "simulated broker"
    client_id = "client"
    host, port = "sim", 1  # where `SimSession.leader_address` leads
    error = "the broker is gone"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._access = simulation.access
        self.closed = False

    def request(self, message: Any, timeout_ms: float | None = None) -> Any:
        simulation = self._simulation
        simulation.give_way()
        if self.closed or self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        answer = simulation.execute(lambda: whole(self._access.handle(self, message)))
        response, waiting = answer.response, answer.waiting
        if waiting is not None:
            simulation.give_way(lambda: waiting.done() or self.closed)
            if not waiting.done():
                raise BrokerUnavailableError("the broker is gone", hint="connect again")
            response = waiting.result()
        simulation.give_way()
        return response

    def submit(self, message: Any, timeout_ms: float | None = None) -> SimAsked:
        """As `request`, without waiting for the answer."""
        simulation = self._simulation
        simulation.give_way()
        if self.closed or self._access is not simulation.access:
            self.closed = True
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        return SimAsked(
            simulation, self, simulation.execute(lambda: whole(self._access.handle(self, message)))
        )

    def version_for(self, message: Any) -> int:
        return 3


class SimAsked:
    """The answer to a request for access that nobody waits for yet: it arrives a while after it was
    made."""

    def __init__(self, simulation: Simulation, control: Control, answer: AccessAnswer) -> None:
        self._simulation = simulation
        self._control = control
        self._answer = answer
        self._arrived = False
        simulation.network.call_later(
            simulation.network.random.randint(1000, 200_000), self._arrive
        )

    def _arrive(self) -> None:
        self._arrived = True

    @property
    def done(self) -> bool:
        waiting = self._answer.waiting
        return self._control.closed or (self._arrived and (waiting is None or waiting.done()))

    def wait(self, timeout_ms: float) -> bool:
        return self._simulation.wait(lambda: self.done, timeout_ms)

    def result(self, timeout_ms: float | None = None) -> Any:
        assert self.done
        if self._control.closed:
            raise BrokerUnavailableError("the broker is gone", hint="connect again")
        waiting = self._answer.waiting
        return self._answer.response if waiting is None else waiting.result()


class SimPending:
    """An answer on its way over TCP."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection
        self.answer: Any = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self._connection.closed

    def wait(self, timeout_ms: float) -> bool:
        return self._connection.simulation.wait(lambda: self.done, timeout_ms)

    def result(self, timeout_ms: float) -> Any:
        self.wait(timeout_ms)
        if self.answer is not None:
            return self.answer
        if self._connection.closed:
            raise BrokerUnavailableError("the connection was lost", hint="connect again")
        raise TimedOutError(f"no answer within {timeout_ms} ms", hint="wait longer")


class SimConnection:
    """Produce requests over TCP: executed in order, each whole; the connection may be lost before
    or after, `Simulation.lose` of them."""

    is_kdirect = True

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.closed = False
        self._access = simulation.access
        self._last_ns = 0
        self._arriving: deque[SimPending] = deque()

    def submit_later(self, message: Any, *, most: int | None = None) -> SimPending:
        simulation, network = self.simulation, self.simulation.network
        pending = SimPending(self)
        data = bytes(message.topic_data[0].partition_data[0].records)
        self._last_ns = max(self._last_ns, network.now_ns + network.random.randint(1000, 200_000))
        self._arriving.append(pending)

        def arrive() -> None:
            if self.closed or simulation.ended or self._access is not simulation.access:
                self.closed = True
                return
            if (
                simulation.busy
                or network.now_ns < simulation.broker_stopped_until
                or self._arriving[0] is not pending
            ):
                network.call_later(
                    max(10_000, simulation.broker_stopped_until - network.now_ns), arrive
                )
                return
            self._arriving.popleft()
            lost = network.random.random() < simulation.lose
            if lost and network.random.random() < 0.5:
                self.closed = True
                return
            result = simulation.execute(lambda: append_to(self._access, simulation.partition, data))
            self.closed = self.closed or lost
            answer(result)

        def answer(result: Any) -> None:
            if hasattr(result, "done"):
                if not result.done():
                    if self._access is simulation.access and not simulation.ended:
                        network.call_later(20_000, lambda: answer(result))
                    else:
                        self.closed = True
                    return
                result = result.result()
            partition = types.SimpleNamespace(
                index=0,
                error_code=result.error,
                base_offset=result.base_offset,
                log_append_time_ms=-1,
                error_message=None,
            )
            done = types.SimpleNamespace(
                responses=[types.SimpleNamespace(name="t", partition_responses=[partition])]
            )
            network.call_later(
                network.random.randint(1000, 100_000), lambda: setattr(pending, "answer", done)
            )

        network.call_later(self._last_ns - network.now_ns, arrive)
        return pending

    def poll(self) -> None:
        """Answers come by themselves."""

    def abort(self, error: BaseException) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True
