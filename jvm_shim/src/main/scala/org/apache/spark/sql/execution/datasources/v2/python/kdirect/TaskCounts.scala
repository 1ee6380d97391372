package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.io.{ByteArrayOutputStream, IOException}
import java.nio.{ByteBuffer, ByteOrder}
import java.nio.channels.FileChannel
import java.nio.charset.StandardCharsets.{US_ASCII, UTF_8}
import java.nio.file.{Files, Path, Paths, StandardOpenOption}
import java.util

import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

import org.apache.spark.SparkEnv
import org.apache.spark.internal.Logging
import org.apache.spark.sql.connector.metric.{CustomMetric, CustomSumMetric, CustomTaskMetric}
import org.apache.spark.util.{AccumulatorV2, Utils}

/**
 * What a task's Python worker says that it has done, as numbers in the order of `names`:
 * `kdirect_spark/counts.py` has the other half, and says what they mean. Nothing here trusts the
 * worker: what is no count is 0, and no count fails a task.
 */
private[kdirect] object TaskCounts {
  val Read: Seq[String] = Seq(
    "rows", "reads", "read_bytes", "tcp_bytes", "object_bytes", "crc_failures", "wait_us",
    "transports", "offset_out_of_range", "data_loss", "lag_partitions", "lag_sum_ms", "lag_min_ms",
    "lag_max_ms")
  val Written: Seq[String] = Seq(
    "records", "requests", "write_bytes", "send_bytes", "tcp_bytes", "wait_us", "transports")

  /** More than any task does; the sum over a thousand tasks is still a number of 64 bits. */
  private val Most = 1L << 53

  def believed(count: Long): Long = if (count < 0 || count > Most) 0L else count

  def nothing(names: Seq[String]): Array[Long] = new Array[Long](names.size)

  /** The counts of two tasks, or of two parts of a task, together. */
  def merged(names: Seq[String], a: Array[Long], b: Array[Long]): Array[Long] = {
    val partitions = names.indexOf("lag_partitions")
    Array.tabulate(names.size) { i =>
      names(i) match {
        case "transports" => a(i) | b(i)
        case "lag_max_ms" => math.max(a(i), b(i))
        case "lag_min_ms" if a(partitions) == 0 => b(i)
        case "lag_min_ms" if b(partitions) == 0 => a(i)
        case "lag_min_ms" => math.min(a(i), b(i))
        case _ => a(i) + b(i)
      }
    }
  }

  private val Begin = "kdirect.written[".getBytes(US_ASCII)
  private val MostText = 1024

  /** Those in the pickled commit message of a task that wrote. */
  def ofMessage(pickled: Array[Byte]): Array[Long] = {
    val start = pickled.indexOfSlice(Begin) + Begin.length
    val end = if (start < Begin.length) -1 else pickled.indexOf(']'.toByte, start)
    if (end <= start || end - start > MostText) nothing(Written)
    else {
      val texts = new String(pickled, start, end - start, US_ASCII).split(',')
      if (texts.length != Written.size) nothing(Written)
      else texts.map(text => believed(text.toLongOption.getOrElse(0L)))
    }
  }

  private val Call = "kdirect_spark.counts\npartition_with_counts\n".getBytes(US_ASCII)

  /**
   * A pickled partition that, where it is unpickled, gives the same one, and says that the task
   * tells its counts in the file `path`: a call of two arguments, in protocol 3 of pickle.
   */
  def partition(pickled: Array[Byte], path: String): Array[Byte] = {
    val name = path.getBytes(UTF_8)
    val out = new ByteArrayOutputStream(pickled.length + name.length + Call.length + 16)
    def size(n: Int): Unit =
      out.write(ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN).putInt(n).array())
    out.write(Array[Byte](0x80.toByte, 3, 'c'))
    out.write(Call)
    out.write('B')
    size(pickled.length)
    out.write(pickled)
    out.write('X')
    size(name.length)
    out.write(name)
    out.write(Array[Byte](0x86.toByte, 'R', '.'))
    out.toByteArray
  }
}

/**
 * The file in which one reader's Python worker tells its counts. A reader in the JVM makes it,
 * looks into it as often as Spark asks, and deletes it. Used from the task's thread.
 */
private[kdirect] final class CountsFile extends Logging {
  private val names = TaskCounts.Read
  private val bytes = ByteBuffer.allocate(names.size * 8 + 1).order(ByteOrder.LITTLE_ENDIAN)
  private var last = TaskCounts.nothing(names)
  private var channel: FileChannel = _

  /** None: it could not be made, so nothing is counted. */
  val path: Option[Path] =
    try {
      val directory = Paths.get(Utils.getLocalDir(SparkEnv.get.conf))
      val made = Files.createTempFile(directory, "kdirect-counts-", "")
      try channel = FileChannel.open(made, StandardOpenOption.READ)
      catch { case e: Throwable => Files.deleteIfExists(made); throw e }
      Some(made)
    } catch {
      case e @ (_: IOException | _: SecurityException) =>
        logInfo(s"the counts of a task are not known: $e")
        None
    }

  /** The counts as of now. */
  def counts(): Array[Long] = {
    if (channel != null)
      try {
        bytes.clear()
        // A file of another length is not written yet, or by somebody else.
        if (channel.read(bytes, 0L) == names.size * 8)
          last = Array.tabulate(names.size)(i => TaskCounts.believed(bytes.getLong(8 * i)))
      } catch {
        case NonFatal(e) => logDebug(s"the counts of a task cannot be read: $e")
      }
    last
  }

  def close(): Unit = {
    try {
      if (channel != null) channel.close()
      path.foreach(Files.deleteIfExists)
    } catch {
      case NonFatal(e) => logDebug(s"the counts of a task stay in ${path.orNull}: $e")
    }
    channel = null
  }
}

