"""How a plan is refused: one error for all of it, which names the thing and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kdirect.errors import ConfigError, UnsupportedPlanError

UNWRAPPED = "run this DataFrame unwrapped"


def unsupported(message: str, hint: str = "") -> UnsupportedPlanError:
    """The error for what the engine does not compute as Spark does."""
    remedy = f"{hint}, or {UNWRAPPED}" if hint else UNWRAPPED
    return UnsupportedPlanError(f"accelerate: {message}", hint=remedy)


@contextmanager
def engines_rules() -> Iterator[None]:
    """What the engine's own plan refuses is refused here too: it names the thing and the remedy."""
    try:
        yield
    except UnsupportedPlanError:
        raise
    except ConfigError as e:
        raise UnsupportedPlanError(f"accelerate: {e.message}", hint=e.hint) from e
