"""What travels from planner to tasks says which version has pickled it."""

from __future__ import annotations

import pickle

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, StructField, StructType

import kdirect
from kdirect import VersionMismatchError
from kdirect_spark import versions
from kdirect_spark.settings import sink_settings, source_settings
from kdirect_spark.sink import KdirectStreamWriter, KdirectWriter
from kdirect_spark.source import KdirectBatchReader, stream_reader

SCHEMA = StructType([StructField("value", BinaryType())])
AT = {"kafka.bootstrap.servers": "127.0.0.1:9"}


def travellers() -> list[object]:
    source = {**AT, "subscribe": "t"}
    sink = sink_settings({**AT, "topic": "t"})
    return [
        KdirectBatchReader(source_settings(source, streaming=False)),
        stream_reader(source_settings(source, streaming=True)),
        KdirectWriter(SCHEMA, False, sink),
        KdirectStreamWriter(SCHEMA, False, sink),
    ]


@pytest.mark.parametrize("traveller", travellers(), ids=lambda t: type(t).__name__)
def test_the_same_version_gets_the_same_object(traveller):
    again = pickle.loads(cloudpickle.dumps(traveller))
    assert type(again) is type(traveller)
    assert vars(again)["_settings"] == vars(traveller)["_settings"]
    assert set(vars(again)) == set(vars(traveller))
    # Spark pickles the functions, not the objects.
    entry = "read" if hasattr(traveller, "read") else "write"
    assert callable(pickle.loads(cloudpickle.dumps(getattr(traveller, entry))))


@pytest.mark.parametrize("traveller", travellers(), ids=lambda t: type(t).__name__)
def test_another_version_looks_up_nothing_and_names_both(traveller, monkeypatch):
    monkeypatch.setattr(kdirect, "__version__", "9.9.9")
    name = type(traveller).__name__.encode()
    packed = cloudpickle.dumps(traveller)
    assert packed.count(name) == 1
    unknown = packed.replace(name, b"X" * len(name))  # a class that this version has not
    monkeypatch.undo()
    with pytest.raises(VersionMismatchError) as caught:
        pickle.loads(unknown)
    assert "planned by kdirect 9.9.9, but" in str(caught.value)
    assert f"has kdirect {kdirect.__version__} (" in str(caught.value)
    assert "install the same version on every host" in str(caught.value)


def test_the_shims_version(monkeypatch):
    monkeypatch.delenv(versions.JAR, raising=False)
    versions.check_jar()
    monkeypatch.setenv(versions.JAR, kdirect.__version__)
    versions.check_jar()
    monkeypatch.setenv(versions.JAR, "0.0.9")
    with pytest.raises(VersionMismatchError, match=r"the shim's jar is of kdirect 0\.0\.9, but"):
        versions.check_jar()
