"""The verbs provider's device; under way."""

from __future__ import annotations

from typing import Any

from kdirect.errors import TransportError
from kdirect.rdma import verbs


class VerbsDevice:
    """Under way."""

    choice: Any

    def __init__(self, bind_address: str = "", *, device: str = "", gid_index: int = -1) -> None:
        verbs.library()
        raise TransportError("transport verbs: not yet", hint="use transport=shm")

    def describe(self) -> str:
        return ""

    def alloc_pd(self) -> Any: ...

    def create_cq(self, depth: int = 1024) -> Any: ...

    def close(self) -> None: ...
