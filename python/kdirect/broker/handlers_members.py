"""Requests of other brokers of the cluster: questions to the controller.

Clients are not told of these (`protocol.BROKER_API_KEYS`).  Who sends them is not known by the
connection; a question that only a certain broker may ask names it and its incarnation, which the
controller compares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kdirect.broker.answers import Answer, later, respond
from kdirect.broker.connection import Connection
from kdirect.cluster.requests import Request
from kdirect.format import protocol as p
from kdirect.member.forwarding import decode_request, encode_answer


class Controller(Protocol):
    """What answers; `kdirect.member.membership.Membership`."""

    def answer(self, request: Request, /) -> Any:
        """A future of the answer and its generation; NOT_CONTROLLER if the controller is
        elsewhere."""


class MemberHandlers:
    """Handlers for other brokers.  A broker of a cluster has one, used on its event loop."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def ask_controller(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """A body that is no question ends the connection (ProtocolError)."""
        question = decode_request(request.kind, bytes(request.body))
        return later(self._answer(header, question))

    async def _answer(self, header: p.RequestHeader, question: Request) -> Answer:
        answer, generation = await self._controller.answer(question)
        code, body = encode_answer(answer, question)
        return respond(
            header, p.AskControllerResponse, error_code=code, generation=generation, body=body
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API, handler, does it hold up later requests of its connection)."""
        return (("AskController", self.ask_controller, False),)
