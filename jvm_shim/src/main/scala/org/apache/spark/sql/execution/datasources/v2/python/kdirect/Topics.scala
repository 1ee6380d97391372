package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import scala.util.control.NonFatal

import org.apache.spark.sql.util.CaseInsensitiveStringMap
import org.json4s.{JArray, JInt, JObject}
import org.json4s.jackson.JsonMethods

/** What a query reads, as Spark's Kafka connector names it in plans and in a query's progress. */
private[kdirect] object Topics {

  /** "" where the options say nothing; Python says what is wrong with them. */
  def read(options: CaseInsensitiveStringMap): String = {
    def given(name: String): Option[String] = Option(options.get(name))
    given("subscribe").map(names => s"Subscribe[${names.split(',').map(_.trim).mkString(", ")}]")
      .orElse(given("subscribePattern").map(pattern => s"SubscribePattern[$pattern]"))
      .orElse(given("assign").map(json => s"Assign[${assigned(json).getOrElse(json)}]"))
      .getOrElse("")
  }

  /** `{"t":[0,1]}` as `t-0, t-1`. */
  private def assigned(json: String): Option[String] =
    try JsonMethods.parse(json) match {
      case JObject(topics) =>
        val all = for {
          (topic, JArray(partitions)) <- topics
          JInt(partition) <- partitions
        } yield s"$topic-$partition"
        Some(all.mkString(", ")).filter(_.nonEmpty)
      case _ => None
    } catch {
      case NonFatal(_) => None
    }
}
