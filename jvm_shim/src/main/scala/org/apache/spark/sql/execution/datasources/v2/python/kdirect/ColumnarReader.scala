package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import org.apache.spark.{JobArtifactSet, TaskContext}
import org.apache.spark.sql.SparkSession
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.metric.CustomTaskMetric
import org.apache.spark.sql.connector.read.{InputPartition, PartitionReader, PartitionReaderFactory}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonCustomMetric,
  PythonInputPartition,
  UserDefinedPythonDataSource
}
import org.apache.spark.sql.execution.metric.SQLMetric
import org.apache.spark.sql.execution.python.kdirect.ColumnarRunner
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.ColumnarBatch

/**
 * Made on the driver, used in tasks. `read` is the pickled read function, which yields Arrow
 * batches of `schema`.
 */
final class ColumnarReaderFactory(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    schema: StructType)
    extends PartitionReaderFactory {

  private val jobArtifactUUID = JobArtifactSet.getCurrentJobArtifactState.map(_.uuid)
  private val sessionUUID = SparkSession.getActiveSession.collect {
    case session: org.apache.spark.sql.classic.SparkSession
        if session.sessionState.conf.pythonWorkerLoggingEnabled =>
      session.sessionUUID
  }

  override def supportColumnarReads(partition: InputPartition): Boolean = true

  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    throw new UnsupportedOperationException("this factory reads columns")

  override def createColumnarReader(partition: InputPartition): PartitionReader[ColumnarBatch] = {
    val pickled = partition.asInstanceOf[PythonInputPartition].pickedPartition
    new ColumnarReader(source, read, pickled, schema, jobArtifactUUID, sessionUUID)
  }
}

private final class ColumnarReader(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    partition: Array[Byte],
    schema: StructType,
    jobArtifactUUID: Option[String],
    sessionUUID: Option[String])
    extends PartitionReader[ColumnarBatch] {

  private val metrics: Map[String, SQLMetric] = PythonCustomMetric.pythonMetrics

  private val batches: Iterator[ColumnarBatch] = {
    val input = UserDefinedPythonDataSource.readInputSchema
    val function = source.createPythonFunction(read)
    val runner = new ColumnarRunner(
      function, input, schema, metrics, jobArtifactUUID, sessionUUID, SQLConf.get)
    runner.run(InternalRow(partition), TaskContext.get())
  }

  private var batch: ColumnarBatch = _

  override def next(): Boolean = batches.hasNext && { batch = batches.next(); true }

  override def get(): ColumnarBatch = batch

  // Nothing to do: the runner has registered a listener with the task, which ends the worker or
  // keeps it for the next task.
  override def close(): Unit = ()

  override def currentMetricsValues(): Array[CustomTaskMetric] =
    source.createPythonTaskMetrics(metrics.map { case (name, metric) => name -> metric.value })
}
