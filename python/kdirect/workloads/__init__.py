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

from kdirect.lazy_names import lazy_names as _lazy_names

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
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
