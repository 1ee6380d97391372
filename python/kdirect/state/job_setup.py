"""What both kinds of jobs make of their options: the description in their directory, and what the
coordinator and whoever starts executors tell them.

Pure, but for the mark that it leaves beside the snapshots (`part_transfer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdirect.state import heartbeat, part_transfer
from kdirect.state.directory import JobDirectory
from kdirect.state.executor import ExecutorSettings
from kdirect.state.plan import Plan, identity_of


def job_file(plan: Plan, **more: Any) -> dict[str, Any]:
    """What has to be the same at every start of a job."""
    return {"plan": identity_of(plan), "overflow": getattr(plan, "overflow", None), **more}


def welcome_options(
    directory: JobDirectory, options: Mapping[str, Any], source: Mapping[str, Any], mode: str
) -> dict[str, Any]:
    """What the coordinator tells each executor with its welcome."""
    heartbeat_s = heartbeat.interval_s(options["stall_timeout"] / 1e3)
    return {
        "source": dict(source),
        "owner": asdict(directory.owner),
        "snapshots": str(directory.snapshots.resolve()),
        "snapshots_mark": part_transfer.leave_mark(directory.snapshots),
        "heartbeat_interval_ms": int(heartbeat_s * 1e3),
        "mode": mode,
        "adaptive_ratio": options["adaptive_ratio"],
        "epoch_bytes": options["epoch_bytes"],
        "block_rows": options["block_rows"],
    }


def executor_settings(
    options: Mapping[str, Any],
    *,
    address: tuple[str, int],
    token: str,
    executor: int,
    executors: int,
    memory: Path,
    exchange: str,
) -> ExecutorSettings:
    """What a process must know to become an executor; `exchange` is decided."""
    host, port = address
    return ExecutorSettings(
        host=options["advertised_address"] or host,
        port=port,
        token=token,
        executor=executor,
        executors=executors,
        memory=str(memory),
        exchange=exchange,
        provider=options["provider"],
        slots=options["slots"],
        slot_bytes=options["slot_bytes"],
        state_limit=options["state_limit"],
        fragment_limit=options["fragment_limit"],
    )
