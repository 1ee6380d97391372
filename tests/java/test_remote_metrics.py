"""Kafka's own list of the metrics of tiered storage, beside the rows of ours that say the same."""

from __future__ import annotations

import re

from kdirect.remote_metrics import REMOTE_ROWS
from tests.java.conftest import Java

# Of Kafka's, those that have no row, and why.
WITHOUT_A_ROW = {
    # Followers take the end of one object when they begin; members count what they fetch.
    "BuildRemoteLogAuxStateRequestsPerSec",
    "BuildRemoteLogAuxStateErrorsPerSec",
    # The size is kept, not computed by listing what there is.
    "RemoteLogSizeComputationTime",
    # Shares and distributions of time: rows are counters and gauges.
    "RemoteLogManagerTasksAvgIdlePercent",
    "RemoteLogReaderAvgIdlePercent",
    "RemoteLogReaderFetchRateAndTimeMs",
}
CLASS = "org.apache.kafka.server.log.remote.storage.RemoteStorageMetrics"


def test_each_of_kafkas_metrics_has_a_row(broker_jars):
    """Or a reason why it has none."""
    java = Java(broker_jars)
    try:
        fields = java.gateway.jvm.java.lang.Class.forName(CLASS).getFields()
        kafkas = {f.get(None).getName() for f in fields if f.getName().endswith("_METRIC")}
    finally:
        java.close()
    assert len(kafkas) > 15
    named = [x for _, _, text in REMOTE_ROWS for x in re.findall(r"\b(?:[A-Z][a-z]+){3,}\b", text)]
    assert len(named) == len(set(named)), "two rows are one of Kafka's"
    assert set(named) | WITHOUT_A_ROW == kafkas
    assert not set(named) & WITHOUT_A_ROW
