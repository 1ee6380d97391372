"""RDMA: the verbs contract (`contract`) and its providers.

Law of the room: callers ask for a device by the provider's name, and see only the classes of the
contract.  Devices are opened at first use and kept per process id, because PySpark forks its
workers: a child that asks again gets its own device.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

from kdirect.errors import TransportError
from kdirect.rdma.contract import Device

# The module and the class of each provider; imported when the first device is opened.
PROVIDERS = {
    "shm": ("kdirect.rdma.shm", "ShmDevice"),
    "verbs": ("kdirect.rdma.verbs_device", "VerbsDevice"),
    "sim": ("kdirect.rdma.sim", "SimDevice"),
}
_opened: dict[tuple[Any, ...], Device] = {}
_opening = threading.Lock()


def open_device(name: str, /, *, shared: bool = True, **options: Any) -> Device:
    """This process's device of provider `name`, opened at the first call.

    `options` are those of the provider: `verbs` takes the arguments of `VerbsDevice`, `sim` takes
    ``network=SimNetwork(...)``.  Each set of options has its own device.  With ``shared=False`` the
    caller gets a device that nobody else gets, and closes it: a broker asks for one, because it may
    live in a client's process.

    Raises TransportError when the provider is unknown or there is no such device.
    """
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


def _provider(name: str) -> type[Device]:
    module, kind = PROVIDERS[name]
    return getattr(import_module(module), kind)


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
