"""What the planner of an accelerated query must know: one JSON text in an option of its source.

Pure.  `accelerate` makes it in the driver, and Spark hands the option to the planner's process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from kdirect.errors import ConfigError
from kdirect.options import ENGINE
from kdirect.state.plan import Plan, plan_from_json

OPTION = "slash"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """`inputs`: the options of the source of each input of `plan`, in their order.  `options`:
    those of the state engine that were given.  `state_dir` is None where the query chooses the
    directory by its own name, below `state_root`.  `logs`: the planner writes a line for each
    batch."""

    plan: Plan
    inputs: tuple[dict[str, str], ...]
    executors: int
    mode: str
    state_dir: str | None
    state_root: str
    options: dict[str, Any]
    name: str
    logs: bool = False

    def resolved_options(self) -> dict[str, Any]:
        """All options of the state engine."""
        return ENGINE.resolve(self.options)

    def to_text(self) -> str:
        members = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(members | {"plan": self.plan.to_json()})

    @classmethod
    def from_text(cls, text: str | None) -> JobSpec:
        """Raises ConfigError for a text that `accelerate` did not write."""
        try:
            value = json.loads(text or "")
            return cls(
                plan=plan_from_json(value.pop("plan")),
                inputs=tuple(value.pop("inputs")),
                **value,
            )
        except (TypeError, ValueError, AttributeError, KeyError) as e:
            raise ConfigError(
                f"format kdirect_slash: option {OPTION} is not what slash.accelerate writes: {e}",
                hint="wrap a DataFrame over format kdirect by kdirect_spark.slash.accelerate",
            ) from e
