"""RDMA: the verbs contract (`contract`) and its providers.

Law of the room: callers ask for a device by the provider's name and see the contract's classes
only. Devices open lazily and are kept per process id, because PySpark forks its workers: a child
that asks again gets a device of its own.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from kdirect.errors import TransportError

if TYPE_CHECKING:
    from kdirect.rdma.contract import Device

PROVIDERS = ("shm", "verbs")
_opened: dict[tuple[Any, ...], Device] = {}
_opening = threading.Lock()


def open_device(name: str, *, shared: bool = True, **options: Any) -> Device:
    """This process's device of provider `name`, opened on first use; TransportError for an unknown
    name, or when there is no such device.

    `options` are the provider's (of `verbs`: see VerbsDevice); each set of them has a device of its
    own.  With ``shared=False`` a device of the caller's own, which it closes (a broker's, which may
    live in a client's process)."""
    if name not in PROVIDERS:
        raise TransportError(
            f"there is no RDMA provider {name!r}", hint="use one of " + ", ".join(PROVIDERS)
        )
    if not shared:
        return _provider(name)(**options)
    key = (os.getpid(), name, *sorted(options.items()))
    with _opening:
        device = _opened.get(key)
        if device is None or device.closed:
            device = _opened[key] = _provider(name)(**options)
        return device


def _provider(name: str) -> Any:
    if name == "verbs":
        from kdirect.rdma.verbs_device import VerbsDevice

        return VerbsDevice
    from kdirect.rdma.shm import ShmDevice

    return ShmDevice


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
