"""Generators of the workloads that stream engines are measured with: YSB, NEXMark, CM, RO, Zipf.

Law of the room: record numbers in, records of a fixed layout and topics out.  Every generator is
seeded and vectorised, and record number i does not depend on how the work is cut.  It writes by
`client` and `format`; of `state` it knows the words of a plan, by which each workload says what is
computed over it.

    workload = kdirect.workloads.ysb(keys=1000)
    kdirect.workloads.write(session, workload.streams["ysb"], "events", records=10**7, partitions=4)
    plan = workload.plan("events")
"""

from __future__ import annotations

import importlib as _importlib

_HOME = {
    "EventTime": "kdirect.workloads.workload",
    "Keys": "kdirect.workloads.workload",
    "NAMES": "kdirect.workloads.catalogue",
    "Stream": "kdirect.workloads.workload",
    "Workload": "kdirect.workloads.workload",
    "cm": "kdirect.workloads.catalogue",
    "named": "kdirect.workloads.catalogue",
    "nexmark": "kdirect.workloads.auctions",
    "ro": "kdirect.workloads.catalogue",
    "write": "kdirect.workloads.writing",
    "ysb": "kdirect.workloads.catalogue",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table above spells it out


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"})
