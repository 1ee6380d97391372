"""What an object says of its topic: how many partitions it has, and its own properties.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kdirect.errors import CorruptObjectError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LONGEST = 1 << 16


class TopicSection(NamedTuple):
    """See the module.  `configs`: properties that the topic sets itself, as text."""

    partitions: int
    configs: Mapping[str, str]

    def pack(self) -> bytes:
        document = {"partitions": self.partitions, "configs": dict(sorted(self.configs.items()))}
        return json.dumps(document).encode()


def parse_topic(data: Buffer) -> TopicSection:
    """CorruptObjectError for anything else than `pack` writes."""
    raw = bytes(data)
    try:
        if len(raw) > LONGEST:
            raise ValueError(f"it has {len(raw)} bytes")
        document = json.loads(raw)
        partitions, configs = document["partitions"], document["configs"]
        if type(partitions) is not int or not 1 <= partitions <= 1_000_000:
            raise ValueError(f"{partitions!r} partitions")
        if not all(isinstance(x, str) for pair in configs.items() for x in pair):
            raise ValueError("a property that is no text")
        return TopicSection(partitions, configs)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptObjectError(
            f"what an object says of its topic cannot be read: {e}",
            hint="give the topic's partitions and properties by hand",
        ) from e


__all__ = ["TopicSection", "parse_topic"]