/** The counts of all tasks of a stream that read since it was last asked. */
private[kdirect] final class CountsOfTasks extends AccumulatorV2[Array[Long], Array[Long]] {
  @volatile private var sum = TaskCounts.nothing(TaskCounts.Read)

  override def isZero: Boolean = sum.forall(_ == 0)
  override def reset(): Unit = sum = TaskCounts.nothing(TaskCounts.Read)
  override def add(counts: Array[Long]): Unit =
    synchronized { sum = TaskCounts.merged(TaskCounts.Read, sum, counts) }
  override def merge(other: AccumulatorV2[Array[Long], Array[Long]]): Unit = add(other.value)
  override def value: Array[Long] = sum
  override def copy(): CountsOfTasks = {
    val other = new CountsOfTasks
    other.sum = sum
    other
  }

  /** What is counted, which counts no more. */
  def take(): Array[Long] = synchronized {
    val taken = sum
    reset()
    taken
  }
}

/** Metrics as Spark shows them. Spark makes the classes again where it adds up, without names. */
private[kdirect] final class TotalOfTasks(
    override val name: String,
    override val description: String)
    extends CustomSumMetric {
  def this() = this("", "")
}

/** Of microseconds. */
private[kdirect] final class TimeOfTasks(
    override val name: String,
    override val description: String)
    extends CustomMetric {
  def this() = this("", "")
  override def aggregateTaskMetrics(values: Array[Long]): String = f"${values.sum / 1000.0}%.1f ms"
}

/** Of sets of transports. */
private[kdirect] final class TransportsOfTasks(
    override val name: String,
    override val description: String)
    extends CustomMetric {
  def this() = this("", "")
  override def aggregateTaskMetrics(values: Array[Long]): String =
    Metrics.transports(values.foldLeft(0L)(_ | _))
}

/** The table of metrics, and how counts become their values; docs/spark.md describes them. */
private[kdirect] object Metrics {
  private final case class One(count: String, metric: CustomMetric)

  // Names and words of the first two are those of Spark's Kafka connector.
  private val Scan = Seq(
    One(
      "offset_out_of_range",
      new TotalOfTasks("offsetOutOfRange", "estimated number of fetched offsets out of range")),
    One("data_loss", new TotalOfTasks("dataLoss", "number of data loss error")),
    One("rows", new TotalOfTasks("rowsRead", "rows read")),
    One("read_bytes", new TotalOfTasks("readBytes", "bytes READ one-sidedly")),
    One("reads", new TotalOfTasks("reads", "READs posted")),
    One("tcp_bytes", new TotalOfTasks("tcpBytes", "bytes over TCP")),
    One("object_bytes", new TotalOfTasks("objectBytes", "bytes of remote storage")),
    One("crc_failures", new TotalOfTasks("crcFailures", "CRC failures")),
    One("wait_us", new TimeOfTasks("waitTime", "time of waiting for records")),
    One("transports", new TransportsOfTasks("transport", "transport")))

  private val Write = Seq(
    One("records", new TotalOfTasks("recordsWritten", "records written")),
    One("requests", new TotalOfTasks("requests", "produce requests")),
    One("write_bytes", new TotalOfTasks("writeBytes", "bytes written one-sidedly")),
    One("send_bytes", new TotalOfTasks("sendBytes", "bytes in SENDs")),
    One("tcp_bytes", new TotalOfTasks("tcpBytes", "bytes over TCP")),
    One("wait_us", new TimeOfTasks("waitTime", "time of waiting for acknowledgements")),
    One("transports", new TransportsOfTasks("transport", "transport")))

  def ofScan: Array[CustomMetric] = Scan.map(_.metric).toArray
  def ofWrite: Array[CustomMetric] = Write.map(_.metric).toArray

  def ofReader(counts: Array[Long]): Array[CustomTaskMetric] =
    values(Scan, TaskCounts.Read, counts)
  def ofWriter(counts: Array[Long]): Array[CustomTaskMetric] =
    values(Write, TaskCounts.Written, counts)

  private def values(
      table: Seq[One],
      names: Seq[String],
      counts: Array[Long]): Array[CustomTaskMetric] =
    table.map { one =>
      val n = counts(names.indexOf(one.count))
      new CustomTaskMetric {
        override def name(): String = one.metric.name
        override def value(): Long = n
      }: CustomTaskMetric
    }.toArray

  /** Of a micro-batch that was read, for a query's progress. */
  def progressOfSource(counts: Array[Long]): util.Map[String, String] = {
    val of = TaskCounts.Read.zip(counts).toMap
    val partitions = of("lag_partitions")
    val lag =
      if (partitions == 0) Map.empty
      else
        Map(
          "minTimeLagMs" -> of("lag_min_ms").toString,
          "maxTimeLagMs" -> of("lag_max_ms").toString,
          "avgTimeLagMs" -> (of("lag_sum_ms").toDouble / partitions).toString)
    val losses = Map(
      "offsetOutOfRange" -> of("offset_out_of_range").toString,
      "dataLoss" -> of("data_loss").toString)
    (losses ++ lag).asJava
  }

  /** Of a micro-batch that was written, for a query's progress. */
  def progressOfSink(counts: Array[Long]): util.Map[String, String] =
    Write.map { case One(count, metric) =>
      val n = counts(TaskCounts.Written.indexOf(count))
      metric.name -> (if (count == "records") n.toString else metric.aggregateTaskMetrics(Array(n)))
    }.toMap.asJava

  private val Transports = Seq("shm", "verbs", "tcp", "objects", "other")

  def transports(bits: Long): String =
    Transports.zipWithIndex
      .collect { case (name, i) if (bits >> i & 1) == 1 => name }
      .mkString(", ")
}
