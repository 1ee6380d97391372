"""A broker inside this process: `kdirect.Broker`.

The broker runs on an event loop of its own, in a daemon thread, so that it serves while the
caller's thread does something else (a test, a notebook cell).  `start` and `stop` may be called
from any thread; a broker that was stopped can be started again on the same directories.  One that
still starts, and waits for its cluster's metadata store, say, is stopped at once.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kdirect.broker.cluster_view import ClusterLayout
from kdirect.broker.config import BrokerConfig
from kdirect.broker.server import BrokerServer
from kdirect.errors import BrokerUnavailableError, ClosedError, ConfigError, TimedOutError

log = logging.getLogger("kdirect.broker")

STOP_TIMEOUT_SECONDS = 60.0
SHARED_MEMORY = Path("/dev/shm")
TEMPORARY_ROOM_BYTES = 2 << 30
_running: weakref.WeakSet[Broker] = weakref.WeakSet()


class Broker:
    """A broker of this process.

    `log_dirs`: a directory, several, or None: a temporary one, in shared memory if there is room,
    which is removed by `stop`.  `listeners` as in the properties file; port 0 takes a free port.
    Other properties are keyword arguments with underscores for dots, or go into the mapping
    `properties` under their own names.  `layout`: the cluster that the broker is part of; without
    one it is alone::

        with kdirect.Broker(num_partitions=3) as b:
            print(b.bootstrap_servers)
    """

    def __init__(
        self,
        log_dirs: str | Path | Iterable[str | Path] | None = None,
        listeners: str | Iterable[str] = "127.0.0.1:0",
        *,
        properties: Mapping[str, Any] | None = None,
        layout: ClusterLayout | None = None,
        **keywords: Any,
    ) -> None:
        self._layout = layout
        if isinstance(log_dirs, Mapping):
            raise ConfigError(
                f"log directories are paths, not a mapping of {', '.join(map(str, log_dirs))}",
                hint="give properties by name: kdirect.Broker(properties={...})",
            )
        given = {"listeners": listeners, **(properties or {})}
        self._temporary: Path | None = None
        self._wants_temporary = (
            log_dirs is None
            and not {"log.dirs", "log.dir"} & set(given)
            and not {"log_dir"} & set(keywords)
        )
        if log_dirs is not None:
            given["log.dirs"] = (
                [str(log_dirs)] if isinstance(log_dirs, str | Path) else [str(d) for d in log_dirs]
            )
        # Here, so that mistakes show now and not at `start`.
        self._config = BrokerConfig.from_arguments(given, **keywords)
        self._arguments = (given, keywords)
        self._thread: threading.Thread | None = None
        self._ended: threading.Thread | None = None  # that of the run before, or soon
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: BrokerServer | None = None
        self._stop_event: asyncio.Event | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._abandoned = False
        self._starting: asyncio.Task[None] | None = None  # of the loop; while the server starts
        self._pid = 0
        self._lock = threading.Lock()  # of the fields; not held while anything is waited for

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> Broker:
        """Serve.  KdirectError says what is in the way; nothing is left running then.  ClosedError:
        `stop` was called meanwhile."""
        before = self._ended
        if before is not None:
            before.join(STOP_TIMEOUT_SECONDS)  # it still has the log directories
        with self._lock:
            if self._thread is None:
                self._launch()
            thread, ready = self._thread, self._ready
        try:
            ready.wait()  # recovering a large log takes long
        except BaseException:  # interrupted: it stops as soon as it can
            with self._lock:
                self._ask_to_end()
            self._remove_temporary()
            raise
        with self._lock:
            error = self._error
            if self._thread is thread and error is None:
                return self
            if self._thread is thread:
                self._thread = self._server = None
                _running.discard(self)
        if error is None:
            raise ClosedError("the broker was stopped before it served")
        assert thread is not None
        thread.join(STOP_TIMEOUT_SECONDS)
        self._remove_temporary()
        raise error

    def _launch(self) -> None:
        given, keywords = self._arguments
        if self._wants_temporary:
            self._temporary = temporary_directory()
            given = {**given, "log.dirs": [str(self._temporary)]}
        try:
            self._config = BrokerConfig.from_arguments(given, **keywords)
            self._server = BrokerServer(self._config, layout=self._layout)
            self._ready = threading.Event()
            self._error = None
            self._abandoned = False
            self._loop = self._stop_event = None
            self._pid = os.getpid()
            thread = threading.Thread(target=self._run, name="kdirect-broker", daemon=True)
            thread.start()
        except BaseException:
            self._server = None
            self._remove_temporary()
            raise
        self._thread = thread
        _running.add(self)

    def stop(self) -> None:
        """Finish what is under way and stop; the second call does nothing."""
        with self._lock:
            thread = self._ask_to_end()
            if thread is None:
                return
        thread.join(STOP_TIMEOUT_SECONDS)
        with self._lock:
            if self._thread is None:
                self._server = None
                self._remove_temporary()
        if thread.is_alive():
            raise TimedOutError(
                "the broker did not stop in time",
                hint="see its log; the process may be ended without harm",
            )
        if self._error is not None:
            raise self._error

    def _ask_to_end(self) -> threading.Thread | None:
        """The thread that is about to end; None if there is none.  The lock is held."""
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        _running.discard(self)
        # A forked child holds a copy of this object, but not the thread.
        if self._pid != os.getpid():
            self._server = None
            return None
        self._ended = thread
        self._abandoned = True
        loop = self._loop  # None: the thread has not come to it, and looks at `_abandoned` there
        if loop is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(self._end)
            except RuntimeError:  # it has ended by itself
                pass
        return thread

    def _end(self) -> None:
        """On the event loop."""
        if self._starting is not None:
            self._starting.cancel()
        if self._stop_event is not None:
            self._stop_event.set()

    def __enter__(self) -> Broker:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._error = e
            if self._ready.is_set():
                log.exception("the broker ended with an error")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        assert self._server is not None
        server = self._server
        stop = self._stop_event = asyncio.Event()
        starting = self._starting = asyncio.ensure_future(server.start())
        self._loop = asyncio.get_running_loop()
        if self._abandoned:  # by a thread that has not seen the loop
            self._end()
        await asyncio.wait((starting,))
        self._starting = None
        if starting.cancelled():  # it has left nothing behind
            return
        await starting
        self._ready.set()
        try:
            await server.directories.until_told(stop)
        finally:
            await server.stop()

    # -- looking -----------------------------------------------------------------------------------

    @property
    def server(self) -> BrokerServer:
        """The running server; BrokerUnavailableError when the broker is not started."""
        if self._server is None or self._thread is None:
            raise BrokerUnavailableError(
                "the broker is not running", hint="call start(), or use it in a with statement"
            )
        return self._server

    @property
    def bootstrap_servers(self) -> str:
        """``host:port``, for clients."""
        return self.server.bootstrap_servers

    @property
    def log_dirs(self) -> list[Path]:
        """Where the partitions are."""
        return list(self.server.logs.log_dirs)

    def statistics(self) -> dict[str, Any]:
        """Counters by the names of `kdirect.metrics`."""
        return self.server.statistics()

    def __repr__(self) -> str:
        if self._thread is None or self._server is None:
            return "Broker(stopped)"
        return f"Broker({self._server.bootstrap_servers})"


def temporary_directory() -> Path:
    """In shared memory, where RDMA writes cost no disk, if there is room."""
    parent: Path | None = None
    try:
        stat = os.statvfs(SHARED_MEMORY)
        if stat.f_bavail * stat.f_frsize >= TEMPORARY_ROOM_BYTES and os.access(
            SHARED_MEMORY, os.W_OK
        ):
            parent = SHARED_MEMORY
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="kdirect-", dir=parent))


@atexit.register
def _stop_all() -> None:
    """A notebook or test that forgot `stop` still leaves a clean log and no temporary directory."""
    for broker in list(_running):
        try:
            broker.stop()
        except Exception:
            log.exception("stopping %r at exit failed", broker)
