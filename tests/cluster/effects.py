"""Hands events to the machines of a world's replicas, and carries out what they answer."""

from __future__ import annotations

from kdirect.cluster import following_replica as following_rules
from kdirect.cluster import leading_replica as leading_rules
from kdirect.cluster.leading_replica import Leading
from tests.cluster.world import DOWN, Ask, Broken, Confirmation, Proposal, Replica, World, show


def registered(world: World) -> tuple[tuple[int, int], ...]:
    """The brokers that live, as the store tells of them."""
    return tuple(
        (broker, incarnation)
        for broker, incarnation in enumerate(world.registered)
        if incarnation != DOWN
    )


def confirmation_of(world: World, broker: int) -> Confirmation:
    following = world.replicas[broker].following
    return Confirmation(broker, world.registered[broker], following.epoch, following.end)


def put(world: World, broker: int, replica: Replica) -> World:
    replicas = world.replicas[:broker] + (replica,) + world.replicas[broker + 1 :]
    return world._replace(replicas=replicas)


def with_confirmation(world: World, confirmation: Confirmation) -> World:
    if confirmation in world.confirmations:
        return world
    return world._replace(confirmations=tuple(sorted((*world.confirmations, confirmation))))


def lead(world: World, broker: int, event: leading_rules.Event) -> World:
    replica = world.replicas[broker]
    assert replica.leading is not None
    leading, effects = leading_rules.step(replica.leading, event)
    world = put(world, broker, replica._replace(leading=leading))
    return _of_leading(world, broker, leading, effects)


def _of_leading(
    world: World, broker: int, leading: Leading, effects: tuple[leading_rules.Effect, ...]
) -> World:
    for effect in effects:
        match effect:
            case leading_rules.ShowHighWatermark(offset):
                world = show(world, broker, offset)
            case leading_rules.Propose():
                proposal = Proposal(broker, leading.state.leader_epoch, effect)
                world = world._replace(proposals=tuple(sorted((*world.proposals, proposal))))
    return world


def follow(world: World, broker: int, event: following_rules.Event) -> World:
    replica = world.replicas[broker]
    following, effects = following_rules.step(replica.following, event)
    if following is not replica.following:
        world = put(world, broker, replica._replace(following=following))
    for effect in effects:
        world = _of_following(world, broker, effect)
    return world


def _of_following(world: World, broker: int, effect: following_rules.Effect) -> World:
    replica = world.replicas[broker]
    match effect:
        case following_rules.Fence(epoch):
            return put(world, broker, replica._replace(fencing=epoch, asking=None))
        case following_rules.AskEpochEnd():
            return put(world, broker, replica._replace(asking=Ask(*effect)))
        case following_rules.Truncate() | following_rules.StartOver():
            return put(world, broker, replica._replace(cutting=effect, asking=None))
        case following_rules.Grant(_, epoch, _):
            return put(world, broker, replica._replace(granted=epoch, asking=None))
        case following_rules.Confirm():
            return with_confirmation(world, confirmation_of(world, broker))
        case following_rules.ShowHighWatermark():
            return world  # `check` compares it with what leaders have shown
        case following_rules.TellLoss():
            if not world.void:
                raise Broken("committed records are cut off, and no election was unclean")
            return world
        case following_rules.BeginToLead(_, end, high_watermark):
            return _begin_to_lead(world, broker, end, high_watermark)


def _begin_to_lead(world: World, broker: int, end: int, high_watermark: int) -> World:
    replica = world.replicas[broker]
    assert replica.known is not None
    leading, effects = leading_rules.begin(
        broker,
        replica.known,
        world.assigned,
        end=end,
        high_watermark=high_watermark,
        now_ms=0,
        min_in_sync=world.min_in_sync,
        registered=registered(world),
    )
    world = put(world, broker, replica._replace(leading=leading, known=None, pushed=()))
    return _of_leading(world, broker, leading, effects)
