"""The producer of a task attempt (`kdirect.client.attempts`).

A transactional producer whose transaction others begin and end: its id, producer id and epoch were
handed out when the attempt joined, and the commit of the batch ends it, or an abort.  Everything
else is as with `Producer`, whichever way records go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kdirect.client.attempts import Attempt
from kdirect.client.connections import Handle
from kdirect.client.producer import Producer
from kdirect.client.transaction import Phase
from kdirect.errors import TransactionError


class AttemptProducer(Producer):
    """See the module; made by `Session.attempt_producer`.

    `flush` raises where a record was not delivered, and the attempt has failed then: it must not be
    named in the commit of its batch.  `close` and `abort` leave the transaction open on the broker.
    """

    def __init__(self, settings: Mapping[str, Any], attempt: Attempt, *, session: Handle) -> None:
        super().__init__(
            {**settings, "transactional.id": attempt.transactional_id}, session=session
        )
        machine = self._transaction
        assert machine is not None
        machine.producer_id, machine.epoch = attempt.producer_id, attempt.epoch
        machine.version = 2  # every broker that hands out attempts adds partitions by itself
        machine.phase = Phase.READY
        machine.begin()
        self._driver.begin_transaction(attempt.producer_id, attempt.epoch)
        self.attempt = attempt

    def flush(self, timeout: float | None = None) -> int:
        """As `Producer.flush`, and raises why the attempt has failed, if it has."""
        unsent = super().flush(timeout)
        with self._lock:
            self._notice_failures()
            if self._transaction is not None:
                self._transaction.check()
        return unsent

    def _refuse(self, call: str) -> NoReturn:
        raise TransactionError(
            f"{call}: the transaction of {self.attempt.transactional_id!r} belongs to an attempt",
            hint="Session.commit_attempts commits it, with the others of its batch",
        )

    def init_transactions(self, timeout: float | None = None) -> None:
        """Refused: the attempt has joined already."""
        self._refuse("init_transactions")

    def begin_transaction(self) -> None:
        """Refused: the transaction is open."""
        self._refuse("begin_transaction")

    def send_offsets_to_transaction(
        self, offsets: Any, group_metadata: Any, timeout: float | None = None
    ) -> None:
        """Refused: a job keeps its offsets itself."""
        self._refuse("send_offsets_to_transaction")

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Refused: see `Session.commit_attempts`."""
        self._refuse("commit_transaction")

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Refused: see `Session.abort_attempts`."""
        self._refuse("abort_transaction")
