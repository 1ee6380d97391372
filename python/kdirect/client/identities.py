"""Under which identity an idempotent producer writes each of its partitions.

Owns: the producer id, asked for once, and one `ProducerIdentity` for each partition.  What may not
enter: the stamp of batches (`kdirect.client.idempotence`).  One thread at a time: the producer's
lock.
"""

from __future__ import annotations

import logging
from typing import Any

from kdirect.client.idempotence import ProducerIdentity
from kdirect.client.producing_session import ProducingSession
from kdirect.client.transaction import Transaction
from kdirect.errors import ConfigError, KdirectError
from kdirect.model import TopicPartition

log = logging.getLogger("kdirect.client")


class Identities:
    """See the module.  ConfigError for settings that contradict each other."""

    def __init__(self, session: ProducingSession, settings: dict[str, Any]) -> None:
        self.idempotent = _idempotent(settings)
        name = settings["transactional.id"]
        self.transaction = Transaction(name) if name else None
        self._session = session
        self._producer_id: tuple[int, int] | None = None
        self._identities: dict[TopicPartition, ProducerIdentity] = {}

    def of(self, tp: TopicPartition) -> ProducerIdentity | None:
        """Under which this producer writes `tp`; None without idempotence.  Asks the broker for a
        producer id the first time."""
        identity = self._identities.get(tp)
        if identity is None and self.transaction is not None:
            identity = self._identities[tp] = ProducerIdentity(
                self.transaction.producer_id, self.transaction.epoch, None, transactional=True
            )
        if identity is None and self.idempotent:
            if self._producer_id is None:
                self._producer_id = self._session.new_producer_id()
                if self._producer_id is None:
                    log.warning(
                        "the broker gives out no producer ids: what is repeated may be there twice"
                    )
                    self.idempotent = False
                    return None
            identity = self._identities[tp] = ProducerIdentity(
                *self._producer_id, self._session.new_producer_id
            )
        return identity

    def restart(self, producer_id: int, epoch: int) -> None:
        """The next transaction has this id and epoch."""
        for identity in self._identities.values():
            identity.restart(producer_id, epoch)

    def renew(self, tp: TopicPartition) -> None:
        """A request of `tp` will never be delivered: go on after the gap, in a new sequence."""
        identity = self._identities.get(tp)
        if identity is not None and self.transaction is None:  # else it can only be aborted
            log.info("%s: what follows goes on under a new sequence", tp)
            try:
                identity.renew()
            except KdirectError as e:
                # Whoever waits for this request hears of it all the same.  The broker refuses what
                # follows the gap, and then a new sequence is begun again.
                log.warning("%s: no new producer id for now: %s", tp, e)


def _idempotent(settings: dict[str, Any]) -> bool:
    wanted = settings["enable.idempotence"]
    waits = settings["acks"] in ("all", "-1")
    if settings["transactional.id"] and (wanted is False or not waits):
        raise ConfigError(
            f"transactional.id with acks={settings['acks']} and enable.idempotence={wanted}",
            hint="a transactional producer needs acks=all and idempotence",
        )
    if wanted and not waits:
        raise ConfigError(
            f"enable.idempotence with acks={settings['acks']}",
            hint="use acks=all, or switch enable.idempotence off",
        )
    return waits if wanted is None else bool(wanted)
