"""The search for a lost broker: attempt after attempt, in a time that the test moves itself."""

from __future__ import annotations

import pytest

from kdirect.client.lost_broker import Search
from kdirect.errors import BrokerUnavailableError
from kdirect.wire.environment import Environment


class Attempt:
    """A call whose end the test decides."""

    def __init__(self, call):
        self.result = call
        self.done = False
        self.waited = []

    def wait(self, seconds):
        self.waited.append(seconds)
        return self.done


class Manual(Environment):
    def __init__(self):
        self.now = 100.0
        self.attempts = []

    def monotonic(self):
        return self.now

    def spawn(self, call):
        self.attempts.append(Attempt(call))
        return self.attempts[-1]


def test_pauses_grow_from_attempt_to_attempt_and_failures_are_told_once():
    environment, answers = Manual(), [False] * 7 + [True]

    def reach():
        if not answers.pop(0):
            raise BrokerUnavailableError("away", hint="wait")
        return "connection"

    search = Search(environment, reach, first_ms=100, most_ms=2000)
    pauses = []
    for count in range(1, 8):
        assert search.found() is None and len(environment.attempts) == count
        assert search.found() is None, "one attempt at a time"
        environment.attempts[-1].done = True
        with pytest.raises(BrokerUnavailableError):
            search.found()
        assert search.found() is None and len(environment.attempts) == count, "it pauses"
        pauses.append(search.next_attempt - environment.now)
        environment.now = search.next_attempt
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert search.found() is None
    environment.attempts[-1].done = True
    assert search.found() == "connection"


def test_a_search_may_begin_later_and_is_waited_for_only_while_it_asks():
    environment = Manual()
    search = Search(environment, lambda: True, after_s=1.0)
    assert search.found() is None and not environment.attempts
    assert not search.wait(200.0)
    environment.now += 1
    assert search.found() is None and len(environment.attempts) == 1
    assert search.wait(101.5)
    assert environment.attempts[0].waited == [pytest.approx(0.5)]
