"""ApiVersions: which requests this broker answers, and in which versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kdirect.broker.answers import Answer, respond
from kdirect.broker.connection import Connection
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build


class VersionHandlers:
    """See the module.  `apis()` returns what is advertised."""

    def __init__(self, apis: Callable[[], list[p.Api]]) -> None:
        self._apis = apis

    def api_versions(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        return respond(header, p.ApiVersionsResponse, error_code=0, api_keys=self._api_keys())

    def unsupported_version(self) -> Any:
        """The encoded answer to an ApiVersions request in a version that this broker does not
        speak.  It is always in version 0."""
        code = ErrorCode.UNSUPPORTED_VERSION
        response = build(p.ApiVersionsResponse, error_code=code, api_keys=self._api_keys())
        return response.encode(version=0)

    def _api_keys(self) -> list[dict[str, int]]:
        return [
            {"api_key": a.key, "min_version": a.low, "max_version": a.high}
            for a in sorted(self._apis(), key=lambda a: a.key)
        ]

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return [("ApiVersions", self.api_versions, True)]
