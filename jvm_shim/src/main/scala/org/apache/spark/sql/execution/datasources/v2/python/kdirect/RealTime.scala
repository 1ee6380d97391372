package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.nio.charset.StandardCharsets.UTF_8
import java.util

import scala.jdk.CollectionConverters._

import org.json4s.{JArray, JInt, JObject, JString}
import org.json4s.jackson.JsonMethods

import org.apache.spark.SparkContext
import org.apache.spark.internal.Logging
import org.apache.spark.resource.ResourceProfile
import org.apache.spark.sql.connector.read.streaming.PartitionOffset
import org.apache.spark.sql.execution.datasources.v2.python.PythonInputPartition
import org.apache.spark.sql.types.{IntegerType, LongType, StructField, StructType}

/**
 * Real-Time Mode (`trigger(realTime=...)`): what driver and tasks have in common. It is off unless
 * the session says otherwise.
 *
 * A task reads from where the batch before it stopped until the batch ends, and reports how far it
 * came. Python plans and reads (`kdirect_spark/real_time.py`); what it says to the JVM is a text in
 * the pickle of a partition, and two more columns of each row.
 */
private[kdirect] object RealTime {

  val Setting = "spark.kdirect.realTime"

  /** An option that only the shim sets: rows have the two more columns, or are written at once. */
  val Mark = "kdirect.realTime"

  /** In the place of an end offset: what is planned has no end (`kdirect_spark/real_time.py`). */
  val NoEnd = """{"/real-time": {}}"""

  def isOn: Boolean = KdirectSource.isOn(Setting, default = false)

  def refuseIfOff(): Unit =
    if (!isOn)
      throw new IllegalArgumentException(
        "trigger(realTime=...): kdirect's Real-Time Mode is experimental, and off; turn it on with "
          + s"""spark.conf.set("$Setting", "true"), or use another trigger""")

  /**
   * What tasks read: the query's row, and then the number of the range that a row is of, and the
   * offset after it. A row whose number is -1 - n holds nothing but how far range n was read.
   */
  def schemaOfTasks(schema: StructType): StructType =
    StructType(schema.fields ++ Seq(
      StructField("__kdirect_range", IntegerType),
      StructField("__kdirect_next", LongType)))
}

/** How far the ranges of a task were read. */
private final case class ReadUpTo(ranges: Seq[LiveRange]) extends PartitionOffset

/** One topic partition of a task, from `offset` on. `topicId` is empty where there is none. */
private final case class LiveRange(topic: String, partition: Int, offset: Long, topicId: String)

/** What a task of a real-time batch reads, as Python has planned it. */
private final class LivePartition(index: Int, pickled: Array[Byte])
    extends PythonInputPartition(index, pickled) {

  override def preferredLocations(): Array[String] = Placement.hosts(pickled)
}

private object LivePartition {
  private val Begin = "kdirect.real-time[".getBytes(UTF_8)
  private val End = "]kdirect".getBytes(UTF_8)
  private val Until = "\"until\": \"".getBytes(UTF_8)
  private val Digits = 16

  private def unknown =
    new IllegalStateException(
      "kdirect's shim and its Python package are of different versions; install both from one")

  def ranges(pickled: Array[Byte]): Seq[LiveRange] = {
    val start = pickled.indexOfSlice(Begin) + Begin.length
    val end = pickled.indexOfSlice(End, start)
    if (start < Begin.length || end < 0) throw unknown
    JsonMethods.parse(new String(pickled, start, end - start, UTF_8)) match {
      case JObject(members) =>
        members.toMap.get("ranges") match {
          case Some(JArray(ranges)) =>
            ranges.map {
              case JArray(List(JString(topic), JInt(partition), JInt(offset), JString(id))) =>
                LiveRange(topic, partition.toInt, offset.toLong, id)
              case _ => throw unknown
            }
          case _ => throw unknown
        }
      case _ => throw unknown
    }
  }

