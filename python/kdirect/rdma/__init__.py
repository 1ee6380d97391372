"""RDMA: the verbs contract (`contract`) and its providers.

Law of the room: callers ask for a device by the provider's name and see the contract's classes only.
Devices open lazily and are kept per process id, because PySpark forks its workers: a child that asks
again gets a device of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kdirect.errors import TransportError

if TYPE_CHECKING:
    from kdirect.rdma.contract import Device

PROVIDERS = ("shm",)
_opened: dict[tuple[int, str], Device] = {}


def open_device(name: str, *, shared: bool = True) -> Device:
    """This process's device of provider `name`, opened on first use; TransportError for an unknown name.

    With ``shared=False`` a device of the caller's own, which it closes (a broker's, which may live in a client's process)."""
    if name not in PROVIDERS:
        raise TransportError(f"there is no RDMA provider {name!r}", hint="use one of " + ", ".join(PROVIDERS))
    if not shared:
        from kdirect.rdma.shm import ShmDevice

        return ShmDevice()
    key = (os.getpid(), name)
    device = _opened.get(key)
    if device is None or device.closed:
        from kdirect.rdma.shm import ShmDevice

        if device is not None:
            _opened.pop(key, None)
        device = _opened.setdefault(key, ShmDevice())
    return device
