"""The client: control plane, the RDMA consumer and producer, the TCP fallback.

Law of the room: imports the rooms of bytes and of RDMA and nothing of the broker.  Names come
lazily, so that importing one module of the client does not load Arrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdirect.client.session import Session, connect

__all__ = ["Session", "connect"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kdirect.client import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
