"""Which transport a follower tries next, when one has not worked with its leader."""

from __future__ import annotations

from kdirect.broker.push_links import CUTS, FIRST_HOLD_S, LONGEST_HOLD_S, TransportTrials

LEADER, PROCESS, WHY = 1, 17, "it was cut"


def test_what_did_not_work_is_left_alone_for_longer_each_time() -> None:
    now = [0.0]
    trials = TransportTrials(lambda: now[0])
    assert trials.held(LEADER, PROCESS, "shm") == ""
    assert trials.failed(LEADER, PROCESS, "shm", WHY) == FIRST_HOLD_S, "said once"
    holds = []
    for _ in range(5):
        assert trials.held(LEADER, PROCESS, "shm") == WHY
        assert trials.held(LEADER, PROCESS, "verbs") == ""
        assert trials.held(LEADER, PROCESS + 1, "shm") == "", "another process may work"
        began = now[0]
        while trials.held(LEADER, PROCESS, "shm"):
            now[0] += 1
        holds.append(now[0] - began)
        assert trials.failed(LEADER, PROCESS, "shm", WHY) == 0, "it was said"
    assert holds == sorted(holds) and holds[0] == FIRST_HOLD_S and holds[-1] == LONGEST_HOLD_S


def test_what_has_worked_begins_again() -> None:
    now = [0.0]
    trials = TransportTrials(lambda: now[0])
    trials.failed(LEADER, PROCESS, "shm", WHY)
    trials.worked(LEADER, PROCESS, "shm")
    assert trials.held(LEADER, PROCESS, "shm") == ""
    assert trials.failed(LEADER, PROCESS, "shm", WHY) == FIRST_HOLD_S


def test_links_that_are_cut_early_may_have_another_reason() -> None:
    trials = TransportTrials(lambda: 0.0)
    for _ in range(2):
        for _ in range(CUTS - 1):
            assert trials.cut(LEADER, PROCESS, "shm", WHY) == 0
            assert trials.held(LEADER, PROCESS, "shm") == ""
        trials.worked(LEADER, PROCESS, "shm")
    for n in range(CUTS):
        assert trials.cut(LEADER, PROCESS, "shm", WHY) == (FIRST_HOLD_S if n == CUTS - 1 else 0)
    assert trials.held(LEADER, PROCESS, "shm") == WHY


def test_processes_that_are_gone_are_forgotten() -> None:
    trials = TransportTrials(lambda: 0.0)
    trials.failed(LEADER, PROCESS, "shm", WHY)
    trials.failed(2, PROCESS, "shm", WHY)
    trials.forget_all_but({LEADER: PROCESS + 1, 2: PROCESS}.__getitem__)
    assert trials.held(LEADER, PROCESS, "shm") == ""
    assert trials.held(2, PROCESS, "shm") == WHY
