package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util
import java.util.UUID
import java.util.concurrent.{ArrayBlockingQueue, Semaphore, TimeUnit}

import scala.jdk.CollectionConverters._

import org.apache.spark.{JobArtifactSet, SparkException, TaskContext}
import org.apache.spark.internal.Logging
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.connector.metric.CustomTaskMetric
import org.apache.spark.sql.connector.write.{
  DataWriter,
  LogicalWriteInfo,
  LogicalWriteInfoImpl,
  PhysicalWriteInfo,
  WriterCommitMessage
}
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonCustomMetric,
  PythonDataSourceV2,
  PythonStreamingWrite,
  PythonWriterCommitMessage,
  UserDefinedPythonDataSource
}
import org.apache.spark.sql.execution.metric.SQLMetric
import org.apache.spark.sql.execution.python.kdirect.ColumnarRunner
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** A sink of Real-Time Mode: what a query writes is sent row by row, and not at the end. */
private[kdirect] object RealTimeWrite extends Logging {

  private val Check = "spark.sql.streaming.realTimeMode.allowlistCheck"

  /**
   * Spark admits sinks for Real-Time Mode by the names of their classes, those of its own, and asks
   * no sink whether it can do it. All that there is to add one is to turn its check off, which then
   * is a line in its log. Done for a stream that is written to kdirect, where the session has
   * turned Real-Time Mode on and has said nothing about the check.
   */
  def admit(): Unit =
    if (RealTime.isOn && startsStream) {
      val conf = KdirectSource.settings
      if (!conf.contains(Check)) {
        logWarning(s"$Check=false: ${RealTime.Setting} is on, and kdirect is not in Spark's list "
          + "of sinks for Real-Time Mode; Spark warns about operators that are not in its lists")
        conf.setConfString(Check, "false")
      }
    }

  private def startsStream: Boolean =
    Thread.currentThread().getStackTrace.exists(_.getClassName.endsWith(".DataStreamWriter"))

  /** Whether the query of this id has a real-time trigger. */
  def isFor(queryId: String): Boolean =
    KdirectSource.session.exists { session =>
      val running = session.sharedState.activeStreamingQueries
      val query = scala.util.Try(UUID.fromString(queryId)).toOption.map(running.get(_))
      query.exists(q => q != null && q.trigger.getClass.getSimpleName == "RealTimeTrigger")
    }

  /** `info`, with which Python is told that rows are to be sent as they come. */
  def told(info: LogicalWriteInfo): LogicalWriteInfo = {
    val options = new util.HashMap[String, String](info.options.asCaseSensitiveMap())
    options.put(RealTime.Mark, "true")
    LogicalWriteInfoImpl(info.queryId, info.schema, new CaseInsensitiveStringMap(options))
  }
}

/** Spark's write of a Python data source, whose tasks send their rows as they come. */
private final class RealTimeWrite(
    ds: PythonDataSourceV2,
    info: LogicalWriteInfo,
    isTruncate: Boolean,
    written: CountsWritten)
    extends PythonStreamingWrite(ds, KdirectSource.Name, info, isTruncate) {

  private val jobArtifactUUID = JobArtifactSet.getCurrentJobArtifactState.map(_.uuid)

  override def createStreamingWriterFactory(
      physical: PhysicalWriteInfo): StreamingDataWriterFactory = {
    val written = ds.source.createWriteInfoInPython(
      KdirectSource.Name, info.schema, info.options, isTruncate, isStreaming = true)
    new RealTimeWriterFactory(ds.source, written.func, info.schema, jobArtifactUUID)
  }

  // At-least-once: what was written is there already. A call to Python would only delay the next
  // batch.
  override def commit(epochId: Long, messages: Array[WriterCommitMessage]): Unit =
    written.set(messages)
}

private final class RealTimeWriterFactory(
    source: UserDefinedPythonDataSource,
    write: Array[Byte],
    schema: StructType,
    jobArtifactUUID: Option[String])
    extends StreamingDataWriterFactory {

  override def createWriter(
      partitionId: Int,
      taskId: Long,
      epochId: Long): DataWriter[InternalRow] =
    new RealTimeWriter(source, write, schema, jobArtifactUUID)
}

/**
 * Hands rows to a Python worker as they come.
 *
 * Spark's task asks its source for the next row and blocks there, so the worker is served by a
 * thread of its own: it takes all rows that wait, at least one, and sends them as one Arrow batch.
 * Python acknowledges nothing until the end; an error of it is raised with the next row. Where the
 * worker is slower than the source, so many rows and bytes wait, and then the task does.
 */
