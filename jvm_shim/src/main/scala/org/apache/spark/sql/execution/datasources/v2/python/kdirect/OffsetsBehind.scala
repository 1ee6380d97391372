package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import scala.jdk.CollectionConverters._

import org.json4s.{JInt, JObject}
import org.json4s.jackson.JsonMethods

/**
 * How far a stream is behind the newest offsets that its planner has seen, in the words of Spark's
 * Kafka connector.
 */
private[kdirect] object OffsetsBehind {

  /**
   * The metrics of a source in a query's progress. Both are the JSON of offsets,
   * `{"topic":{"0":123}}`; members that hold no offsets (ids of topics) are left out. Empty while
   * either is not known. A partition that the query has not begun is not counted.
   */
  def metrics(consumed: Option[String], latest: Option[String]): util.Map[String, String] = {
    val done = consumed.map(offsets).getOrElse(Map.empty)
    val behind = latest.map(offsets).getOrElse(Map.empty).toSeq.flatMap { case (partition, end) =>
      done.get(partition).map(offset => math.max(0L, end - offset))
    }
    if (behind.isEmpty) util.Map.of()
    else
      Map(
        "minOffsetsBehindLatest" -> behind.min.toString,
        "maxOffsetsBehindLatest" -> behind.max.toString,
        "avgOffsetsBehindLatest" -> (behind.sum.toDouble / behind.size).toString).asJava
  }

  private def offsets(json: String): Map[(String, String), Long] =
    JsonMethods.parse(json) match {
      case JObject(topics) =>
        val all = for {
          (topic, JObject(partitions)) <- topics
          (partition, JInt(offset)) <- partitions
        } yield (topic, partition) -> offset.toLong
        all.toMap
      case _ => Map.empty
    }
}
