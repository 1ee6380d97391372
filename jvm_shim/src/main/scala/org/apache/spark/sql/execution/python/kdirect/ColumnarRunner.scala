package org.apache.spark.sql.execution.python.kdirect

import org.apache.spark.TaskContext
import org.apache.spark.api.python.{ChainedPythonFunctions, PythonEvalType, PythonFunction}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.errors.QueryExecutionErrors
import org.apache.spark.sql.execution.metric.SQLMetric
import org.apache.spark.sql.execution.python.{ArrowPythonRunner, BatchedPythonArrowInput}
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.{DataType, StructField, StructType}
import org.apache.spark.sql.vectorized.{ArrowColumnVector, ColumnVector, ColumnarBatch}

/**
 * Runs a Python data source's read function in a Python worker and hands its Arrow batches on as
 * columns.
 *
 * Spark's own path (MapInBatchEvaluatorFactory) does the same and then turns every batch into rows.
 * This class is in this package because BatchedPythonArrowInput is visible nowhere else.
 */
final class ColumnarRunner(
    read: PythonFunction,
    input: StructType,
    output: StructType,
    metrics: Map[String, SQLMetric],
    jobArtifactUUID: Option[String],
    sessionUUID: Option[String],
    conf: SQLConf) {

  private val evalType = PythonEvalType.SQL_MAP_ARROW_ITER_UDF

  private val runner = new ArrowPythonRunner(
    Seq((ChainedPythonFunctions(Seq(read)), 0L)),
    evalType,
    Array(Array(0)),
    StructType(Array(StructField("struct", input))),
    conf.sessionLocalTimeZone,
    conf.arrowUseLargeVarTypes,
    ArrowPythonRunner.getPythonRunnerConfMap(conf),
    metrics,
    jobArtifactUUID,
    sessionUUID) with BatchedPythonArrowInput {
    // Each batch goes to the worker at once, and does not wait for more to fill a buffer.
    override protected val timelyFlushEnabled: Boolean = true
    override protected val timelyFlushTimeoutNanos: Long = 0L
  }

  /**
   * The batches that `read` yields for one input row. A batch is valid until the next one is asked
   * for, because Arrow loads all of them into the same vectors. The worker, its socket and the
   * vectors end with the task.
   */
  def run(row: InternalRow, context: TaskContext): Iterator[ColumnarBatch] =
    run(Iterator(Iterator(row)), context)

  /**
   * The same for batches of input rows, none of them empty. They are asked for, one by one, by the
   * thread that asks for what is yielded.
   */
  def run(
      input: Iterator[Iterator[InternalRow]],
      context: TaskContext): Iterator[ColumnarBatch] = {
    var struct: ArrowColumnVector = null
    var columns: ColumnarBatch = null
    val rows = input.map(_.map(InternalRow(_)))
    runner.compute(rows, context.partitionId(), context).map { batch =>
      val column = batch.column(0).asInstanceOf[ArrowColumnVector]
      if (column ne struct) {
        if (!DataType.equalsIgnoreCompatibleNullability(column.dataType, output)) {
          throw QueryExecutionErrors.arrowDataTypeMismatchError(
            PythonEvalType.toString(evalType), Seq(output), Seq(column.dataType))
        }
        struct = column
        val children = Array.tabulate[ColumnVector](output.length)(struct.getChild(_))
        columns = new ColumnarBatch(children)
      }
      columns.setNumRows(batch.numRows)
      columns
    }
  }
}
