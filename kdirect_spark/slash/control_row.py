"""Control rows: what a task of a micro-batch is told, in place of records.

Pure.  The source of an accelerated query yields one row for each executor, and no record: the
task that gets it reads its part of the log by itself.  A row holds the settings of the executors,
and with them the token of the job, so it is as secret as Spark's own task descriptions are.

A row is checked before anything is done with it: a user's plan may put other rows in its place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kdirect.errors import FormatError, KdirectError, StateProtocolError
from kdirect.state.batches import MOST_EXECUTORS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Be task `task` of a batch query.  Its coordinator is made in the driver, when the first task
    of `run` asks the service at `host` and `port` for it, and tells it the `request`."""

    run: str
    task: int
    executors: int
    host: str
    port: int
    token: str
    request: str

    def to_text(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})


def row_of(text: Any) -> ControlRow | BatchRow:
    """The row with this text.  Raises StateProtocolError for anything else."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise FormatError("it is no object")
        if value.get("version") != VERSION:
            raise FormatError(f"its version is {value.get('version')!r}, and not {VERSION}")
        return _control_row(value) if value.keys() == _MEMBERS else _batch_row(value)
    except (TypeError, ValueError, KeyError, KdirectError) as e:
        raise StateProtocolError(
            f"a control row of an accelerated query is not one: {e}",
            hint="nothing may stand between slash.accelerate and its source; all processes of "
            "the query must run the same version of kdirect",
        ) from None


def _control_row(value: dict[str, Any]) -> ControlRow:
    settings = ExecutorSettings.from_json(json.dumps(value["executor_settings"]))
    _check(value["batch"], 1 << 62)
    _check(value["task"], settings.executors)
    return ControlRow(batch=value["batch"], task=value["task"], settings=settings)


def _batch_row(value: dict[str, Any]) -> BatchRow:
    value.pop("version")
    found = BatchRow(**value)
    _check(found.executors, MOST_EXECUTORS + 1)
    _check(found.task, found.executors)
    _check(found.port, 1 << 16)
    texts = (found.run, found.host, found.token, found.request)
    if not all(isinstance(text, str) and text for text in texts):
        raise FormatError("a member of it is no text")
    return found


def _check(number: Any, most: int) -> None:
    if type(number) is not int or not 0 <= number < most:
        raise FormatError(f"{number!r} is out of range")
