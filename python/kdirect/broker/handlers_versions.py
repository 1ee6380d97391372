"""Which requests this broker answers, in which versions, and its features: ApiVersions and
UpdateFeatures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from kdirect.broker.answers import Answer, respond
from kdirect.broker.connection import Connection
from kdirect.broker.features import EPOCH, Feature, levels
from kdirect.format import protocol as p
from kdirect.format.error_codes import ErrorCode
from kdirect.format.schema import build

# Clients that stop at version 3 cannot read a feature that begins at level 0, so Kafka does not
# tell them of it (KAFKA-17011).
_FROM_LEVEL_0 = 4
# What a client may be called (KIP-511).
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_UPGRADE, _UNSAFE_DOWNGRADE = 1, 3


class VersionHandlers:
    """See the module.  `apis()` returns what is advertised."""

    def __init__(self, apis: Callable[[], list[p.Api]]) -> None:
        self._apis = apis

    def api_versions(self, connection: Connection, header: p.RequestHeader, request: Any) -> Answer:
        if header.api_version >= 3 and not (
            _SOFTWARE.fullmatch(request.client_software_name)
            and _SOFTWARE.fullmatch(request.client_software_version)
        ):
            return respond(header, p.ApiVersionsResponse, error_code=ErrorCode.INVALID_REQUEST)
        apis = self._apis()
        features = levels(apis)
        return respond(
            header,
            p.ApiVersionsResponse,
            error_code=0,
            api_keys=_rows(apis),
            supported_features=[
                {"name": f.name, "min_version": f.low, "max_version": f.high}
                for f in features
                if f.low or header.api_version >= _FROM_LEVEL_0
            ],
            finalized_features_epoch=EPOCH,
            finalized_features=[
                {"name": f.name, "min_version_level": f.high, "max_version_level": f.high}
                for f in features
            ],
        )

    def unsupported_version(self) -> Any:
        """The encoded answer to an ApiVersions request in a version that this broker does not
        speak.  It is always in version 0."""
        code = ErrorCode.UNSUPPORTED_VERSION
        response = build(p.ApiVersionsResponse, error_code=code, api_keys=_rows(self._apis()))
        return response.encode(version=0)

    def update_features(
        self, connection: Connection, header: p.RequestHeader, request: Any
    ) -> Answer:
        """UpdateFeatures: a level that a feature has already is taken, any other is refused, with
        Kafka's codes.  One refusal refuses the request (KIP-584)."""
        found = {f.name: f for f in levels(self._apis())}
        refused = [r for u in request.feature_updates if (r := _refusal(u, found))]
        code, message = refused[0] if refused else (0, None)
        rows = [{"feature": u.feature, "error_code": 0} for u in request.feature_updates]
        return respond(
            header,
            p.UpdateFeaturesResponse,
            error_code=code,
            error_message=message,
            results=[] if code or header.api_version >= 2 else rows,
        )

    def table(self) -> Iterable[tuple[str, Any, bool]]:
        """(API name, handler, whether later requests of the connection wait for its answer)."""
        return [
            ("ApiVersions", self.api_versions, True),
            ("UpdateFeatures", self.update_features, True),
        ]


def _rows(apis: list[p.Api]) -> list[dict[str, int]]:
    return [
        {"api_key": a.key, "min_version": a.low, "max_version": a.high}
        for a in sorted(apis, key=lambda a: a.key)
    ]


def _refusal(update: Any, found: dict[str, Feature]) -> tuple[int, str] | None:
    """Why the level that is asked for cannot be had: (code, text)."""
    name, level = update.feature, update.max_version_level
    there = found.get(name)
    has = there.high if there is not None else 0

    def refused(why: str) -> tuple[int, str]:
        text = f"Invalid update version {level} for feature {name}. {why}"
        return ErrorCode.INVALID_UPDATE_VERSION, text

    if not _UPGRADE <= update.upgrade_type <= _UNSAFE_DOWNGRADE:
        return refused("There is no such type of upgrade.")
    if level < 0:
        return refused("A level is at least 0.")
    if level == has:
        return None
    if there is None:
        return refused("This broker does not have it.")
    return refused(f"Its level is {has}, always: it comes and goes with the broker's version.")
