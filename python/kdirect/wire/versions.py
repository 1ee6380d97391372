"""Which version of a message a client speaks with a broker.

Owns: the versions of a client, where they are not those of `format.protocol`.  No I/O.
"""

from __future__ import annotations

from typing import Any

from kdirect.errors import ProtocolError
from kdirect.format import protocol

API_VERSIONS_VERSION = 3

# The client speaks of one group at a time and of record batch v2 only; `format.protocol` knows more
# for the broker's sake.
LOWEST_VERSION = {protocol.ProduceRequest.API_KEY: 3, protocol.FetchRequest.API_KEY: 4}
HIGHEST_VERSION = {
    protocol.FetchRequest.API_KEY: 12,  # the last that names topics
    protocol.FindCoordinatorRequest.API_KEY: 3,
    protocol.AddPartitionsToTxnRequest.API_KEY: 3,
    protocol.ApiVersionsRequest.API_KEY: API_VERSIONS_VERSION,
    protocol.ProduceRequest.API_KEY: 12,  # the last that names topics; brokers may offer less
}


def choose_version(message: Any, theirs: tuple[int, int] | None, peer: str) -> int:
    """The highest version of `message` that both sides speak; `theirs` is the broker's range, if it
    knows the message.  ProtocolError names both ranges when there is none."""
    api_key = message.API_KEY
    low, high = protocol.version_range(message)
    low, high = (
        max(low, LOWEST_VERSION.get(api_key, low)),
        HIGHEST_VERSION.get(api_key, high),
    )
    if theirs is None:
        raise ProtocolError(
            f"the broker at {peer} does not know {message.name} (API key {api_key})",
            hint="connect to a kdirect broker, or use transport=tcp"
            if api_key in protocol.ACCESS_API_KEYS
            else "use a broker that has this API",
        )
    version = min(high, theirs[1])
    if version < max(low, theirs[0]):
        raise ProtocolError(
            f"the broker at {peer} speaks versions {theirs[0]} to {theirs[1]} of"
            f" {message.name}, this client {low} to {high}",
            hint="use a broker of Kafka 2.1 or later",
        )
    return version
