package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util.{Iterator => JavaIterator}

import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.metric.{CustomMetric, CustomTaskMetric}
import org.apache.spark.sql.connector.write.{
  BatchWrite,
  DataWriter,
  DataWriterFactory,
  LogicalWriteInfo,
  PhysicalWriteInfo,
  WriterCommitMessage
}
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonBatchWrite,
  PythonDataSourceV2,
  PythonStreamingWrite,
  PythonWrite,
  PythonWriterCommitMessage
}

/** What the tasks of a stream's last micro-batch wrote, by their commit messages. */
private[kdirect] final class CountsWritten {
  private var last = TaskCounts.nothing(TaskCounts.Written)

  def set(messages: Array[WriterCommitMessage]): Unit = synchronized {
    last = messages.map(CountsWritten.of)
      .foldLeft(TaskCounts.nothing(TaskCounts.Written))(TaskCounts.merged(TaskCounts.Written, _, _))
  }

  /** They are told once: a trigger without data writes nothing. */
  def take(): Array[Long] = synchronized {
    val taken = last
    last = TaskCounts.nothing(TaskCounts.Written)
    taken
  }
}

private[kdirect] object CountsWritten {
  def of(message: WriterCommitMessage): Array[Long] = message match {
    case PythonWriterCommitMessage(pickled) if pickled != null => TaskCounts.ofMessage(pickled)
    case _ => TaskCounts.nothing(TaskCounts.Written)
  }
}

/** Spark's write by a Python data source, with the metrics of what it wrote. */
private final class TopicWrite(
    source: PythonDataSourceV2,
    info: LogicalWriteInfo,
    truncates: Boolean,
    written: CountsWritten)
    extends PythonWrite(source, KdirectSource.Name, info, truncates) {

  override def description: String =
    Option(info.options.get("topic")).fold(super.description)(topic => s"$topic (Python)")

  override def supportedCustomMetrics(): Array[CustomMetric] =
    super.supportedCustomMetrics() ++ Metrics.ofWrite

  override def toBatch: BatchWrite =
    new PythonBatchWrite(source, KdirectSource.Name, info, truncates) {
      override def createBatchWriterFactory(physical: PhysicalWriteInfo): DataWriterFactory =
        new CountedWriterFactory(super.createBatchWriterFactory(physical))
    }

  override def toStreaming: StreamingWrite =
    new PythonStreamingWrite(source, KdirectSource.Name, info, truncates) {
      override def createStreamingWriterFactory(
          physical: PhysicalWriteInfo): StreamingDataWriterFactory =
        new CountedStreamingWriterFactory(super.createStreamingWriterFactory(physical))

      override def commit(batch: Long, messages: Array[WriterCommitMessage]): Unit = {
        PlannedSource.endBatch(source, info, truncates, batch, messages, abort = false)
        written.set(messages)
      }

      override def abort(batch: Long, messages: Array[WriterCommitMessage]): Unit =
        PlannedSource.endBatch(source, info, truncates, batch, messages, abort = true)
    }
}

private final class CountedWriterFactory(factory: DataWriterFactory) extends DataWriterFactory {
  override def createWriter(partition: Int, task: Long): DataWriter[InternalRow] =
    new CountedWriter(factory.createWriter(partition, task))
}

private final class CountedStreamingWriterFactory(factory: StreamingDataWriterFactory)
    extends StreamingDataWriterFactory {
  override def createWriter(partition: Int, task: Long, batch: Long): DataWriter[InternalRow] =
    new CountedWriter(factory.createWriter(partition, task, batch))
}

/** The commit message is there once all rows are written, and with it the counts. */
private final class CountedWriter(writer: DataWriter[InternalRow]) extends DataWriter[InternalRow] {
  private var counts = TaskCounts.nothing(TaskCounts.Written)

  override def write(row: InternalRow): Unit = writer.write(row)

  override def writeAll(rows: JavaIterator[InternalRow]): Unit = {
    writer.writeAll(rows)
    counts = CountsWritten.of(writer.commit()) // which only returns the message
  }

  override def commit(): WriterCommitMessage = writer.commit()
  override def abort(): Unit = writer.abort()
  override def close(): Unit = writer.close()

  override def currentMetricsValues(): Array[CustomTaskMetric] =
    writer.currentMetricsValues() ++ Metrics.ofWriter(counts)
}
