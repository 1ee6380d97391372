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
 * batches of `schema`. `counted` gets what each reader has counted when it ends.
 */
final class ColumnarReaderFactory(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    schema: StructType,
    counted: Option[CountsOfTasks] = None)
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
    new ColumnarReader(source, read, pickled, schema, counted, jobArtifactUUID, sessionUUID)
  }
}

private final class ColumnarReader(
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    partition: Array[Byte],
    schema: StructType,
    counted: Option[CountsOfTasks],
    jobArtifactUUID: Option[String],
    sessionUUID: Option[String])
    extends PartitionReader[ColumnarBatch] {

  private val metrics: Map[String, SQLMetric] = PythonCustomMetric.pythonMetrics

  private val file = new CountsFile
  private var closed = false

  private val batches: Iterator[ColumnarBatch] = {
    val inputSchema = UserDefinedPythonDataSource.readInputSchema
    val function = source.createPythonFunction(read)
    val runner = new ColumnarRunner(
      function, inputSchema, schema, metrics, jobArtifactUUID, sessionUUID, SQLConf.get)
    val input = file.path.fold(partition)(x => TaskCounts.partition(partition, x.toString))
    // Nobody closes a reader that could not be made, as where no Python process can be started.
    try runner.run(InternalRow(input), TaskContext.get())
    catch { case e: Throwable => file.close(); throw e }
  }

  private var batch: ColumnarBatch = _

  override def next(): Boolean = batches.hasNext && { batch = batches.next(); true }

  override def get(): ColumnarBatch = batch

  // The worker is not this method's: the runner has registered a listener with the task, which ends
  // the worker or keeps it for the next task.
  override def close(): Unit = if (!closed) {
    closed = true
    counted.foreach(_.add(file.counts()))
    file.close()
  }

  override def currentMetricsValues(): Array[CustomTaskMetric] =
    source.createPythonTaskMetrics(metrics.map { case (name, metric) => name -> metric.value }) ++
      Metrics.ofReader(file.counts())
}
