"""What batches that are written exactly once leave in __transaction_state, and attempts that are
open, as Kafka's own tools tell of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.client.attempts import COMMITTED
from tests.client.batches import PARTITIONS, TASKS, write, write_batch
from tests.java.conftest import class_path
from tests.java.test_state_topics import CONSUMER, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def broker(broker_process: Any) -> Any:
    return broker_process(**{"transaction.state.log.num.partitions": "1"})


def test_kafkas_tools_tell_of_attempts(broker: Any, tool: Any, broker_jars: list[Path]) -> None:
    servers = broker.bootstrap_servers
    tool("TopicCommand", "--create", "--topic", "t", "--partitions", str(PARTITIONS))
    with kdirect.connect({"bootstrap.servers": servers, "transport": "tcp"}) as session:
        for batch in range(3):
            assert write_batch(session, "t", "r", batch) == COMMITTED
        attempt = session.join_attempt("t", "q", "r", 3, owner="host")
        write(session, attempt, "t", 3, 0)
        listed = tool("TransactionsCommand", "list")
        found = dict(re.findall(r"^(t-attempt-\S+)\s+\S+\s+\d+\s+(\w+)", listed, re.MULTILINE))
        assert found.pop(attempt.transactional_id) == "Ongoing", listed
        assert len(found) >= TASKS - 1 and set(found.values()) <= {
            "CompleteCommit",
            "CompleteAbort",
        }
        told = tool("TransactionsCommand", "describe", "--transactional-id", found.popitem()[0])
        assert "Complete" in told
        told = tool(
            "TransactionsCommand", "describe", "--transactional-id", attempt.transactional_id
        )
        assert "Ongoing" in told and "t-0" in told
        told = tool("TransactionsCommand", "describe-producers", "--topic", "t", "--partition", "0")
        assert re.search(rf"^{attempt.producer_id}\s+{attempt.epoch}\s", told, re.MULTILINE), told
    states = rows(
        tool(
            CONSUMER + "ConsoleConsumer", "--topic", "__transaction_state", "--partition", "0",
            "--offset", "earliest", "--formatter", CONSUMER + "TransactionLogMessageFormatter",
            "--timeout-ms", "4000",
        )
    )  # fmt: skip
    names = {row["key"]["data"]["transactionalId"] for row in states}
    assert names == {"t", attempt.transactional_id, *found, *(n for n in names if "-attempt-" in n)}
    own = [row["value"]["data"] for row in states if row["key"]["data"]["transactionalId"] == "t"]
    assert len(own) == 4, "one of the run, one of each batch"
    assert {row["transactionStatus"] for row in own} == {0}
    broker.stop()
    (file,) = sorted((broker.log_dir / "__transaction_state-0").glob("*.log"))
    dumped = subprocess.run(
        ["java", "-cp", class_path(broker_jars), "-Dlog4j2.level=off",
         "kafka.tools.DumpLogSegments", "--transaction-log-decoder", "--files", str(file),
         "--deep-iteration"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "isvalid: true" in dumped and "isvalid: false" not in dumped, dumped[-2000:]
    assert "Found corrupted" not in dumped and "Could not" not in dumped, dumped[-2000:]
