"""One transport at work in the broker: a device, the two completion queues that all its clients
share, and their produce worker.

Owns: opening them with a transport's first client and closing them with the broker; the choice of
device and address for RDMA verbs, and the proof that the log's files can be registered there at
all.  What may not enter: clients, grants, records (`access`, `worker`).

Life: made on the event loop, `close` from any thread once every queue pair is closed.  The worker's
thread calls back; see ProduceWorker.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kdirect.broker.closing import end_all
from kdirect.broker.config import parse_listeners
from kdirect.broker.shared_word import Loopback
from kdirect.broker.worker import CutReason, ProduceWorker
from kdirect.wire.environment import Environment

QUEUE_DEPTH = 1 << 16


class Engine:
    """See the module.  `worker` is stepped by a thread of its own."""

    def __init__(
        self,
        transport: str,
        device: Any,
        *,
        spin_us: int,
        on_cut: Callable[[str, int, CutReason], None],
        on_append: Callable[[Any], None],
        on_head: Callable[[Any], None],
        on_broker_requests: Callable[[Any, list[Any]], None],
        sync: Callable[[Any], None],
    ) -> None:
        self.transport = transport
        self.device = device
        self.recv_cq = device.create_cq(depth=QUEUE_DEPTH)
        self.send_cq = device.create_cq(depth=QUEUE_DEPTH)
        self.worker = ProduceWorker(
            self.recv_cq,
            self.send_cq,
            spin_us=spin_us,
            on_cut=lambda qp_num, reason: on_cut(transport, qp_num, reason),
            on_append=on_append,
            on_head=on_head,
            on_broker_requests=on_broker_requests,
            sync=sync,
        )
        self._thread: threading.Thread | None = None
        self._loopback: Loopback | None = None
        self._link_cq: Any = None
        self._link_lock = threading.Lock()  # followers open their links on threads

    @property
    def link_cq(self) -> Any:
        """The queue for sends of all queue pairs to followers, made with the first of them."""
        with self._link_lock:
            if self._link_cq is None:
                self._link_cq = self.device.create_cq(depth=QUEUE_DEPTH)
            return self._link_cq

    @property
    def loopback(self) -> Loopback:
        """The broker's queue pair with itself, opened with the first shared head."""
        if self._loopback is not None and self._loopback.broken:
            self._loopback.close()
            self._loopback = None
        if self._loopback is None:
            self._loopback = Loopback(self.device)
        return self._loopback

    def start(self) -> None:
        """Begin to take completions."""
        self._thread = threading.Thread(
            target=self.worker.run, name=f"kdirect-produce-{self.transport}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the worker."""
        if self._thread is not None:
            self.worker.stop()
            self._thread.join(timeout=10)
            self._thread = None

    def close(self) -> None:
        """End the worker, then what it worked on.  RdmaError where a queue pair is still open: that
        one is closed with the device, and nothing is left open."""
        queues = [q for q in (self.recv_cq, self.send_cq, self._link_cq) if q is not None]
        loopback = [self._loopback.close] if self._loopback is not None else []
        end_all(
            f"the transport {self.transport}",
            self.stop,
            *loopback,
            *(queue.close for queue in queues),
            self.device.close,
        )


def open_transport(
    transport: str, config: Mapping[str, Any], log_dirs: Iterable[Path], environment: Environment
) -> Any:
    """The broker's own device of `transport`.  TransportError or RdmaError when there is none, or
    it cannot serve these logs."""
    if transport != "verbs":
        return environment.open_device(transport, shared=False)
    from kdirect.rdma import verbs_preflight

    named = config["rdma.bind.address"]
    device = environment.open_device(
        transport,
        shared=False,
        bind_address=named or _listener_address(config["listeners"]),
        device=config["rdma.device"] or "",
        gid_index=int(config["rdma.gid.index"]),
        link_port=int(config["rdma.link.port"]),
        strict=bool(named),
    )
    try:
        for directory in log_dirs:
            verbs_preflight.check_mapping(device, str(directory))
    except BaseException:
        device.close()
        raise
    return device


def _listener_address(listeners: Any) -> str:
    """The first listener's IP address that is one host's on a network; empty when all are
    wildcards, loopback or names."""
    for listener in parse_listeners(listeners):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(listener.host)
            if not (address.is_unspecified or address.is_loopback):
                return listener.host
    return ""
