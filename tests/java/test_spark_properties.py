"""Every property of Kafka's consumer and producer as an option of a Spark query.

The list is that of ConsumerConfig and ProducerConfig themselves, with their defaults."""

from __future__ import annotations

from typing import Any

import pytest
from py4j.java_gateway import get_field

from kdirect.errors import ConfigError
from kdirect.kafka_properties import KAFKA_PROPERTIES, Effect
from kdirect_spark.settings import sink_settings, source_settings

BASE = {"kafka.bootstrap.servers": "h:1"}
PLAIN = {"kafka.security.protocol": "PLAINTEXT"}
READ = BASE | {"subscribe": "t"}

# Given with Kafka's own default these ask for something, and Spark's Kafka connector refuses them
# too.
REFUSED_DEFAULTS = {"auto.offset.reset", "enable.auto.commit"}


@pytest.fixture(scope="module")
def defaults(java: Any) -> dict[str, str]:
    """The default of each property of both clients as a text; "" for null."""
    out: dict[str, str] = {}
    for config in (java.kafka.clients.consumer.ConsumerConfig,
                   java.kafka.clients.producer.ProducerConfig):  # fmt: skip
        definition = config.configDef()
        keys = definition.configKeys()
        for name in config.configNames():
            key = keys[name]
            value = get_field(key, "defaultValue") if key.hasDefault() else None
            text = java.kafka.common.config.ConfigDef.convertToString(value, key.type())
            out[name] = text or ""
    return out


@pytest.mark.slow
def test_the_table_has_every_property(java: Any, defaults: dict[str, str]) -> None:
    ours = {row.name for row in KAFKA_PROPERTIES}
    assert defaults.keys() - ours == set()
    if java.kafka.common.utils.AppInfoParser.getVersion().startswith("4."):
        assert ours - defaults.keys() == {"auto.include.jmx.reporter"}  # of 3.9 only


@pytest.mark.slow
def test_a_property_takes_effect_or_a_line_says_that_it_does_not(defaults: dict[str, str]) -> None:
    for name, value in defaults.items():
        if name == "bootstrap.servers":
            continue
        (row,) = (row for row in KAFKA_PROPERTIES if row.name == name)
        for room, use in (("source", row.source), ("sink", row.sink)):
            option = {f"kafka.{name}": value or "org.x.Mine"}
            given = option if name == "security.protocol" else PLAIN | option

            def settings(given: dict[str, str] = given, room: str = room) -> Any:
                if room == "source":
                    return source_settings(READ | given, streaming=True)
                # With exactlyOnce what is acknowledged is not left to a property.
                return sink_settings(BASE | {"exactlyOnce": "false"} | given)

            if (
                use.effect is Effect.REFUSED
                and not row.is_security
                and (not value or name in REFUSED_DEFAULTS)
            ):
                with pytest.raises(ConfigError) as e:
                    settings()
                assert f"kafka.{name}" in str(e.value) and use.why in str(e.value)
                continue
            found = settings()
            # With exactlyOnce=false a timeout of transactions has a line, which says no "kafka."
            lines = [
                line
                for line in found.warnings
                if f"option kafka.{name}" in line or f"option {name} " in line
            ]
            setting = use.setting or name
            if use.effect is Effect.SETTING:
                assert setting in found.client or name == "group.id" or lines, (room, name)
            else:
                assert len(lines) == 1, (room, name, found.warnings)


@pytest.mark.slow
def test_what_ignoring_would_break_is_an_error(defaults: dict[str, str]) -> None:
    security = [n for n in defaults if n.startswith(("ssl.", "sasl.", "security."))]
    assert len(security) >= 50
    for name in security:
        for check in (lambda o: source_settings(READ | o, streaming=True),
                      lambda o: sink_settings(BASE | o)):  # fmt: skip
            with pytest.raises(ConfigError, match="neither encrypts nor authenticates"):
                check({f"kafka.{name}": "x"})
