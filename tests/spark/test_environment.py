"""Settings of a Spark session."""

from __future__ import annotations

import os
import sys

import pytest
from pyspark.sql import SparkSession

from kdirect_spark import configure
from kdirect_spark.environment import CHECKPOINT_FILES, CONFS, PLAIN_FILES


def test_configure_leaves_what_the_user_has_set():
    builder = SparkSession.Builder().config("spark.sql.execution.arrow.maxBytesPerBatch", "2MB")
    options = configure(builder)._options
    assert options["spark.sql.execution.arrow.maxBytesPerBatch"] == "2MB"
    assert options["spark.python.unix.domain.socket.enabled"] == "true"
    assert set(CONFS) <= set(options)


@pytest.mark.parametrize(
    ("master", "plain"),
    [("local[2]", True), ("local", True), ("spark://host:7077", False), (None, False)],
)
def test_checkpoints_are_written_as_plain_files_where_spark_is_local(master, plain):
    builder = SparkSession.Builder()
    options = configure(builder.master(master) if master else builder)._options
    assert options.get(CHECKPOINT_FILES, "").endswith(f".{PLAIN_FILES}") == plain


def test_the_users_way_of_writing_checkpoints_stays():
    options = configure(
        SparkSession.Builder().master("local").config(CHECKPOINT_FILES, "mine")
    )._options
    assert options[CHECKPOINT_FILES] == "mine"


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
    assert spark.conf.get(CHECKPOINT_FILES).endswith(PLAIN_FILES)
