"""What Spark's JVM knows of a DataFrame and its session: the only file of the room that asks it.

Law: it reads, and decides nothing.  The calls are of classes that are not public API; they were
checked for the versions of Spark in `VERSIONS`, and an error of one names this module's reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kdirect.errors import UnsupportedPlanError
from kdirect_spark.shim_options import TABLE, for_source

STREAMING = "StreamingRelationV2"
REFERENCE = "CTERelationRef"  # to a relation that is in the plan already
SETTLED_S = 1.0
WAITS_S = 30.0
# How Spark's catalog has a table: its provider, and its options under this prefix.
PROVIDER, OPTION = "provider", "option."
BATCH = ("DataSourceV2Relation", "RelationV2", "StreamingDataSourceV2Relation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """A leaf of the analyzed plan: `source` is the name of its data source, or its class."""

    source: str
    options: dict[str, str]
    is_streaming: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How many tasks can run at the same time, and what may change that."""

    slots: int
    dynamic_allocation: bool
    is_local: bool
    driver_host: str


def analyzed_plan(df: Any) -> tuple[str, str]:
    """The analyzed plan of a DataFrame: as JSON, and as text with all fields."""
    plan = _java(df).queryExecution().analyzed()
    return str(plan.toJSON()), str(plan.treeString(True, True, (1 << 31) - 1, False, False))


def relations(df: Any) -> list[Relation]:
    """The leaves of the analyzed plan, in pre-order."""
    leaves = _java(df).queryExecution().analyzed().collectLeaves()
    found = [leaves.apply(i) for i in range(leaves.size())]
    return [_relation(leaf) for leaf in found if str(leaf.nodeName()) != REFERENCE]


def _relation(leaf: Any) -> Relation:
    kind = str(leaf.getClass().getSimpleName())
    if kind == STREAMING:
        source, options = str(leaf.sourceName()), _options(leaf, leaf.extraOptions())
        return Relation(source=source, options=options, is_streaming=True)
    if kind in BATCH:
        # With the shim a table's name goes on with what it reads: "kdirect Subscribe[clicks]".
        source = str(leaf.table().name()).partition(" ")[0]
        options = _options(leaf, leaf.options())
        return Relation(source=source, options=options, is_streaming=False)
    return Relation(source=kind, options={}, is_streaming=bool(leaf.isStreaming()))


def _options(leaf: Any, given: Any) -> dict[str, str]:
    """The options of a relation; a schema that `.schema(..)` gave becomes one of them.  Those of
    a query go before those of the table in Spark's catalog that it reads."""
    found = {str(name): str(value) for name, value in dict(given.asCaseSensitiveMap()).items()}
    names = {name.lower() for name in found}
    of_table = _options_of_table(leaf.table())
    found |= {name: value for name, value in of_table.items() if name.lower() not in names}
    names |= {name.lower() for name in of_table}
    if "valueformat" in names and "valueschema" not in names:
        found["valueSchema"] = str(leaf.schema().json())
    return found


def _options_of_table(table: Any) -> dict[str, str]:
    """What `CREATE TABLE ... USING kdirect OPTIONS (...)` gave a table for its source; nothing for
    what is no table of the catalog, whose options are those of its reader."""
    told = {str(name): str(value) for name, value in dict(table.properties()).items()}
    if PROVIDER not in told:
        return {}
    own = {
        name[len(OPTION) :]: value
        for name, value in told.items()
        if name.lower().startswith(OPTION)
    }
    return for_source({**own, TABLE: "true"})


def settled_cluster(session: Any) -> Cluster:
    """The session's cluster when its workers have come: a new application has none yet, and then
    one after the other.  Waits until their number has not changed for SETTLED_S, for at most as
    long as Spark itself waits before it schedules anything."""
    found = cluster(session)
    deadline = time.monotonic() + WAITS_S
    while not found.is_local and time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        before, found = found, cluster(session)
        if found.slots == before.slots > 0:
            break
    return found


def cluster(session: Any) -> Cluster:
    """What the session's cluster has now."""
    context = session.sparkContext
    java = context._jsc.sc()
    conf = context.getConf()
    return Cluster(
        slots=int(
            java.maxNumConcurrentTasks(java.resourceProfileManager().defaultResourceProfile())
        ),
        dynamic_allocation=conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true",
        is_local=str(context.master).startswith("local"),
        driver_host=str(conf.get("spark.driver.host", "127.0.0.1")),
    )


def logs_info(session: Any) -> bool:
    """Does Spark's log have lines of the level INFO?"""
    logger = session.sparkContext._jvm.org.slf4j.LoggerFactory.getLogger("kdirect_spark.slash")
    return bool(logger.isInfoEnabled())


def _java(df: Any) -> Any:
    found = getattr(df, "_jdf", None)
    if found is None:
        raise UnsupportedPlanError(
            "accelerate: this DataFrame is one of Spark Connect, whose plan cannot be read here",
            hint="use a classic session (SparkSession.builder.master(..)), or run it unwrapped",
        )
    return found