  /** A copy that says when the batch ends, unless Python has said so. In ms since 1970. */
  def until(pickled: Array[Byte], endMs: Long): Array[Byte] = {
    val at = pickled.indexOfSlice(Until)
    if (at < 0) throw unknown
    val digits = new String(pickled, at + Until.length, Digits, UTF_8)
    val out = pickled.clone()
    if (digits.toLong == 0L) {
      val text = s"%0${Digits}d".format(endMs).getBytes(UTF_8)
      System.arraycopy(text, 0, out, at + Until.length, Digits)
    }
    out
  }
}

/** Offsets as Python writes them, so that equal ones are equal text. */
private object LiveOffsets {

  def merged(start: String, done: Seq[LiveRange]): String =
    if (done.isEmpty) start
    else {
      // A task that has run twice has reported twice.
      val ofPartitions = done.groupBy(range => (range.topic, range.partition)).values
      val topics = ofPartitions.map(_.maxBy(_.offset)).groupBy(_.topic).toSeq.sortBy(_._1)
      val offsets = topics.map { case (topic, ranges) =>
        val each = ranges.toSeq.sortBy(_.partition).map(r => s""""${r.partition}": ${r.offset}""")
        s""""$topic": {${each.mkString(", ")}}"""
      }
      val ids = topics.flatMap { case (topic, ranges) =>
        val known = ranges.headOption.map(_.topicId).filter(_.nonEmpty)
        known.map(id => s""""/topic-id/$topic/$id": {}""")
      }
      (offsets ++ ids).mkString("{", ", ", "}")
    }
}

/**
 * The task slots that real-time batches keep. A task that has none waits until another batch ends,
 * and its partition is not read: no error of Spark's tells.
 */
private object Slots extends Logging {

  private val WaitMs = 30000L
  private val PauseMs = 200L

  // By stream. A stream is gone when its query stops it.
  private val kept = new util.IdentityHashMap[AnyRef, Integer]()

  def release(stream: AnyRef): Unit = synchronized { kept.remove(stream) }

  /** Keeps slots for `tasks`, or refuses, with both numbers. */
  def keep(stream: AnyRef, tasks: Int, context: SparkContext): Unit = {
    val deadline = System.currentTimeMillis() + (if (context.isLocal) 0L else WaitMs)
    // Executors may still be starting.
    while (!tryToKeep(stream, tasks, context)) {
      if (System.currentTimeMillis() >= deadline) throw refused(tasks, ofOthers, slots(context))
      Thread.sleep(PauseMs)
    }
  }

  /** The look and what follows from it are one step: two streams may start at the same time. */
  private def tryToKeep(stream: AnyRef, tasks: Int, context: SparkContext): Boolean =
    synchronized {
      kept.remove(stream)
      val enough = tasks + ofOthers <= slots(context)
      if (enough) kept.put(stream, tasks)
      enough
    }

  /** Of a stream that keeps none yet. */
  private def ofOthers: Int = synchronized { kept.values.asScala.map(_.intValue).sum }

  private def refused(tasks: Int, others: Int, there: Int) = {
    val more = if (others > 0) s", beside $others of other real-time streams" else ""
    new IllegalArgumentException(
      s"Real-Time Mode keeps a task slot for each partition that is read: this source has $tasks "
        + s"partitions$more, but there are $there task slots; give Spark more cores, or set the "
        + s"option coalescePartitions to at most ${math.max(1, there - others)}")
  }

  private def slots(context: SparkContext): Int = {
    val profile = context.resourceProfileManager.resourceProfileFromId(
      ResourceProfile.DEFAULT_RESOURCE_PROFILE_ID)
    val now = context.maxNumConcurrentTasks(profile)
    val conf = context.conf
    if (!conf.getBoolean("spark.dynamicAllocation.enabled", false)) now
    else {
      val most = conf.getInt("spark.dynamicAllocation.maxExecutors", Int.MaxValue).toLong
      val each = conf.getInt("spark.executor.cores", 1) / conf.getInt("spark.task.cpus", 1)
      math.max(now.toLong, math.min(most * each, Int.MaxValue.toLong)).toInt
    }
  }
}
