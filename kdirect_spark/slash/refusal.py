"""How a plan is refused: one error for all of it, which names the thing and the remedy."""

from __future__ import annotations

from kdirect.errors import UnsupportedPlanError

UNWRAPPED = "run this DataFrame unwrapped"


def unsupported(message: str, hint: str = "") -> UnsupportedPlanError:
    """The error for what the engine does not compute as Spark does."""
    remedy = f"{hint}, or {UNWRAPPED}" if hint else UNWRAPPED
    return UnsupportedPlanError(f"accelerate: {message}", hint=remedy)
