"""Settings of a Spark session."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pyspark.sql import SparkSession

from kdirect_spark import configure, environment, shim
from kdirect_spark.environment import (
    ASK_FOR_FILES_OF_SHIM,
    CHECKPOINT_FILES,
    CONFS,
    FILES_OF_SHIM,
    PLAIN_FILES,
    PLAIN_FILES_OF_SHIM,
    SOCKETS,
    missing,
)


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
    builder = builder.config("spark.kdirect.columnar", "false")  # without the shim's jar
    options = configure(builder.master(master) if master else builder)._options
    assert options.get(CHECKPOINT_FILES, "").endswith(f".{PLAIN_FILES}") == plain


@pytest.mark.parametrize(("master", "ours"), [("local[2]", True), ("spark://host:7077", False)])
def test_the_shim_writes_checkpoints_where_spark_is_local(monkeypatch, tmp_path, master, ours):
    monkeypatch.setattr(shim, "jar_or_none", lambda: tmp_path / "shim.jar")
    options = configure(SparkSession.Builder().master(master))._options
    assert (options.get(ASK_FOR_FILES_OF_SHIM) == "true") == ours
    assert (options.get(CHECKPOINT_FILES) == PLAIN_FILES_OF_SHIM) == ours


def test_a_spark_that_the_shim_does_not_fit_writes_checkpoints_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(shim, "jar_or_none", lambda: tmp_path / "shim.jar")
    older = f"org.apache.spark.sql.execution.streaming.{PLAIN_FILES}"
    monkeypatch.setattr(environment, "_spark_class", lambda _: older)
    options = configure(SparkSession.Builder().master("local"))._options
    assert options[CHECKPOINT_FILES] == older and ASK_FOR_FILES_OF_SHIM not in options


def test_the_users_way_of_writing_checkpoints_stays():
    options = configure(
        SparkSession.Builder().master("local").config(CHECKPOINT_FILES, "mine")
    )._options
    assert options[CHECKPOINT_FILES] == "mine" and ASK_FOR_FILES_OF_SHIM not in options


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
    spark.readStream.format("kdirect").schema("value BINARY").option("subscribe", "t").option(
        "kafka.bootstrap.servers", "127.0.0.1:1"
    ).load()
    assert spark.conf.get(CHECKPOINT_FILES) == FILES_OF_SHIM


@pytest.mark.parametrize(
    ("conf", "version", "has_shim", "words"),
    [
        ({}, "4.2.0", False, [("without kdirect's shim", "--jars"), ("Unix sockets", "40 ms")]),
        ({SOCKETS: "true"}, "4.2.0", True, []),
        ({SOCKETS: "false"}, "4.2.0", True, [("Unix sockets", f"--conf {SOCKETS}=true")]),
        ({SOCKETS: "true"}, "4.3.0", False, [("start Python again",)]),
        ({SOCKETS: "true", "spark.kdirect.columnar": "false"}, "4.2.0", False, []),
        ({}, "4.1.1", False, [("Unix sockets",)]),
        ({}, "4.0.0", False, []),
    ],
)
def test_what_a_running_session_lacks(conf, version, has_shim, words):
    lines = missing(lambda name, default: conf.get(name, default), version, has_shim)
    assert len(lines) == len(words)
    for line, expected in zip(lines, words, strict=True):
        assert all(word in line for word in expected)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_session_that_runs_already_is_said_once_with_the_remedy():
    code = (
        "from pyspark.sql import SparkSession\n"
        "builder = SparkSession.builder.master('local[1]')\n"
        "builder.config('spark.ui.enabled', 'false').getOrCreate()\n"
        "from kdirect_spark import session_builder\n"
        "session_builder(); session_builder().getOrCreate().stop()\n"
        "print('again')\n"
        "session_builder(master='local[1]').getOrCreate(); session_builder()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.stderr.count("without kdirect's shim") == 1, done.stderr[-3000:]
    assert done.stderr.count("--jars $(python -m kdirect_spark.shim)") == 1
    assert done.stderr.count("about 40 ms") == 1


@pytest.mark.spark
def test_a_session_of_ours_lacks_nothing(spark, said):
    before = said()
    configure(SparkSession.builder)
    assert "runs already" not in said()[len(before) :]
