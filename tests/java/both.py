"""A scenario is played to both: a broker of ours and one of Apache Kafka, with the same properties.

Each must do what the scenario says, so that a scenario which Kafka does not keep is found too.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import kdirect

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("kdirect", "kafka")


@contextmanager
def broker_of(system: str, properties: Mapping[str, str], directory: Path) -> Iterator[str]:
    """The address of one broker of `system`, which ends with the block; Kafka's needs `broker_jars`
    to be there, and keeps its files in `directory`."""
    if system == "kdirect":
        with kdirect.Broker(properties=dict(properties)) as broker:
            yield broker.bootstrap_servers
        return
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from versus.answers import SMALL_JVM
        from versus.systems import Kafka
    finally:
        sys.path.remove(str(ROOT / "bench"))
    kafka = Kafka(str(directory), properties, jvm=SMALL_JVM)
    try:
        yield kafka.address
    finally:
        kafka.stop()


def fresh(what: str = "t") -> str:
    """A name that no other scenario has."""
    return f"{what}-{uuid.uuid4().hex[:8]}"
