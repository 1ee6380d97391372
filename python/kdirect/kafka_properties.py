"""The properties of Kafka's consumer and producer, and what each does in a Spark query.

Law: one row for every name of ConsumerConfig and ProducerConfig of kafka-clients 4.1, and of 3.9,
which Spark's Kafka connector has.  A job that moves over from Spark's Kafka connector carries them
as ``kafka.NAME``.  A row says, for a source and for a sink, which client setting the property is,
or why it changes nothing, or why it is refused.  Refused is only what would break its promise if it
were ignored.

The client's own settings are in `options.py`; what a Spark query takes beside is in
`spark_options.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Effect(Enum):
    """What a property does in a query."""

    SETTING = "setting"  # it is a client setting
    NOTHING = "nothing"  # a line in the log says so
    REFUSED = "refused"  # an error


@dataclass(frozen=True, slots=True)
class Use:
    """What a property does in a source or in a sink.

    `setting` names the client setting that it is; "" if that has the same name.  `why` says what
    decides in its place, or why it is refused.  A refused property is harmless with one of the
    values of `harmless`, which ask for nothing else than what happens anyway; it then changes
    nothing."""

    effect: Effect
    why: str = ""
    setting: str = ""
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KafkaProperty:
    """One property, by Kafka's name.  `is_security`: it belongs to TLS or SASL, and is of no
    account where security.protocol is PLAINTEXT."""

    name: str
    source: Use
    sink: Use
    is_security: bool = False


_BYTES = "org.apache.kafka.common.serialization.ByteArray"
_WRITES_NOTHING = Use(Effect.NOTHING, "a source writes nothing")
_READS_NOTHING = Use(Effect.NOTHING, "a sink reads nothing")
_NO_GROUP = "the source joins no consumer group, and the checkpoint decides where it continues"
_START = (
    "set startingOffsets to earliest or latest: a streaming query keeps its own offsets, so that "
    "nothing is missed when topics or partitions are added; startingOffsets applies to a new query "
    "only, and a restarted one continues where it stopped"
)
_INTERCEPTOR = "keys and values are always bytes, and an interceptor may break the query"
_PLAIN = (
    "remove it, set kafka.security.protocol=PLAINTEXT, or use Spark's Kafka connector with this "
    "broker"
)


def _is(setting: str = "") -> Use:
    return Use(Effect.SETTING, setting=setting)


def _idle(why: str) -> Use:
    return Use(Effect.NOTHING, why)


def _refused(why: str, *harmless: str) -> Use:
    return Use(Effect.REFUSED, why, harmless=harmless)


def _both(name: str, use: Use) -> KafkaProperty:
    return KafkaProperty(name, use, use)


def _consumer(name: str, use: Use) -> KafkaProperty:
    return KafkaProperty(name, use, _READS_NOTHING)


def _producer(name: str, use: Use) -> KafkaProperty:
    return KafkaProperty(name, _WRITES_NOTHING, use)


def _security(name: str) -> KafkaProperty:
    use = Use(Effect.REFUSED, _PLAIN)
    return KafkaProperty(name, use, use, is_security=True)


_SECURITY = """
    sasl.client.callback.handler.class sasl.jaas.config sasl.kerberos.kinit.cmd
    sasl.kerberos.min.time.before.relogin sasl.kerberos.service.name
    sasl.kerberos.ticket.renew.jitter sasl.kerberos.ticket.renew.window.factor
    sasl.login.callback.handler.class sasl.login.class sasl.login.connect.timeout.ms
    sasl.login.read.timeout.ms sasl.login.refresh.buffer.seconds
    sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor
    sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
    sasl.mechanism sasl.oauthbearer.assertion.algorithm sasl.oauthbearer.assertion.claim.aud
    sasl.oauthbearer.assertion.claim.exp.seconds sasl.oauthbearer.assertion.claim.iss
    sasl.oauthbearer.assertion.claim.jti.include sasl.oauthbearer.assertion.claim.nbf.seconds
    sasl.oauthbearer.assertion.claim.sub sasl.oauthbearer.assertion.file
    sasl.oauthbearer.assertion.private.key.file sasl.oauthbearer.assertion.private.key.passphrase
    sasl.oauthbearer.assertion.template.file sasl.oauthbearer.client.credentials.client.id
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.clock.skew.seconds
    sasl.oauthbearer.expected.audience sasl.oauthbearer.expected.issuer
    sasl.oauthbearer.header.urlencode sasl.oauthbearer.jwks.endpoint.refresh.ms
    sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms
    sasl.oauthbearer.jwks.endpoint.retry.backoff.ms sasl.oauthbearer.jwks.endpoint.url
    sasl.oauthbearer.jwt.retriever.class sasl.oauthbearer.jwt.validator.class
    sasl.oauthbearer.scope sasl.oauthbearer.scope.claim.name sasl.oauthbearer.sub.claim.name
    sasl.oauthbearer.token.endpoint.url security.providers ssl.cipher.suites ssl.enabled.protocols
    ssl.endpoint.identification.algorithm ssl.engine.factory.class ssl.key.password
    ssl.keymanager.algorithm ssl.keystore.certificate.chain ssl.keystore.key ssl.keystore.location
    ssl.keystore.password ssl.keystore.type ssl.protocol ssl.provider
    ssl.secure.random.implementation ssl.trustmanager.algorithm ssl.truststore.certificates
    ssl.truststore.location ssl.truststore.password ssl.truststore.type
