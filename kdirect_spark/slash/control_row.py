"""Control rows: what a task of a micro-batch is told, in place of records.

Pure.  The source of an accelerated query yields one row for each executor, and no record: the
task that gets it reads its part of the log by itself.  A row holds the settings of the executors,
and with them the token of the job, so it is as secret as Spark's own task descriptions are.

A row is checked before anything is done with it: a user's plan may put other rows in its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kdirect.errors import FormatError, KdirectError, StateProtocolError
from kdirect.state.executor import ExecutorSettings

COLUMN = "control"
DDL = f"{COLUMN} string"
VERSION = 1
_MEMBERS = {"version", "batch", "task", "executor_settings"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow:
    """Be task `task` of `batch`, by these settings."""

    batch: int
    task: int
    settings: ExecutorSettings

    def to_text(self) -> str:
        return json.dumps(
            {
                "version": VERSION,
                "batch": self.batch,
                "task": self.task,
                "executor_settings": json.loads(self.settings.to_json()),
            }
        )

    @classmethod
    def from_text(cls, text: Any) -> ControlRow:
        """The row with this text.  Raises StateProtocolError for anything else."""
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.keys() != _MEMBERS:
                raise FormatError("its members are others")
            if value["version"] != VERSION:
                raise FormatError(f"its version is {value['version']!r}, and not {VERSION}")
            settings = ExecutorSettings.from_json(json.dumps(value["executor_settings"]))
            found = cls(batch=value["batch"], task=value["task"], settings=settings)
            if not all(type(n) is int and n >= 0 for n in (found.batch, found.task)):
                raise FormatError("it names no batch or task")
            if not 0 <= found.task < settings.executors:
                raise FormatError(f"there is no task {found.task} of {settings.executors}")
        except (TypeError, ValueError, KdirectError) as e:
            raise StateProtocolError(
                f"a control row of an accelerated query is not one: {e}",
                hint="nothing may stand between slash.accelerate and its source; all processes of "
                "the query must run the same version of kdirect",
            ) from None
        return found
