"""The Kafka protocol's messages, and kdirect's own access messages beside them.

The only file that imports ``kafka.protocol`` (kafka-python, pinned exactly: internals are used).  It
holds no sockets.  Message classes are kafka-python's, generated from Kafka's JSON schemas;
kdirect's four access messages are schemas of the same form in ``kdirect/format/messages``.

Traps of the library, handled here: minimum versions come from ``_json['validVersions']``, because
the classes pretend 0; request headers are parsed here without copying the body.
"""

from __future__ import annotations

import kdirect.format.messages
from kafka.protocol.api_message import ApiMessage


class OpenQueuePairRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class OpenQueuePairResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetProduceAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetProduceAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetConsumeAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class GetConsumeAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass


class ReleaseAccessRequest(ApiMessage, load_json=kdirect.format.messages):
    pass


class ReleaseAccessResponse(ApiMessage, load_json=kdirect.format.messages):
    pass