"""

_METRICS = "docs/metrics.md says what kdirect counts, and where"

KAFKA_PROPERTIES: tuple[KafkaProperty, ...] = (
    # of both
    _both("bootstrap.servers", _is()),
    _both("auto.include.jmx.reporter", _idle(_METRICS)),
    _both("client.dns.lookup", _idle("addresses of a name are tried in turn")),
    _both("client.id", _is()),
    _both("connections.max.idle.ms", _idle("connections stay open while a worker lives")),
    _both("enable.metrics.push", _idle(_METRICS)),
    _both("interceptor.classes", _refused(_INTERCEPTOR, "")),
    _both("metadata.max.age.ms", _is()),
    _both("metadata.recovery.rebootstrap.trigger.ms", _idle("bootstrap.servers are asked again "
          "whenever no known broker answers")),
    _both("metadata.recovery.strategy", _idle("bootstrap.servers are asked again whenever no known "
          "broker answers")),
    _both("metric.reporters", _idle(_METRICS)),
    _both("metrics.num.samples", _idle(_METRICS)),
    _both("metrics.recording.level", _idle(_METRICS)),
    _both("metrics.sample.window.ms", _idle(_METRICS)),
    _both("receive.buffer.bytes", _idle("the operating system sizes the buffers of sockets")),
    _both("reconnect.backoff.max.ms", _is()),
    _both("reconnect.backoff.ms", _is()),
    _both("request.timeout.ms", _is()),
    _both("retry.backoff.max.ms", _idle("reconnect.backoff.ms and reconnect.backoff.max.ms "
          "decide")),
    _both("retry.backoff.ms", _idle("reconnect.backoff.ms decides, and "
          "fetchOffset.retryIntervalMs of a source")),
    _both("send.buffer.bytes", _idle("the operating system sizes the buffers of sockets; without "
          "the prefix kafka. it is kdirect's memory for unacknowledged batches")),
    _both("socket.connection.setup.timeout.max.ms", _idle("connect.timeout.ms decides")),
    _both("socket.connection.setup.timeout.ms", _idle("connect.timeout.ms decides")),
    KafkaProperty("security.protocol", _refused(_PLAIN, "PLAINTEXT"),
                  _refused(_PLAIN, "PLAINTEXT"), is_security=True),
    *(_security(name) for name in _SECURITY.split()),
    # of the consumer
    _consumer("auto.commit.interval.ms", _idle("the source commits no offsets by itself")),
    _consumer("auto.offset.reset", _refused(_START)),
    _consumer("check.crcs", _idle("the checksum of every batch is checked")),
    _consumer("client.rack", _is()),
    _consumer("default.api.timeout.ms", _idle("request.timeout.ms and kafkaConsumer.pollTimeoutMs "
              "decide")),
    _consumer("enable.auto.commit", _refused("the source commits no offsets by itself; set "
              "kafka.group.id to commit what each micro-batch has read", "false")),
    _consumer("exclude.internal.topics", _idle("subscribePattern matches the topics that the "
              "broker lists")),
    _consumer("fetch.max.bytes", _idle("prefetchBytes and fetch.max.read.bytes decide")),
    _consumer("fetch.max.wait.ms", _idle("a task reads records that exist, and waits for none")),
    _consumer("fetch.min.bytes", _idle("a task reads records that exist, and waits for none")),
    _consumer("group.id", _is()),
    _consumer("group.instance.id", _idle(_NO_GROUP)),
    _consumer("group.protocol", _idle(_NO_GROUP)),
    _consumer("group.remote.assignor", _idle(_NO_GROUP)),
    _consumer("heartbeat.interval.ms", _idle(_NO_GROUP)),
    _consumer("internal.leave.group.on.close", _idle(_NO_GROUP)),
    _consumer("internal.throw.on.fetch.stable.offset.unsupported", _idle(_NO_GROUP)),
    _consumer("isolation.level", _is()),
    _consumer("key.deserializer", _refused("keys are always bytes; decode them with DataFrame "
              "operations", f"{_BYTES}Deserializer")),
    _consumer("max.partition.fetch.bytes", _is("fetch.max.read.bytes")),
    _consumer("max.poll.interval.ms", _idle(_NO_GROUP)),
    _consumer("max.poll.records", _idle("arrowBatchBytes decides how much Spark gets at a time")),
    _consumer("partition.assignment.strategy", _idle(_NO_GROUP)),
    _consumer("session.timeout.ms", _idle(_NO_GROUP)),
    _consumer("share.acknowledgement.mode", _idle(_NO_GROUP)),
    _consumer("value.deserializer", _refused("values are always bytes; decode them with DataFrame "
              "operations, or set valueFormat", f"{_BYTES}Deserializer")),
    # of the consumer in Kafka, of the producer here
    KafkaProperty("allow.auto.create.topics", _idle("a source creates no topic"), _is()),
    # of the producer
    _producer("acks", _is()),
    _producer("batch.size", _is("batch.bytes")),
    _producer("buffer.memory", _is()),
    _producer("compression.gzip.level", _idle("kdirect's codecs have one level each")),
    _producer("compression.lz4.level", _idle("kdirect's codecs have one level each")),
    _producer("compression.type", _is()),
    _producer("compression.zstd.level", _idle("kdirect's codecs have one level each")),
    _producer("delivery.timeout.ms", _is()),
    _producer("enable.idempotence", _is()),
    _producer("key.serializer", _refused("keys are strings or bytes; encode them with DataFrame "
              "operations", f"{_BYTES}Serializer")),
    _producer("linger.ms", _idle("rows come in Arrow batches, and are sent as they come")),
    _producer("max.block.ms", _is()),
    _producer("max.in.flight.requests.per.connection", _is("max.in.flight")),
    _producer("max.request.size", _idle("batch.bytes and the topic's max.message.bytes decide")),
    _producer("metadata.max.idle.ms", _idle("metadata.max.age.ms decides")),
    _producer("partitioner.adaptive.partitioning.enable", _idle("rows without a key and a "
              "partition go to one partition after another")),
    _producer("partitioner.availability.timeout.ms", _idle("rows without a key and a partition go "
              "to one partition after another")),
    _producer("partitioner.class", _refused("kdirect runs no Java; give the rows a column "
              "partition, or set partitioner", "")),
    _producer("partitioner.ignore.keys", _refused("set partitioner=random, which ignores keys",
              "false")),
    _producer("retries", _idle("delivery.timeout.ms decides how long a batch is sent again")),
    _producer("transaction.timeout.ms", _is()),
    _producer("transaction.two.phase.commit.enable", _refused("the sink takes part in no "
              "transaction of another system", "false")),
    _producer("transactional.id", _refused("the sink gives each task a transaction of its "
              "own; exactlyOnceId names who writes")),
    _producer("value.serializer", _refused("values are strings or bytes; encode them with "
              "DataFrame operations", f"{_BYTES}Serializer")),
)  # fmt: skip


def properties_by_name(
    rows: Iterable[KafkaProperty] = KAFKA_PROPERTIES,
) -> dict[str, KafkaProperty]:
    """The rows by Kafka's name."""
    return {row.name: row for row in rows}
