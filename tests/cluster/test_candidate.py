"""How a broker becomes controller, event by event."""

from __future__ import annotations

import pytest

from kdirect.cluster import candidate as rules
from kdirect.cluster import paths, records
from kdirect.cluster.candidate import (
    Candidate,
    Claim,
    Claimed,
    Connected,
    ControllerDied,
    Depose,
    Ended,
    Lead,
    Look,
    Looked,
    Noticed,
    Phase,
    Release,
    Released,
    Report,
    Resigned,
    step,
)
from kdirect.store.contract import (
    Check,
    Committed,
    Conflict,
    Create,
    Delete,
    Found,
    Node,
    Reason,
    Replace,
    Unknown,
)


def looked(
    controller: int | None = None, epoch: int = 7, *, mine: bool = False, created: int = 1
) -> Looked:
    """Who is controller, and the epoch, whose node has the epoch as its version."""
    node = None
    if controller is not None:
        node = Node(records.encode_controller(controller, 0), 0, created, mine)
    return Looked(Found((node, Node(str(epoch).encode(), epoch, 1))), 1234)


def follow(*events: rules.Event) -> tuple[Candidate, tuple[rules.Effect, ...]]:
    """Broker 1 after these events, and what the last one led to."""
    candidate, effects = rules.begin(1), ()
    for event in events:
        candidate, effects = step(candidate, event)
    return candidate, effects


CLAIM = Claim(
    (
        Create(paths.CONTROLLER, records.encode_controller(1, 1234), ephemeral=True),
        Replace(paths.CONTROLLER_EPOCH, b"8", 7),
    )
)
USURP = Claim((Delete(paths.CONTROLLER, 0), *CLAIM.operations))


def usurp(epoch: int) -> Claim:
    """The claim of a controller whose node is another session's, when the epoch is this."""
    take, node, _ = USURP.operations
    number = Replace(paths.CONTROLLER_EPOCH, str(epoch + 1).encode(), epoch)
    return Claim((take, node, number))


DIED = (Connected(), looked(2), ControllerDied(2))
LEADING = (Connected(), looked(), Claimed(Committed((0, 8))))
GIVE_BACK = Release((Check(paths.CONTROLLER_EPOCH, 8), Delete(paths.CONTROLLER)))
REPLACED = Depose("another broker has become controller")
ENDED = Depose("its session with the metadata store has ended")
CONFLICT = Conflict(0, Reason.EXISTS)
AFTER_LOSS = (Connected(), looked(), Claimed(Unknown()), Connected())

# What came before, what comes, where that leads, what it has done.
TABLE = [
    ((), Connected(), Phase.LOOKING, (Look(),)),
    ((Connected(),), looked(), Phase.CLAIMING, (CLAIM,)),
    ((Connected(),), looked(2), Phase.WATCHING, ()),
    ((Connected(),), Looked(Unknown(), 0), Phase.WAITING, ()),
    ((Connected(), looked(2)), Noticed(), Phase.LOOKING, (Look(),)),
    ((Connected(), looked(2)), ControllerDied(2), Phase.LOOKING, (Look(),)),
    ((Connected(), looked(2)), ControllerDied(3), Phase.WATCHING, ()),
    (DIED, looked(2), Phase.CLAIMING, (USURP,)),
    (DIED, looked(), Phase.CLAIMING, (CLAIM,)),
    (DIED, looked(2, created=5), Phase.WATCHING, ()),  # another process of it
    ((*DIED, looked(2), Claimed(CONFLICT)), looked(3, created=5), Phase.WATCHING, ()),
    ((*DIED, looked(2), Claimed(Unknown()), Connected()), looked(2), Phase.CLAIMING, (USURP,)),
    ((Connected(), Noticed()), looked(2), Phase.LOOKING, (Look(),)),
    ((Connected(), looked()), Claimed(Committed((0, 8))), Phase.LEADING, (Lead(8),)),
    ((Connected(), looked()), Claimed(CONFLICT), Phase.LOOKING, (Look(),)),
    ((Connected(), looked()), Claimed(Unknown()), Phase.WAITING, ()),
    ((Connected(), looked(), Connected()), Claimed(Unknown()), Phase.LOOKING, (Look(),)),
    # The lost claim happened; it did not, and nobody else has claimed; somebody else has.
    (AFTER_LOSS, looked(1, 8, mine=True), Phase.LEADING, (Lead(8),)),
    (AFTER_LOSS, looked(), Phase.CLAIMING, (CLAIM,)),
    (AFTER_LOSS, looked(2, 8), Phase.WATCHING, ()),
    # A watch tells of the own claim.
    ((*LEADING, Noticed()), looked(1, 8, mine=True), Phase.LEADING, ()),
    ((*LEADING, Noticed()), looked(2, 9), Phase.WATCHING, (REPLACED,)),
    ((*LEADING,), Ended(), Phase.ENDED, (ENDED,)),
    ((Connected(),), Ended(), Phase.ENDED, ()),
    ((*LEADING, Ended()), Connected(), Phase.ENDED, ()),
    (LEADING, Resigned(), Phase.RELEASING, (GIVE_BACK,)),
    ((*LEADING, Resigned()), Noticed(), Phase.RELEASING, ()),
    ((*LEADING, Resigned()), Released(), Phase.LOOKING, (Look(),)),
    # The node was not given back, for the answer was lost: it still counts, in its epoch.
    ((*LEADING, Resigned(), Released()), looked(1, 8, mine=True), Phase.LEADING, (Lead(8),)),
    ((Connected(),), Resigned(), Phase.LOOKING, ()),
    ((Connected(), looked(2)), looked(), Phase.WATCHING, ()),
    ((Connected(),), Claimed(Committed((0, 8))), Phase.LOOKING, ()),
    ((Connected(),), Released(), Phase.LOOKING, ()),
]  # fmt: skip