private final class RealTimeWriter(
    source: UserDefinedPythonDataSource,
    write: Array[Byte],
    schema: StructType,
    jobArtifactUUID: Option[String])
    extends DataWriter[InternalRow] {

  import RealTimeWriter._

  private val waiting = new ArrayBlockingQueue[AnyRef](MostRows)
  private val room = new Semaphore(MostKiB) // of rows that wait, or are in the batch that is made
  @volatile private var failure: Throwable = _
  @volatile private var message: Array[Byte] = _

  private val context = TaskContext.get()

  private val metrics: Map[String, SQLMetric] = PythonCustomMetric.pythonMetrics

  private val runner = new ColumnarRunner(
    source.createPythonFunction(write),
    schema,
    UserDefinedPythonDataSource.writeOutputSchema,
    metrics,
    jobArtifactUUID,
    None,
    SQLConf.get)

  private val thread = new Thread("kdirect-real-time-writer") {
    override def run(): Unit = {
      TaskContext.setTaskContext(context)
      try
        runner.run(batches, context).foreach { batch =>
          if (batch.numRows > 0) message = batch.column(0).getBinary(0)
        }
      catch { case e: Throwable => failure = e }
    }
  }
  thread.setDaemon(true)
  thread.start()

  /** What waits, batch by batch, until the end. Only the thread asks. */
  private def batches: Iterator[Iterator[InternalRow]] = new Iterator[Iterator[InternalRow]] {
    private var first: AnyRef = _
    private var held = 0 // KiB of the batch before, which is made when the next one is asked for

    override def hasNext: Boolean = {
      room.release(held)
      held = 0
      while (first == null && !context.isInterrupted()) {
        // A task whose source fails is not interrupted, and says no end.
        if (context.isCompleted()) throw new SparkException("the task of the sink has ended")
        first = waiting.poll(PauseMs, TimeUnit.MILLISECONDS)
      }
      first != null && (first ne End)
    }

    override def next(): Iterator[InternalRow] = {
      val rows = new util.ArrayList[AnyRef]()
      rows.add(first)
      first = null
      waiting.drainTo(rows, MostRows)
      val last = rows.size - 1
      if (rows.get(last) eq End) first = rows.remove(last)
      held = rows.asScala.map(kibOf).sum
      new Iterator[InternalRow] {
        private var at = 0
        override def hasNext: Boolean = at < rows.size
        override def next(): InternalRow = { at += 1; rows.get(at - 1).asInstanceOf[InternalRow] }
      }
    }
  }

  override def write(row: InternalRow): Unit = {
    val taken = row.copy()
    while (!room.tryAcquire(kibOf(taken), PauseMs, TimeUnit.MILLISECONDS)) check()
    put(taken)
  }

  private def put(what: AnyRef): Unit = {
    var taken = false
    while (!taken) {
      check()
      taken = waiting.offer(what, PauseMs, TimeUnit.MILLISECONDS)
    }
  }

  private def check(): Unit = {
    if (failure != null) throw failure
    context.killTaskIfInterrupted()
    if (!thread.isAlive && message == null)
      throw new SparkException("the Python worker of the sink has ended before its task")
  }

  override def commit(): WriterCommitMessage = {
    put(End)
    while (thread.isAlive) {
      thread.join(PauseMs)
      context.killTaskIfInterrupted()
    }
    if (failure != null) throw failure
    if (message == null)
      throw new SparkException("the Python worker of the sink has sent no commit message")
    PythonWriterCommitMessage(message)
  }

  override def currentMetricsValues(): Array[CustomTaskMetric] =
    source.createPythonTaskMetrics(metrics.map { case (name, metric) => name -> metric.value })

  // The worker ends with the task, by the listener that the runner has registered.
  override def abort(): Unit = ()
  override def close(): Unit = ()
}

private object RealTimeWriter {
  private val MostRows = 10000
  private val MostKiB = 16 * 1024
  private val PauseMs = 100L
  private val End = new Object

  /** Of a row; at most all that there is room for, so that a larger one passes, too. */
  private def kibOf(row: AnyRef): Int = row match {
    case bytes: UnsafeRow => math.min(1 + bytes.getSizeInBytes / 1024, MostKiB)
    case _ => 1 // Spark's operators make none
  }
}
