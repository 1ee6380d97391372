"""Why kdirect answers otherwise than Kafka, where it does: the list that docs/broker.md shows."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Reason(NamedTuple):
    """Which differences it covers, by patterns as a shell's (`[` is a plain character, `*` is any
    text), what the table calls their place, and why they are.  `varies`: the numbers are others in
    each run."""

    api: str
    case: str
    path: str
    where: str
    why: str
    kafka: str = "*"
    kdirect: str = "*"
    varies: bool = False

    def covers(self, *difference: str) -> bool:
        """`difference`: API, case, path, Kafka's value and ours."""
        patterns = (self.api, self.case, self.path, self.kafka, self.kdirect)
        return all(
            fnmatchcase(text, pattern.replace("[", "[[]"))
            for text, pattern in zip(difference, patterns, strict=True)
        )


# The first that covers a difference is its reason.
REASONS: tuple[Reason, ...] = (
    # what is served
    *(
        Reason("ApiVersions", "*", f"api_keys[{key}]", f"`{name}`", why)
        for key, name, why in (
            (38, "CreateDelegationToken", "There are no delegation tokens."),
            (39, "RenewDelegationToken", "There are no delegation tokens."),
            (40, "ExpireDelegationToken", "There are no delegation tokens."),
            (41, "DescribeDelegationToken", "There are no delegation tokens."),
            (64, "UnregisterBroker", "A broker that has left is not registered any more."),
            (80, "AddRaftVoter", "There is no quorum of Raft."),
            (81, "RemoveRaftVoter", "There is no quorum of Raft."),
        )
    ),
    *(
        Reason("ApiVersions", "*", f"api_keys[{key}]", "share groups", "There are none.")
        for key in ("7?", *range(83, 88), "9?")
    ),
    Reason("ApiVersions", "*", "api_keys[320*]", "kdirect's own APIs", "They lead to RDMA."),
    Reason("ApiVersions", "*", "*_features[kraft.version]", "features", "KRaft is not spoken."),
    Reason("ApiVersions", "*", "*_features[share.version]", "features", "No share groups."),
    Reason(
        "ApiVersions",
        "*",
        "supported_features[metadata.version].min_version",
        "the oldest metadata.version",
        "There is no older form of what a cluster keeps.",
    ),
    # topics
    Reason(
        "Metadata",
        "neither",
        "*",
        "a topic with neither name nor id",
        "Kafka fails on it; here it is an id that is not known.",
    ),
    Reason(
        "DescribeTopicPartitions",
        "all",
        "topics[]",
        "`__consumer_offsets`",
        "It is made when a group commits, and not when one looks for its coordinator.",
    ),
    *(
        Reason(api, "*", f"*configs[{name}]*", f"`{name}`", why)
        for api in ("CreateTopics", "DescribeConfigs")
        for name, why in (
            ("preallocate", "RDMA writes need bytes that exist."),
            ("remote.copy.lag.*", "A property of kdirect's own."),
            ("remote.log.client.access", "A property of kdirect's own."),
            ("min.insync.replicas", "Kafka sets the cluster's value where replicas are eligible."),
        )
    ),
    # data
    Reason(
        "Produce",
        "cut off",
        "*error_code",
        "a batch that is cut off",
        "It is as damaged as one with a wrong CRC.",
    ),
    Reason(
        "Produce",
        "*",
        "*log_start_offset",
        "log start, beside an error",
        "It is known.",
        kafka="-1",
    ),
    Reason(
        "Fetch",
        "*",
        "*aborted_transactions",
        "aborted transactions, beside an error",
        "Null and an empty list mean the same.",
        kafka="[]",
        kdirect="None",
    ),
    *(
        Reason(
            "Fetch",
            case,
            "responses[].partitions[].*",
            "marks, beside OFFSET_OUT_OF_RANGE",
            "They tell a client where the log is.",
            kafka="-1",
        )
        for case in ("past the end", "offset -1")
    ),
    Reason(
        "ListOffsets",
        "isolation 7",
        "*",
        "an isolation level that there is not",
        "It counts as read_uncommitted; Kafka fails on it.",
    ),
    Reason(
        "ListOffsets",
        "twice",
        "topics[]",
        "a partition that is asked for twice",
        "Both rows have the error; Kafka tells it once.",
    ),
    Reason(
        "Produce",
        "the same again*",
        "*log_append_time_ms",
        "the time of a batch that is there already",
        "Its records keep the times that they were sent with.",
        kdirect="-1",
        varies=True,
    ),
    # groups
    Reason("FindCoordinator", "*", "*error_message", "the message of no error", "There is none."),
    *(
        Reason(
            api,
            "no name",
            "*",
            "the group whose name is empty",
            "A group has a name; Kafka keeps offsets of one without, for old clients.",
        )
        for api in ("Offset*", "*Group*")
    ),
    Reason("ListGroups", "*", "groups[]", "the group whose name is empty", "As above."),
    Reason(
        "JoinGroup",
        "a subscription that cannot be read",
        "*",
        "a subscription that cannot be read, of a group of the new protocol",
        "It is refused at once; Kafka fails on it, or gives a member id first.",
    ),
    # security
    Reason("AlterClientQuotas", "*", "*", "a quota", "There are none."),
    Reason("AlterUserScramCredentials", "*", "*", "a credential", "None are kept."),
    # properties
    Reason(
        "*AlterConfigs",
        "*operation 9",
        "*",
        "an operation that there is not",
        "It is refused by name; Kafka fails on it.",
    ),
    Reason(
        "IncrementalAlterConfigs",
        "broker, unknown",
        "*",
        "a property that no broker has",
        "An unknown name is an error; Kafka keeps it for plugins.",
    ),
    Reason(
        "IncrementalAlterConfigs",
        "metrics, *",
        "*error_code",
        "a bad property of a subscription",
        "INVALID_CONFIG is the code of every bad property.",
    ),
    Reason(
        "AlterConfigs",
        "all brokers*",
        "*",
        "all properties of all brokers",
        "Kafka keeps one that eligible replicas need; there is none here.",
        kafka="40",
    ),
    Reason(
        "AlterConfigs",
        "all brokers*",
        "*error_message",
        "its message",
        "As above.",
        kafka="text",
    ),
    Reason(
        "DescribeConfigs",
        "*",
        "*configs[share.*",
        "`share.*` of groups",
        "There are no share groups.",
    ),
    Reason(
        "DescribeConfigs",
        "*",
        "*configs[streams.*",
        "`streams.*` of groups",
        "There are no streams groups.",
    ),
    Reason(
        "DescribeConfigs",
        "*",
        "*configs[segment.bytes].synonyms*",
        "the default of `segment.bytes`",
        "Another default.",
    ),
    Reason(
        "DescribeConfigs",
        "*",
        "*retention.ms].synonyms*",
        "synonyms of `retention.ms`",
        "Minutes and hours are not listed.",
    ),
    Reason(
        "DescribeConfigs",
        "broker",
        "results[].configs[*]",
        "properties of Kafka alone",
        "Nothing here has them; known ones may stand in a properties file.",
        kafka="there",
    ),
    Reason(
        "DescribeConfigs",
        "broker",
        "results[].configs[*]",
        "properties of kdirect alone",
        "Documented in options.md.",
        kafka="absent",
    ),
    *(
        Reason(
            "DescribeConfigs",
            "broker",
            f"results[].configs[{name}].*",
            f"`{name}`",
            why,
        )
        for name, why in (
            ("*listeners", "Addresses; they do not change while the broker runs."),
            ("log.dirs", "The directories of the two brokers."),
            ("log.flush.scheduler.interval.ms", "Another default."),
            ("transaction.state.log.replication.factor", "Kafka is given 1 in its file."),
            ("transaction.state.log.min.isr", "Kafka is given 1 in its file."),
            ("transaction.partition.verification.enable", "It cannot be switched off."),
            ("group.coordinator.rebalance.protocols", "There are no streams groups."),
            ("queued.max.request.bytes", "The default bounds memory."),
            ("socket.listen.backlog.size", "Another default."),
            ("log.segment.bytes", "Another default."),
            ("group.initial.rebalance.delay.ms", "Another default."),
            ("offsets.topic.num.partitions", "Another default."),
            ("log.preallocate", "RDMA writes need bytes that exist."),
        )
    ),
    # the cluster
    Reason(
        "DescribeQuorum",
        "the metadata",
        "topics[].partitions[].*",
        "offsets of the metadata",
        "A broker that is alone does not count what it decides.",
        varies=True,
    ),
    Reason(
        "DescribeQuorum",
        "the metadata",
        "nodes[].listeners[]",
        "the controller's listener",
        "It is the brokers' own.",
    ),
    Reason(
        "UpdateFeatures",
        "as it is",
        "*error_message",
        "the message of no error",
        "There is none.",
    ),
    # transactions
    Reason(
        "AddPartitionsToTxn",
        "verified, nothing",
        "*",
        "a verification of nothing",
        "The answer is empty; Kafka fails on it.",
    ),
    Reason(
        "AddPartitionsToTxn",
        "verified, not there",
        "*error_code",
        "a partition that is not in the transaction",
        "Version 4 has no TRANSACTION_ABORTABLE.",
        kafka="120",
        kdirect="48",
    ),
    Reason(
        "TxnOffsetCommit",
        "a generation",
        "*error_code",
        "a member of a group of which only an open transaction tells",
        "There is no group before it is committed; clients treat both codes alike.",
        kafka="25",
        kdirect="22",
    ),
    Reason(
        "DescribeProducers",
        "*",
        "*last_timestamp",
        "when a producer was active last",
        "The broker's time, by which it also forgets producers; Kafka tells the records' time.",
        varies=True,
    ),
    Reason("DescribeProducers", "unknown", "*error_message", "the message", "The code says it."),
    # any
    Reason(
        "*",
        "*",
        "*error_message",
        "the message",
        "More is said than by Kafka.",
        kafka="None",
        kdirect="text",
    ),
    Reason(
        "DescribeConfigs",
        "unknown topic",
        "*error_message",
        "the message",
        "More is said than by Kafka.",
    ),
)
