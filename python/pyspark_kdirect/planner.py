"""What a planner of Spark does for `format("kdirect")`, one request after another in one process.

Law: PySpark has a daemon, and processes of it, for each kind of request: to make a data source, to
plan a read, to make a writer, to commit.  And it starts a new process for each stream.  The shim
sends all of them here, so that what was imported and connected for one is there for the next.  A
request is that of PySpark, after a number that says of which kind it is.  Spark keeps a process for
a minute after its last request.

The daemon takes only modules whose name begins with "pyspark".
"""

from __future__ import annotations

import importlib
import os
from typing import IO, Any

from pyspark.serializers import read_int, write_int
from pyspark.sql.types import _parse_datatype_json_string
from pyspark.sql.worker.utils import worker_run
from pyspark.worker_util import pickleSer, read_command, utf8_deserializer

# Kinds of requests; `Planner` of the shim has the same numbers.
CREATE, READ, STREAM, WRITE, COMMIT_BATCH, COMMIT_STREAM = 1, 2, 3, 4, 5, 6
STOP = 0  # ends a stream: no function of PySpark has this number


def main(infile: Any, outfile: IO) -> None:
    """Answer one request.  Ends the process when Spark has no more, and after an error, which is
    the answer then."""
    if not infile.peek(1):  # Spark has closed the connection
        os._exit(0)
    worker_run(_answer, infile, outfile)
    from kdirect_spark import worker

    worker.settle()


def _answer(infile: IO, outfile: IO) -> None:
    # Here, and not above: where kdirect cannot be imported, for its version is not that of the jar,
    # the error is the answer.
    importlib.import_module("kdirect_spark")
    kind = read_int(infile)
    if kind == CREATE:
        from pyspark.sql.worker import create_data_source

        create_data_source._main(infile, outfile)
    elif kind == READ:
        from pyspark.sql.worker import plan_data_source_read

        plan_data_source_read._main(infile, outfile)
    elif kind == STREAM:
        _stream(infile, outfile)
    elif kind == WRITE:
        from pyspark.sql.worker import write_into_data_source

        write_into_data_source._main(infile, outfile)
    elif kind == COMMIT_BATCH:
        from pyspark.sql.worker import commit_data_source_write

        commit_data_source_write._main(infile, outfile)
    elif kind == COMMIT_STREAM:
        from pyspark.sql.worker import python_streaming_sink_runner

        python_streaming_sink_runner._main(infile, outfile)
    else:
        raise ValueError(f"the shim asks for {kind}, which this version of kdirect does not know")


def _stream(infile: IO, outfile: IO) -> None:
    """Answer for a stream's reader until Spark stops it."""
    from pyspark.sql.streaming import python_streaming_source_runner as spark

    data_source = read_command(pickleSer, infile)
    schema = _parse_datatype_json_string(utf8_deserializer.loads(infile))
    rows = read_int(infile)
    reader = data_source.streamReader(schema)
    simple = {
        spark.INITIAL_OFFSET_FUNC_ID: spark.initial_offset_func,
        spark.PREPARE_FOR_TRIGGER_AVAILABLE_NOW_FUNC_ID: (
            spark.prepare_for_trigger_available_now_func
        ),
        spark.GET_DEFAULT_READ_LIMIT_FUNC_ID: spark.get_default_read_limit_func,
        spark.REPORT_LATEST_OFFSET_FUNC_ID: spark.report_latest_offset_func,
    }
    write_int(0, outfile)
    outfile.flush()
    try:
        while (asked := read_int(infile)) != STOP:
            if asked in simple:
                simple[asked](reader, outfile)
            elif asked == spark.LATEST_OFFSET_ADMISSION_CONTROL_FUNC_ID:
                spark.latest_offset_admission_control_func(reader, infile, outfile)
            elif asked == spark.PARTITIONS_FUNC_ID:
                spark.partitions_func(reader, data_source, schema, rows, infile, outfile)
            elif asked == spark.COMMIT_FUNC_ID:
                spark.commit_func(reader, infile, outfile)
            else:
                raise ValueError(f"Spark asks a stream for {asked}, which is not known")
            outfile.flush()
    finally:
        reader.stop()
