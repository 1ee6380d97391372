"""Options that the shim sets, and no user: what the JVM has to say to the Python data source.

Law: pure.  These names are in no table of options.  `datasource` takes them out before it reads
the options of a user.

- `kdirect.table`: the options are those of a table in Spark's catalog (`CREATE TABLE ... USING
  kdirect OPTIONS (...)`).  Such a table is read and written, so its options are those of a source
  and of a sink together.
- `kdirect.pushed.filter`: the condition that the rows of a batch query meet, as JSON of `pushdown`.
- `kdirect.realTime`: a source whose rows have the columns of `real_time`, or a sink that writes
  rows as they come.
- `kdirect.pushed.count`: rows are to be counted, by these columns (names with commas between).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdirect.errors import ConfigError
from kdirect.options import SPARK
from kdirect_spark.pushdown import Condition, parse
from kdirect_spark.settings import SINK, SINK_ONLY

TABLE = "kdirect.table"
FILTER = "kdirect.pushed.filter"
COUNT = "kdirect.pushed.count"
REAL_TIME = "kdirect.realtime"

OF_SINK_ONLY = frozenset(name.lower() for name in SINK_ONLY)
# Options of the table SPARK that a sink has; every setting of a client comes in addition.
OF_SINK = frozenset(name.lower() for name in SINK)


def for_source(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a source: those of a table without what only a sink has.  Raises ConfigError
    for a table of the catalog if the shim does not pass its options on."""
    given = {name.lower(): (name, value) for name, value in options.items()}
    if "provider" in given and TABLE not in given:
        raise ConfigError(
            "a table of Spark's catalog needs kdirect's shim: without it Spark keeps the options "
            "of CREATE TABLE from a data source in Python",
            hint="build the session with kdirect_spark.configure or session_builder, which add the "
            "shim's jar; or CREATE TEMPORARY VIEW ... USING kdirect OPTIONS (...), which needs no "
            "shim",
        )
    is_table = given.pop(TABLE, None) is not None
    given.pop(FILTER, None)
    given.pop(COUNT, None)
    given.pop(REAL_TIME, None)
    return {
        name: value
        for lower, (name, value) in given.items()
        if not (is_table and lower in OF_SINK_ONLY)
    }


@dataclass(frozen=True, slots=True)
class Pushed:
    """What the shim has a batch query do beside reading rows.  `counted`: the columns by which rows
    are counted, of `topic` and `partition`; None where rows are read."""

    condition: Condition | None = None
    counted: tuple[str, ...] | None = None


def pushed(options: Mapping[str, str]) -> Pushed:
    """Raises ConfigError for a condition of another version of the shim."""
    given = {name.lower(): value for name, value in options.items()}
    text, names = given.get(FILTER), given.get(COUNT)
    return Pushed(
        None if text is None else parse(text),
        None if names is None else tuple(name for name in names.split(",") if name),
    )


def is_real_time(options: Mapping[str, str]) -> bool:
    """Whether the query has the trigger realTime."""
    return any(name.lower() == REAL_TIME for name in options)


def for_sink(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a sink: those of a table without what only a source has.  A table that reads
    one topic, and has no option `topic`, is written to that topic.  Raises ConfigError for a table
    that reads several."""
    given = {name.lower(): (name, value) for name, value in options.items()}
    given.pop(REAL_TIME, None)
    if given.pop(TABLE, None) is None:
        return dict(given.values())
    out = {
        name: value
        for lower, (name, value) in given.items()
        if lower in OF_SINK or not SPARK.knows(lower)
    }
    if "topic" not in given:
        out["topic"] = _only_topic({lower: value for lower, (_, value) in given.items()})
    return out


def _only_topic(given: Mapping[str, str]) -> str:
    topics = [topic.strip() for topic in given.get("subscribe", "").split(",") if topic.strip()]
    if len(topics) != 1:
        raise ConfigError(
            "it is not known which topic the table writes to, as its options name "
            + (f"{len(topics)} topics to read" if topics else "no single topic"),
            hint="create the table with the option topic beside those of its source",
        )
    return topics[0]
