"""Lets Spark find the format by itself: it looks for a DefaultSource in every installed module
named pyspark_*."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # At first use: `daemon` is in this package, and decides where pyspark is imported from.
    if name == "DefaultSource":
        from kdirect_spark.datasource import KdirectDataSource

        return KdirectDataSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
