"""The transactions of a producer: the calls of confluent-kafka, over `Transaction`.

Owns: the calls that begin and end transactions, what they wait for, and what has to be so before a
record may go to a partition.  What may not enter: what is asked of whom (`transaction`), how it is
asked (`transaction_link`), and the ways of records (`produce_driver`).

A call that ran out of time is a TimedOutError; to call it again goes on with what it began.
docs/transactions.md says what users see.
"""

from __future__ import annotations

from typing import Any

from kdirect.client.arguments import Offsets, as_offsets
from kdirect.client.connections import Handle
from kdirect.client.deliveries import Sent
from kdirect.client.producer_batches import SLICE_MS, TURN_S, ProducerBatches
from kdirect.client.transaction import GroupMetadata, Phase, Transaction
from kdirect.client.transaction_link import TransactionLink
from kdirect.errors import (
    AccessDeniedError,
    BrokerError,
    ConfigError,
    DeliveryError,
    KdirectError,
    TimedOutError,
    TransactionError,
)
from kdirect.model import TopicPartition


class ProducerTransactions(ProducerBatches):
    """See the module."""

    def __init__(self, session: Handle, settings: dict[str, Any]) -> None:
        super().__init__(session, settings)
        self._resolve_futures = self._callbacks.resolve_futures
        self._run_callbacks = self._callbacks.run
        self._transaction: Transaction | None = self._driver.transaction
        self._coordinators: TransactionLink | None = None
        self._named: set[TopicPartition] = set()  # by a call that sends columns
        self._transaction_s: float = settings["transaction.timeout.ms"] / 1000
        if self._transaction is not None:
            self._coordinators = TransactionLink(session.cluster, settings, self._transaction)
            self._driver.about_to_write = lambda: {*self._open, *self._named}
            self._driver.kept_off = self._kept_off

    # -- calls -------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float | None = None) -> None:
        """Get a producer id for `transactional.id`, once, before the first transaction.  Fences an
        earlier producer of that name, and waits until what it left has ended.

        `timeout` in seconds, as of the other calls; None, or below 0: transaction.timeout.ms.
        TimedOutError, after which the call may be repeated; TransactionError when the coordinator
        refuses."""
        with self._lock:
            self._machine().initialize()
        self._go_on(self._until(timeout), "init_transactions")

    def begin_transaction(self) -> None:
        """Begin a transaction.  TransactionError, if one is open or the producer is not
        initialized."""
        with self._lock:
            machine = self._machine()
            renews = machine.phase is Phase.INITIALIZING and machine.number > 0
        if renews:  # the transaction before has left a gap
            self._go_on(self._until(None), "begin_transaction")
        with self._lock:
            self._driver.errors.clear()
            machine.begin()
            self._driver.begin_transaction(machine.producer_id, machine.epoch)

    def send_offsets_to_transaction(
        self, offsets: Offsets, group_metadata: GroupMetadata | Any, timeout: float | None = None
    ) -> None:
        """Commit offsets of a group, those of the next records to read, if and when the transaction
        commits.  `group_metadata` is what `Consumer.consumer_group_metadata` returned.
        TransactionAbortableError when the member does not belong to the group any more."""
        wanted = as_offsets(offsets)
        if not isinstance(group_metadata, GroupMetadata):
            raise ConfigError(
                f"{group_metadata!r} names no member of a group",
                hint="give what Consumer.consumer_group_metadata() returns",
            )
        if any(offset < 0 for offset in wanted.values()):
            raise ConfigError(
                "offsets to commit are of the next record to read, and not below 0",
                hint="give a mapping from TopicPartition to the offset",
            )
        with self._lock:
            machine = self._machine()
            self._notice_failures()
            machine.check_open("send_offsets_to_transaction")
            if wanted:
                machine.send_offsets(group_metadata, wanted)
        self._go_on(self._until(timeout), "send_offsets_to_transaction")

    def commit_transaction(self, timeout: float | None = None) -> None:
        """Flush, then commit: all records of the transaction and its offsets are visible, or none.

        TransactionAbortableError when a record was not delivered: call `abort_transaction`.
        TimedOutError: not known yet, so call it again.  ProducerFencedError: another producer of
        this name has taken over, and nothing was committed."""
        until = self._until(timeout)
        with self._lock:
            machine = self._machine()
            committing = machine.phase is Phase.COMMITTING
            if not committing:
                self._notice_failures()
                machine.check_open("commit_transaction")
        if not committing:
            self._flush_transaction(until)
            with self._lock:
                self._driver.leave_transaction(until)
                machine.commit()
        self._go_on(until, "commit_transaction", Phase.COMMITTING)

    def abort_transaction(self, timeout: float | None = None) -> None:
        """Give up what is not sent, and abort: no reader with `isolation.level=read_committed` sees
        a record of the transaction.  TimedOutError: call it again."""
        until = self._until(timeout)
        with self._lock:
            machine = self._machine()
            aborting = machine.phase is Phase.ABORTING
            if not aborting:
                machine.check_abortable()
                self._drop_gathered("the transaction was aborted")
        if not aborting:
            self._empty_flight(until)
            with self._lock:
                self._driver.errors.clear()
                self._driver.leave_transaction(until)
                machine.abort()
        self._resolve_futures()
        self._run_callbacks()
        self._go_on(until, "abort_transaction", Phase.ABORTING)

    def flush(self, timeout: float | None = None) -> int:
        """See `Producer.flush`."""
        raise NotImplementedError

    # -- within ------------------------------------------------------------------------------------

    def _machine(self) -> Transaction:
        self._check()
        if self._transaction is None:
            raise ConfigError(
                "the producer has no transactional.id", hint="make it with a transactional.id"
            )
        return self._transaction

    def _until(self, timeout: float | None) -> float:
        if timeout is None or timeout < 0:
            timeout = self._transaction_s
        return self._monotonic() + timeout

    def _go_on(self, until: float, call: str, phase: Phase | None = None) -> None:
        """Ask coordinators until nothing is pending, or until the phase is over."""
        machine, link = self._transaction, self._coordinators
        assert machine is not None and link is not None
        while True:
            with self._lock:
                self._check()
                left_ms = (until - self._monotonic()) * 1000
                try:
                    if phase is not None and machine.phase is not phase:
                        machine.check()
                        return
                    if link.turn(left_ms):
                        return
                except KdirectError:
                    self._give_back_if_failed()
                    raise
                if left_ms <= 0:
                    link.give_up()
                    raise TimedOutError(
                        f"{call}: no answer of the coordinator of"
                        f" {machine.transactional_id!r} in time",
                        hint=f"call {call} again, which goes on with it",
                    )
            link.wait(until)

    def _flush_transaction(self, until: float) -> None:
        """Every record of the transaction is acknowledged; else raises."""
        machine = self._machine()
        try:
            unsent = self.flush(max(0.0, until - self._monotonic()))
        except DeliveryError as e:
            self._fail(e)
            unsent = 0
        with self._lock:
            self._notice_failures()
            machine.check_open("commit_transaction")
        if unsent:
            raise TimedOutError(
                f"commit_transaction: {unsent} records are not delivered yet",
                hint="call commit_transaction again, or abort_transaction",
            )

    def _empty_flight(self, until: float) -> None:
        """Nothing of the transaction is under way any more.  What is not answered in time is given
        up."""
        while True:
            with self._lock:
                self._check()
                done = self._driver.wait_answered(SLICE_MS)
                self._take_outcomes()
                if not done and self._monotonic() >= until:
                    self._expire_all()
                    done = True
                if done:
                    return
            self._environment.sleep(TURN_S)

    def _leave_coordinators(self) -> None:
        """The producer ends.  The coordinator aborts what is open, once its time is over or another
        producer of this name comes."""
        if self._coordinators is not None:
            self._coordinators.close()

    def _notice_failures(self) -> None:
        """Records without a callback may have failed; their errors are the transaction's."""
        self._take_outcomes()
        for error in self._driver.errors:
            self._fail(error)
        if self._driver.errors and self._transaction is not None:
            self._driver.errors.clear()

    def _fail(self, error: KdirectError) -> None:
        if self._transaction is not None:
            cause = error.__cause__
            code = cause.code if isinstance(cause, BrokerError) else -1
            self._transaction.failed(error, code)
            self._give_back_if_failed()

    def _kept_off(self, error: AccessDeniedError) -> None:
        """Another producer holds a partition of the transaction alone, and stays.  It may wait for
        one that this producer holds, so this transaction fails, and gives its heads back."""
        self._fail(error)
        machine = self._transaction
        if machine is not None and machine.phase is Phase.FAILED:
            error.retriable, error.txn_requires_abort = False, True
            error.hint = "call abort_transaction, and begin again"

    def _give_back_if_failed(self) -> None:
        """Nothing more is written in a transaction that has failed: another producer may want the
        heads."""
        machine = self._transaction
        if machine is not None and machine.phase in (Phase.FAILED, Phase.FATAL):
            self._driver.give_back_held()
            self._look_soon()

    def _answer(self, sent: Sent, base_offset: int, error: DeliveryError | None) -> None:
        super()._answer(sent, base_offset, error)
        if error is not None:
            self._fail(error)

    def _partition_in_transaction(self, topic: str, partition: int) -> TopicPartition:
        """`Topics.partition_of`, for a record of a transaction."""
        assert self._transaction is not None
        if self._driver.errors:
            self._notice_failures()
        self._transaction.check_open()
        return self._topics.partition_of(topic, partition)

    def _enter(self, tp: TopicPartition) -> None:
        """Before a batch goes to `tp`: it belongs to the transaction, with everything that has
        records now.  Releases the lock while the coordinator is asked."""
        machine, link = self._transaction, self._coordinators
        if machine is None or link is None:
            return
        machine.check()  # one that has failed takes no head again
        if tp in machine.partitions:
            return
        machine.write({tp, *self._open, *self._named})
        number, until = machine.number, self._until(None)
        while not link.turn((until - self._monotonic()) * 1000):
            if self._monotonic() >= until:
                link.give_up()
                raise TimedOutError(
                    f"{tp} was not added to the transaction in time", hint="see the broker's log"
                )
            # Only the first protocol asks: others use the producer meanwhile.
            self._lock.release()
            try:
                link.wait(until)
            finally:
                self._lock.acquire()
            self._check_same(tp, number)

    @property
    def _transaction_number(self) -> int:
        return self._transaction.number if self._transaction is not None else -1

    def _check_same(self, tp: TopicPartition, number: int) -> None:
        """After others had the lock: a record of the transaction of this number may go on."""
        self._check()
        assert self._transaction is not None
        self._transaction.check_open()
        if self._transaction.number != number:
            raise TransactionError(
                f"{tp}: another thread has ended the transaction", hint="send it in the next"
            )

    def _waits_to_enter(self, tp: TopicPartition, number: int, until: float) -> bool:
        """Nothing was sent to `tp`: was it because its leader has yet to let the transaction of
        this number in?  Then others have had the lock for a moment.  False: that is not why, or
        the time (`until`, monotonic s) is over."""
        if self._driver.is_let_in(tp) or self._monotonic() >= until:
            return False
        self._lock.release()
        try:
            self._environment.sleep(TURN_S)
        finally:
            self._lock.acquire()
        self._check_same(tp, number)
        return True
