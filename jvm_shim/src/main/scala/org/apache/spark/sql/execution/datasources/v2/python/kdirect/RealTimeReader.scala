package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.lang.{Long => JLong}

import org.apache.spark.{JobArtifactSet, TaskContext}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.metric.CustomTaskMetric
import org.apache.spark.sql.connector.read.{InputPartition, PartitionReader, PartitionReaderFactory}
import org.apache.spark.sql.connector.read.streaming.{PartitionOffset, SupportsRealTimeRead}
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead.RecordStatus
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonCustomMetric,
  UserDefinedPythonDataSource
}
import org.apache.spark.sql.execution.python.kdirect.ColumnarRunner
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.{ColumnVector, ColumnarBatch}

/** Made on the driver, used in tasks. Real-Time Mode takes rows, one by one. */
private final class RealTimeReaderFactory(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    schema: StructType,
    counted: CountsOfTasks)
    extends PartitionReaderFactory {

  private val jobArtifactUUID = JobArtifactSet.getCurrentJobArtifactState.map(_.uuid)

  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    new RealTimeReader(
      source,
      read,
      partition.asInstanceOf[LivePartition].pickedPartition,
      schema,
      counted,
      jobArtifactUUID)
}

/**
 * The rows of a task while its batch lasts.
 *
 * Spark ends the batch at a time, wherever this is within the rows that Python has sent: the offset
 * that is reported is the one after the last row that Spark took, so what was sent and not taken is
 * read again in the next batch.
 */
private final class RealTimeReader(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    partition: Array[Byte],
    schema: StructType,
    counted: CountsOfTasks,
    jobArtifactUUID: Option[String])
    extends SupportsRealTimeRead[InternalRow] {

  private val ranges = LivePartition.ranges(partition).toArray
  private val nexts = ranges.map(_.offset)

  // Python starts with the first row that is asked for, as only then it is known how long for.
  private var batches: Iterator[ColumnarBatch] = _
  private var rangeOf: ColumnVector = _
  private var nextOf: ColumnVector = _
  private var rows: ColumnarBatch = _
  private var count = 0
  private var row = -1
  private var ended = false

  override def nextWithTimeout(startMs: JLong, timeoutMs: JLong): RecordStatus = {
    if (batches == null) start(startMs + timeoutMs)
    while (!ended) {
      row += 1
      if (row < count) {
        val range = rangeOf.getInt(row)
        if (range >= 0) {
          nexts(range) = nextOf.getLong(row)
          return RealTimeReader.Found
        }
        val marked = -1 - range
        if (marked < nexts.length) nexts(marked) = nextOf.getLong(row)
      } else take()
    }
    RealTimeReader.Ended
  }

  /** Spark's row-only operators ask for nothing but the columns of the query. */
  override def get(): InternalRow = rows.getRow(row)

  /** Asked when the task reads no more: what Python still sends is dropped, so that it can end. */
  override def getOffset(): PartitionOffset = {
    if (batches != null && !ended) {
      val deadline = System.currentTimeMillis() + RealTimeReader.PatienceMs
      while (batches.hasNext && System.currentTimeMillis() < deadline) batches.next()
      ended = true
    }
    ReadUpTo(ranges.toSeq.zip(nexts).map { case (range, next) => range.copy(offset = next) })
  }

  override def next(): Boolean =
    throw new UnsupportedOperationException("rows of a real-time batch have a timeout")

  private val file = new CountsFile
  private var closed = false

  // The worker is not this method's: the runner has registered a listener with the task.
  override def close(): Unit = if (!closed) {
    closed = true
    counted.add(file.counts())
    file.close()
  }

  override def currentMetricsValues(): Array[CustomTaskMetric] = Metrics.ofReader(file.counts())

  private def start(endMs: Long): Unit = {
    val runner = new ColumnarRunner(
      source.createPythonFunction(read),
      UserDefinedPythonDataSource.readInputSchema,
      RealTime.schemaOfTasks(schema),
      PythonCustomMetric.pythonMetrics,
      jobArtifactUUID,
      None,
      SQLConf.get)
    val live = LivePartition.until(partition, endMs)
    val input = file.path.fold(live)(path => TaskCounts.partition(live, path.toString))
    batches = runner.run(InternalRow(input), TaskContext.get())
  }

  private def take(): Unit =
    if (batches.hasNext) {
      rows = batches.next()
      count = rows.numRows
      rangeOf = rows.column(schema.length)
      nextOf = rows.column(schema.length + 1)
      row = -1
    } else ended = true
}

private object RealTimeReader {
  private val Found = RecordStatus.newStatusWithoutArrivalTime(true)
  private val Ended = RecordStatus.newStatusWithoutArrivalTime(false)

  /** For a worker that has not noticed the end of its batch. */
  private val PatienceMs = 1000L
}