@pytest.mark.parametrize(("before", "event", "phase", "effects"), TABLE)
def test_table(before, event, phase, effects) -> None:
    candidate, _ = follow(*before)
    candidate, made = step(candidate, event)
    assert (candidate.phase, made) == (phase, effects)


def test_who_is_controller_is_known() -> None:
    assert follow(Connected())[0].controller == rules.NOBODY
    assert follow(Connected(), looked(2))[0].controller == 2
    assert follow(*LEADING)[0].controller == 1
    assert follow(*LEADING, Noticed(), looked(2, 9))[0].controller == 2
    assert follow(*LEADING, Noticed())[0].leads
    assert not follow(*LEADING, Resigned())[0].leads


def test_the_node_of_an_older_process_of_the_same_broker_is_taken() -> None:
    """This process is registered, so the older one has ended, or will hear that its session has."""
    assert follow(Connected(), looked(1))[1] == (USURP,)
    assert follow(*LEADING, Noticed(), looked(1, 9))[1] == (REPLACED, usurp(9))


def test_the_own_claim_being_noticed_before_its_answer_leads_once() -> None:
    candidate, effects = follow(Connected(), looked(), Noticed(), Claimed(Committed((0, 8))))
    assert effects == (Lead(8), Look())
    assert step(candidate, looked(1, 8, mine=True))[1] == ()


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        (Found((None, None)), paths.CONTROLLER_EPOCH),
        (Found((None, Node(b"x", 7, 1))), paths.CONTROLLER_EPOCH),
        (Found((Node(b"{}", 0, 1), Node(b"7", 7, 1))), paths.CONTROLLER),
    ],
)
def test_a_damaged_node_is_reported_and_nobody_claims(answer, path) -> None:
    candidate, (report,) = follow(Connected(), Looked(answer, 0))
    assert isinstance(report, Report)
    assert path in report.error
    assert candidate.phase is Phase.WATCHING
    _, effects = follow(*LEADING, Noticed(), Looked(answer, 0))
    assert [type(effect) for effect in effects] == [Depose, Report]


def test_a_store_that_takes_no_claim_is_reported_and_not_asked_again_and_again() -> None:
    refused = Claimed(Conflict(0, Reason.REFUSED, "read-only"))
    candidate, (report,) = follow(Connected(), looked(), refused)
    assert isinstance(report, Report)
    assert "read-only" in report.error
    assert candidate.phase is Phase.WATCHING


def test_what_is_noticed_while_a_claim_is_refused_is_looked_at() -> None:
    """Else nobody would claim in a store that takes claims again."""
    refused = Claimed(Conflict(0, Reason.REFUSED, "read-only"))
    candidate, effects = follow(Connected(), looked(), Noticed(), refused)
    assert [type(effect) for effect in effects] == [Report, Look]
    assert candidate.phase is Phase.LOOKING
    candidate, effects = follow(Connected(), looked(), Noticed(), refused, looked())
    assert [type(effect) for effect in effects] == [Claim]


def test_an_epoch_that_was_edited_while_this_broker_led_ends_that() -> None:
    candidate, effects = follow(*LEADING, Noticed(), looked(1, 11, mine=True))
    assert effects == (
        Depose(f"{paths.CONTROLLER_EPOCH} was edited"),
        Release((Delete(paths.CONTROLLER),)),
    )
    assert candidate.phase is Phase.RELEASING
