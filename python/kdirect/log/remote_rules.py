"""What holds between the properties of tiered storage: Kafka's refusals (``LogConfig.validate`` of
4.1), with a remedy each.

Law of the room: pure checks of values.  A broker's own properties are checked when it starts, a
topic's when it is created or changed, before they are written down; what is written down is not
checked again, so that a topic stays readable whatever the rules become.
"""

from __future__ import annotations

from collections.abc import Sequence

from kdirect.errors import ConfigError
from kdirect.log.config import AS_RETENTION, LogConfig


def check_topic(name: str, config: LogConfig, *, is_internal: bool, was_tiered: bool) -> None:
    """May a topic have these properties?  `was_tiered`: as far as its properties went, until now.
    ConfigError."""
    if not config.wants_remote:
        if was_tiered and not config.remote_delete_on_disable:
            raise ConfigError(
                f"option remote.storage.enable: 'false' is not allowed for topic {name}: its remote"
                " part would be left behind",
                hint="to delete that, set remote.log.delete.on.disable=true as well; to keep it and"
                " copy no more, set remote.log.copy.disable=true instead",
            )
        return
    if not config.remote_system:
        raise ConfigError(
            f"option remote.storage.enable: 'true' is not allowed for topic {name}: the broker has"
            " no tiered storage",
            hint="set remote.log.storage.system.enable=true and remote.log.storage.uri of the"
            " brokers, and restart them",
        )
    if is_internal:
        raise ConfigError(
            f"option remote.storage.enable: 'true' is not allowed for topic {name}: internal topics"
            " are not tiered",
            hint="leave it at false",
        )
    if config.compacts:
        raise ConfigError(
            f"option remote.storage.enable: 'true' is not allowed for topic {name}: its"
            " cleanup.policy names compact, and what is compacted is not tiered",
            hint="give cleanup.policy=delete, or leave remote.storage.enable at false",
        )
    _check_local(config, "")
    if config.remote_copy_disable:
        _check_without_copies(config)
    _check_lag("ms", config.remote_copy_lag_ms, config.effective_local_retention_ms)
    _check_lag("bytes", config.remote_copy_lag_bytes, config.effective_local_bytes)


def check_metadata_topic(name: str, config: LogConfig) -> None:
    """May the topic of the metadata of remote segments have these properties?  ConfigError."""
    if config.retention_ms >= 0 or config.retention_bytes >= 0:
        raise ConfigError(
            f"topic {name} has a retention: what is in remote storage would be forgotten",
            hint="give retention.ms=-1 and retention.bytes=-1",
        )


def check_broker(config: LogConfig) -> None:
    """The same of the broker's defaults, where it has tiered storage."""
    if config.remote_system:
        _check_local(config, "log.")


def refuse_tiered(topics: Sequence[str]) -> None:
    """The broker has no tiered storage: ConfigError if there are `topics` that are tiered.  What of
    them is in remote storage only would be lost to readers, and then deleted."""
    if topics:
        names = ", ".join(topics[:10]) + (f" and {len(topics) - 10} more" if topics[10:] else "")
        one, they = ("topic", "is") if len(topics) == 1 else ("topics", "are")
        raise ConfigError(
            f"remote.log.storage.system.enable is false, and {one} {names} {they} tiered",
            hint="set it to true, with the remote.log.storage.uri that it had; to do without, first"
            " delete these topics, or set remote.storage.enable=false and"
            " remote.log.delete.on.disable=true for them",
        )


def refuse_without_system(config: LogConfig, topics: Sequence[str]) -> None:
    """`refuse_tiered`, if the topics of this configuration are tiered."""
    if config.wants_remote and not config.remote_system:
        refuse_tiered(topics)


def _check_local(config: LogConfig, prefix: str) -> None:
    """Local retention may not be above that of the whole log."""
    for unit, local, whole in (
        ("ms", config.local_retention_ms, config.retention_ms),
        ("bytes", config.local_retention_bytes, config.retention_bytes),
    ):
        if local == AS_RETENTION or whole < 0 or 0 <= local <= whole:
            continue
        raise ConfigError(
            f"option {prefix}local.retention.{unit}: '{local}' is not allowed: it is above"
            f" {prefix}retention.{unit}, which is {whole}",
            hint=f"give at most {whole}, or -2 for the same",
        )


def _check_without_copies(config: LogConfig) -> None:
    """Nothing more is copied, so that what is here is all that there will be."""
    for unit, local, whole in (
        ("ms", config.local_retention_ms, config.retention_ms),
        ("bytes", config.local_retention_bytes, config.retention_bytes),
    ):
        if local not in (AS_RETENTION, whole):
            raise ConfigError(
                f"option local.retention.{unit}: '{local}' is not allowed with"
                " remote.log.copy.disable=true: nothing that goes here would be left anywhere",
                hint=f"give {whole}, which is retention.{unit}, or -2 for the same",
            )


def _check_lag(unit: str, lag: int, local: int) -> None:
    """A segment may not have to wait for longer than it stays."""
    if lag > 0 and 0 <= local < lag:
        raise ConfigError(
            f"option remote.copy.lag.{unit}: '{lag}' is not allowed: it is above the local"
            f" retention, which is {local}",
            hint=f"give at most {local}, or -1 for the same",
        )


__all__ = [
    "check_broker",
    "check_metadata_topic",
    "check_topic",
    "refuse_tiered",
    "refuse_without_system",
]
