"""Lets Spark find the format by itself: it looks for a DefaultSource in every installed module
named pyspark_*."""

from kdirect_spark.datasource import KdirectDataSource as DefaultSource  # noqa: F401
