"""InitProducerId: who gets which producer id.

Owns: the answer.  Ids come in blocks, which are the registry's (`kdirect.broker.topics`), or, in a
cluster, the metadata store's (`kdirect.broker.member_topics`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.broker.failures import explain
from kdirect.broker.topics import Registry
from kdirect.errors import KdirectError
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode


class ProducerIdHandlers:
    """See the module.  Used on the event loop.  `take`: a producer id, once the next block of them
    was written down."""

    def __init__(self, topics: Registry, take: Callable[[], Awaitable[int]]) -> None:
        self._topics = topics
        self._take = take

    def init_producer_id(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        if request.transactional_id is not None:
            code = (
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                if request.transactional_id
                else ErrorCode.INVALID_REQUEST
            )
            return respond(
                header, p.InitProducerIdResponse, error_code=code, producer_id=-1, producer_epoch=-1
            )
        producer_id = self._topics.producer_id_nowait()
        if producer_id is None:
            return later(self._init_producer_id_later(header))
        return respond(
            header,
            p.InitProducerIdResponse,
            error_code=0,
            producer_id=producer_id,
            producer_epoch=0,
        )

    async def _init_producer_id_later(self, header: p.RequestHeader) -> Answer:
        """Answer once there is another block of ids."""
        try:
            producer_id = await self._take()
        except KdirectError as e:
            return respond(
                header,
                p.InitProducerIdResponse,
                error_code=explain(e, "a new producer id")[0],
                producer_id=-1,
                producer_epoch=-1,
            )
        return respond(
            header,
            p.InitProducerIdResponse,
            error_code=0,
            producer_id=producer_id,
            producer_epoch=0,
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return [("InitProducerId", self.init_producer_id, True)]
