"""libibverbs through pyverbs: the only file that imports pyverbs."""

from __future__ import annotations

from kdirect.errors import TransportError


def library() -> tuple[str, str]:
    """(version, file) of pyverbs; TransportError when it cannot be imported."""
    try:
        import pyverbs  # type: ignore[import-not-found]
    except ImportError as e:
        raise TransportError(
            f"pyverbs cannot be imported: {e}", hint="install it: apt install python3-pyverbs, or pip install 'kdirect[rdma]'"
        ) from e
    return "?", pyverbs.__file__
