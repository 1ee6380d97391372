"""Settings of a Spark session."""

from __future__ import annotations

import os
import sys

import pytest
from pyspark.sql import SparkSession

from kdirect_spark import configure
from kdirect_spark.environment import CONFS


def test_configure_leaves_what_the_user_has_set():
    builder = SparkSession.Builder().config("spark.sql.execution.arrow.maxBytesPerBatch", "2MB")
    options = configure(builder)._options
    assert options["spark.sql.execution.arrow.maxBytesPerBatch"] == "2MB"
    assert options["spark.python.unix.domain.socket.enabled"] == "true"
    assert set(CONFS) <= set(options)


@pytest.mark.parametrize("chosen", [None, "/usr/bin/python-of-the-user"])
def test_the_planner_gets_this_interpreter_unless_another_is_named(monkeypatch, chosen):
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if chosen:
        monkeypatch.setenv("PYSPARK_PYTHON", chosen)
    configure(SparkSession.Builder())
    assert os.environ["PYSPARK_PYTHON"] == (chosen or sys.executable)


@pytest.mark.spark
def test_the_settings_reach_the_session(spark):
    for name, (value, _) in CONFS.items():
        assert spark.conf.get(name).lower() == value.lower()
