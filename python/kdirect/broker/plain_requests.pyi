"""Types of `kdirect.broker.plain_requests`, which is compiled.  See plain_requests.pyx."""

from kdirect.broker.answers import Answer
from kdirect.broker.connection import Connection
from kdirect.broker.handlers_data import DataHandlers
from kdirect.broker.services import Services

class PlainRequests:
    def __init__(self, handlers: DataHandlers, services: Services) -> None: ...
    answers: bytes
    told: Answer | None
    now: float
    served: int
    def serve(
        self,
        connection: Connection,
        buffer: bytearray,
        start: int,
        end: int,
        most: int,
        until: float,
    ) -> int: ...
