"""Reference pages written from the tables: ``python -m kdirect.docs DIR`` writes options.md,
metrics.md and errors.md.

This module owns the form of these pages and none of their words: the help text of a row is its
documentation.  It reads options.py, metrics.py and errors.py, and nothing else of kdirect.  A test
fails when the pages in docs/ differ from what this module writes.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from kdirect import errors, metrics, options
from kdirect.errors import ConfigError, KdirectError
from kdirect.kafka_properties import KAFKA_PROPERTIES, Effect, KafkaProperty, Use
from kdirect.option_table import Option, Options, config_text

_WRITTEN = (
    "<!-- Written by `make docs` from python/kdirect/{source}; change that file instead. -->\n"
)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in line) + " |\n"
        for line in lines
    )


def _bytes(n: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n and n % (1 << shift) == 0:
            return f"{n} ({n >> shift} {unit})"
    return str(n)


def _value(row: Option) -> str:
    if row.required:
        return "required"
    if row.default is None or row.default in ((), []):
        return "none"
    if row.kind == "bytes" and isinstance(row.default, int):
        return _bytes(row.default)
    if isinstance(row.default, bool):
        return "`true`" if row.default else "`false`"
    if isinstance(row.default, list | tuple):
        return "`" + ",".join(map(str, row.default)) + "`"
    return f"`{row.default}`" if row.default != "" else "empty"


def _kind(row: Option) -> str:
    if row.only is not None:
        return f"`{config_text(row.only)}` only" if row.only != [] else "an empty list only"
    if row.choices:
        return ", ".join(f"`{choice}`" for choice in row.choices)
    unit = {
        "str": "string",
        "int": "integer",
        "long": "integer",
        "float": "number",
        "bool": "true or false",
        "list": "list, separated by commas",
        "ms": "milliseconds",
        "bytes": "bytes (k, m, g)",
    }[row.kind]
    low = "" if row.low is None else f" from {row.low:.15g}"
    high = "" if row.high is None else f" to {row.high:.15g}"
    return unit + low + high


def _meaning(row: Option) -> str:
    if row.alone is not None:
        only = f"`{config_text(row.alone)}`" if row.alone != [] else "an empty list"
        return f"{row.help} A broker without zookeeper.connect accepts {only} only."
    return f"{row.help} No other value is accepted: {row.why}." if row.why else row.help


def _named(row: Option) -> str:
    also = "".join(f", `{alias}`" for alias in row.aliases)
    return f"`{row.name}`{also}"


def option_tables() -> list[Options]:
    """Every table of options.py, in order of definition."""
    return [table for table in vars(options).values() if isinstance(table, Options)]


def render_options(tables: Iterable[Options] | None = None) -> str:
    """The text of docs/options.md."""
    tables = option_tables() if tables is None else tables
    text = [
        "# Options\n",
        _WRITTEN.format(source="options.py"),
        "An unknown name is an error that names the nearest known one.\n"
        "Names after the first are aliases.\n",
    ]
    for table in tables:
        text.append(f"## {table.title}\n")
        if table.ignore_case:
            text.append("The case of names does not matter.\n")
        text.append(
            _table(
                ("option", "value", "default", "meaning"),
                ((_named(r), _kind(r), _value(r), _meaning(r)) for r in table.rows),
            )
        )
    text.append(_kafka_properties())
    return "\n".join(text)


def _kafka_properties() -> str:
    """The section about Kafka's own properties in a Spark query."""
    rows = [r for r in KAFKA_PROPERTIES if not r.is_security or r.name == "security.protocol"]
    security = "refused, unless security.protocol is PLAINTEXT"
    return "\n".join(
        (
            "## Kafka's properties in Spark\n",
            "Every property of the consumer and the producer of kafka-clients 4.1, as Spark's Kafka"
            " connector\npasses it on: with the prefix `kafka.`. What changes nothing is a line in"
            " the log. Written from\n`kafka_properties.py`.\n",
            _table(
                ("property", "in a source", "in a sink"),
                (
                    *((f"`{r.name}`", _use(r, r.source), _use(r, r.sink)) for r in rows),
                    ("`ssl.*`, `sasl.*`, `security.providers`", security, security),
                ),
            ),
        )
    )


def _use(row: KafkaProperty, use: Use) -> str:
    if use.effect is Effect.SETTING:
        return f"takes effect as `{use.setting}`" if use.setting else "takes effect"
    if use.effect is Effect.NOTHING:
        return f"changes nothing: {use.why}"
    values = ", ".join(f"`{text}`" if text else "an empty text" for text in use.harmless)
    return f"refused{f', except {values}' if values else ''}: {use.why}"


def render_metrics() -> str:
    """The text of docs/metrics.md."""
    text = [
        "# Metrics\n",
        _WRITTEN.format(source="metrics.py"),
        "Each table lists the keys of the dict that one `statistics()` method returns.\n",
    ]
    for room in dict.fromkeys(m.room for m in metrics.METRICS):
        text.append(f"## {room}\n")
        text.append(textwrap.fill(metrics.ROOMS[room], 100) + "\n")
        text.append(
            _table(
                ("metric", "unit", "meaning"),
                ((f"`{m.name}`", m.unit, m.help) for m in metrics.METRICS if m.room == room),
            )
        )
    return "\n".join(text)


def error_classes() -> list[type[KdirectError]]:
    """Every class of the tree: parents before children, siblings in order of definition."""
    members = [
        c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, KdirectError)
    ]

    def walk(cls: type[KdirectError]) -> list[type[KdirectError]]:
        return [cls, *(found for c in members if c.__bases__[0] is cls for found in walk(c))]

    return walk(KdirectError)


def render_errors() -> str:
    """The text of docs/errors.md."""
    rows = []
    for cls in error_classes():
        depth = len([c for c in cls.__mro__ if issubclass(c, KdirectError)]) - 1
        also = [c.__name__ for c in cls.__bases__ if not issubclass(c, KdirectError)]
        name = (
            "&nbsp;&nbsp;" * depth
            + f"`{cls.__name__}`"
            + "".join(f" (a `{n}`)" for n in also if n not in ("Exception",))
        )
        rows.append((name, "yes" if cls.retriable else "", " ".join((cls.__doc__ or "").split())))
    return "\n".join(
        [
            "# Errors\n",
            _WRITTEN.format(source="errors.py"),
            "Every exception that kdirect raises on purpose is a `KdirectError`.\n"
            "An indented class is a subclass of the one above it.\n"
            "Retriable: the same call may succeed later without a change by the user.\n",
            _table(("error", "retriable", "meaning"), rows),
        ]
    )


def pages() -> dict[str, str]:
    """File name and text of every page."""
    return {
        "options.md": render_options(),
        "metrics.md": render_metrics(),
        "errors.md": render_errors(),
    }


def stale(directory: Path) -> str:
    """A diff from the pages in `directory` to those that would be written; empty when equal."""
    out = []
    for name, text in pages().items():
        path = directory / name
        old = path.read_text() if path.exists() else ""
        out += difflib.unified_diff(
            old.splitlines(True),
            text.splitlines(True),
            f"{name} as it is",
            f"{name} as the tables have it",
        )
    return "".join(out)


def main(arguments: list[str]) -> None:
    """Write the pages into the directory that the one argument names."""
    if len(arguments) != 1:
        raise ConfigError(
            "kdirect.docs takes one argument, the directory to write to",
            hint="python -m kdirect.docs docs",
        )
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (directory / name).write_text(text)
        sys.stdout.write(f"{directory / name} written\n")


if __name__ == "__main__":
    main(sys.argv[1:])
