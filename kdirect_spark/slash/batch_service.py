"""The coordinators of batch queries: they live in the driver's Python process, one for each run.

The planner of a batch query ends when it has planned, and nothing else of the query lives from the
first task to the last one.  So `accelerate` starts this service, at most one in a process; tasks
ask it for the coordinator of their run, and the first one that asks makes it.  A run is one
execution of a DataFrame.  A stage that Spark runs again is the same run; it finds its coordinator,
or a new one after that was given up.

This file opens a socket and starts a thread.  Law: it knows jobs and who asks for them, and nothing
of DataFrames.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import threading
import time
from dataclasses import asdict, dataclass

from kdirect.errors import ConfigError, FormatError, KdirectError, StateError
from kdirect.state import control, messages
from kdirect.state.batches import Ranges, ranges_from_json, ranges_to_json
from kdirect.state.executor import ExecutorSettings
from kdirect.state.planned_stream import PlannedJob
from kdirect_spark.settings import source_settings
from kdirect_spark.slash.control_row import BatchRow
from kdirect_spark.slash.job_spec import JobSpec

log = logging.getLogger("kdirect_spark")

TOKEN = "servicetoken"  # the option with the address; Spark hides the values of options like this
TURN_S = 0.5
KEPT_S = 60.0  # a run whose tasks have left


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the service is, and the secret that tasks show."""

    host: str
    port: int
    token: str

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | None) -> Address:
        try:
            return cls(**json.loads(text or ""))
        except (TypeError, ValueError) as e:
            raise ConfigError(
                f"format kdirect_slash: option {TOKEN} is not what slash.accelerate writes",
                hint="wrap a DataFrame over format kdirect by kdirect_spark.slash.accelerate",
            ) from e


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a run computes: the job, and what it reads of each partition."""

    spec: JobSpec
    ranges: Ranges
    ends: Ranges

    def to_text(self) -> str:
        return json.dumps(
            {
                "spec": self.spec.to_text(),
                "ranges": ranges_to_json(self.ranges),
                "ends": ranges_to_json(self.ends),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Request:
        value = json.loads(text)
        return cls(
            spec=JobSpec.from_text(value["spec"]),
            ranges=ranges_from_json(value["ranges"]),
            ends=ranges_from_json(value["ends"]),
        )


def ask(row: BatchRow) -> ExecutorSettings:
    """In a task: the settings by which it comes to the coordinator of its run.  Raises what went
    wrong where that was made."""
    connection = control.connect(row.host, row.port, row.token)
    try:
        connection.send(json.dumps({"run": row.run, "request": row.request}).encode())
        answer = json.loads(connection.receive())
    finally:
        connection.close()
    if "error" in answer:
        raise messages.error_of(messages.Stop(attempt=0, **answer["error"]))
    return ExecutorSettings.from_json(answer["settings"])


@dataclass(slots=True)
class _Run:
    job: PlannedJob
    asked_at: float  # when a task asked for it last, or was seen there


class BatchService:
    """See the module.  It listens at `host`, `address` is where tasks find it, by the name
    `advertised` if that is given; its thread serves it until `close`."""

    def __init__(self, host: str, advertised: str | None = None) -> None:
        self._listener = control.ControlListener(host, control.new_token())
        name, port = self._listener.address
        self.address = Address(host=advertised or name, port=port, token=self._listener.token)
        self._peers: list[control.ControlConnection] = []
        self._runs: dict[str, _Run] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kdirect-slash-batch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all runs."""
        self._closed = True
        self._thread.join(10 * TURN_S)

    def _serve(self) -> None:
        try:
            while not self._closed:
                try:
                    self._turn()
                except OSError as e:  # no descriptor is free: others may give theirs back
                    log.warning("tasks of batch queries wait: %s", e)
                    time.sleep(TURN_S)
        finally:
            self._listener.close()
            for peer in self._peers:
                peer.close()
            for run in self._runs.values():
                run.job.close()

    def _turn(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in self._listener.filenos():
                selector.register(fd, selectors.EVENT_READ)
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            selector.select(TURN_S)
        self._peers += self._listener.poll()
        for peer in list(self._peers):
            try:
                data = peer.poll()
                if data is None:
                    continue
                peer.send(self._answer(data))
            except KdirectError as e:
                log.debug("a task left: %s", e)
            self._peers.remove(peer)
            peer.close()
        self._give_up()

    def _answer(self, data: bytes) -> bytes:
        try:
            asked = json.loads(data)
            job = self._job(str(asked["run"]), str(asked["request"]))
            return json.dumps({"settings": job.settings.to_json()}).encode()
        except (KeyError, TypeError, ValueError) as e:
            error: KdirectError = FormatError(f"a task asked for something else: {e}")
        except KdirectError as e:
            error = e
        except OSError as e:
            error = StateError(f"the coordinator of a batch query cannot be made: {e}")
        said = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        return json.dumps({"error": said}).encode()

    def _job(self, run: str, request: str) -> PlannedJob:
        now = time.monotonic()
        found = self._runs.get(run)
        if found is None:
            found = self._runs[run] = _Run(_new_job(Request.from_text(request)), now)
        found.asked_at = now
        return found.job

    def _give_up(self) -> None:
        """Close what nobody came back for: runs that are done, and those that failed or whose query
        was cancelled.  Tasks that come later find a new coordinator."""
        now = time.monotonic()
        for name, run in list(self._runs.items()):
            if now - run.asked_at < KEPT_S:
                continue
            with contextlib.suppress(StateError):  # its coordinator has ended
                if not run.job.is_alone():
                    run.asked_at = now
                    continue
            run.job.close()
            del self._runs[name]


def _new_job(request: Request) -> PlannedJob:
    spec = request.spec
    settings = source_settings(spec.inputs[0], streaming=False)
    job = PlannedJob(
        spec.plan,
        settings.task_client,
        executors=spec.executors,
        directory=None,
        options=spec.resolved_options(),
        mode=spec.mode,
    )
    try:
        job.plan(0, request.ranges, request.ends, closes_all=True)
    except BaseException:
        job.close()
        raise
    return job


_service: tuple[tuple[int, str, str | None], BatchService] | None = None
_lock = threading.Lock()


def service_at(host: str, advertised: str | None = None) -> Address:
    """The service of this process, listening at `host`, which tasks know as `advertised`; started
    if it is not there."""
    global _service
    wanted = os.getpid(), host, advertised
    with _lock:
        if _service is None or _service[0] != wanted:
            _service = wanted, BatchService(host, advertised)
            atexit.register(_service[1].close)
        return _service[1].address
