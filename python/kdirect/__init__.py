"""kdirect: a Kafka-compatible log that is read and written with one-sided RDMA.

This module only names what users need; each name is loaded when it is first used, so that ``import
kdirect`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdirect.broker.broker import Broker
    from kdirect.client.consumer import Consumer
    from kdirect.client.message import Message
    from kdirect.client.producer import Producer
    from kdirect.client.session import connect
    from kdirect.errors import KdirectError
    from kdirect.model import Record, TopicPartition

__version__ = "0.1.0"

_HOME = {
    "Broker": "kdirect.broker.broker",
    "Consumer": "kdirect.client.consumer",
    "KdirectError": "kdirect.errors",
    "Message": "kdirect.client.message",
    "Producer": "kdirect.client.producer",
    "Record": "kdirect.model",
    "TopicPartition": "kdirect.model",
    "connect": "kdirect.client.session",
}

__all__ = [
    "Broker",
    "Consumer",
    "KdirectError",
    "Message",
    "Producer",
    "Record",
    "TopicPartition",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
