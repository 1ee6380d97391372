"""The shim's class for files of a local checkpoint: Spark's files, without a process for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdirect_spark.environment import FILES_OF_SHIM, PLAIN_FILES_OF_SHIM

pytestmark = pytest.mark.spark

FILES = 10


def manager(spark, name: str, directory: Path):
    jvm, gateway = spark._jvm, spark.sparkContext._gateway
    path = jvm.org.apache.hadoop.fs.Path(str(directory))
    conf = spark._jsparkSession.sessionState().newHadoopConf()
    loader = jvm.Thread.currentThread().getContextClassLoader()
    classes = gateway.new_array(jvm.java.lang.Class, 2)
    classes[0], classes[1] = path.getClass(), conf.getClass()
    given = gateway.new_array(jvm.java.lang.Object, 2)
    given[0], given[1] = path, conf
    return (
        jvm.java.lang.Class.forName(name, True, loader).getConstructor(classes).newInstance(given)
    )


def write(spark, files, directory: Path, names: list[str]) -> None:
    for name in names:
        path = spark._jvm.org.apache.hadoop.fs.Path(str(directory / name))
        stream = files.createAtomic(path, False)
        stream.write(65)
        stream.close()


def pages_of_ended_children(pid: int) -> int:
    """Faults of memory of the processes that `pid` has started and seen end: none takes none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[8])


def test_files_permissions_and_checksums_are_sparks(spark, tmp_path):
    found = []
    for name in (PLAIN_FILES_OF_SHIM, FILES_OF_SHIM):
        directory = tmp_path / name
        directory.mkdir()
        write(spark, manager(spark, name, directory), directory, ["0", "1"])
        found.append({
            file.name: (oct(file.stat().st_mode), file.read_bytes()) for file in directory.iterdir()
        })  # fmt: skip
    assert sorted(found[1]) == [".0.crc", ".1.crc", "0", "1"]
    assert found[0] == found[1]


def test_a_damaged_file_is_found_by_its_checksum(spark, tmp_path):
    files = manager(spark, FILES_OF_SHIM, tmp_path)
    write(spark, files, tmp_path, ["0"])
    (tmp_path / "0").write_bytes(b"B")
    opened = files.open(spark._jvm.org.apache.hadoop.fs.Path(str(tmp_path / "0")))
    with pytest.raises(Exception, match=re.escape("ChecksumException")):
        opened.read()


def test_no_process_is_started_for_a_file(spark, tmp_path):
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    files = manager(spark, FILES_OF_SHIM, tmp_path)
    # Another process of the session's may end meanwhile, but not each time.
    for turn in range(20):
        before = pages_of_ended_children(pid)
        write(spark, files, tmp_path, [f"{turn}-{i}" for i in range(FILES)])
        if pages_of_ended_children(pid) == before:
            return
    raise AssertionError("processes were started")
