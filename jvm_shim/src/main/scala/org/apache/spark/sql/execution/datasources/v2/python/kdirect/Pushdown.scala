package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.ObjectMapper

import org.apache.spark.sql.connector.expressions.{Expression, Literal, NamedReference}
import org.apache.spark.sql.connector.expressions.aggregate.{Aggregation, Count, CountStar}
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.types._
import org.apache.spark.unsafe.types.UTF8String

/**
 * What the Python data source can do with Spark's predicates and aggregates on a batch of Kafka's
 * rows.  `kdirect_spark/pushdown.py` says what conditions mean and which of them are exact: those
 * on topic, partition and offset.
 */
private object Pushdown {

  /** Options that only this shim sets (`kdirect_spark/shim_options.py`). */
  val FilterOption = "kdirect.pushed.filter"
  val CountOption = "kdirect.pushed.count"

  /** A condition of more values may give more pieces than a partition is read in. */
  private val MostValues = 60

  private val exactColumns =
    Map[String, DataType]("topic" -> StringType, "partition" -> IntegerType, "offset" -> LongType)
  private val columns = exactColumns + ("timestamp" -> TimestampType)

  // Never null, so that to count them is to count rows.
  private val neverNull = columns.keySet + "timestampType"

  private val mirrored = Map("=" -> "=", "<=>" -> "=", "<" -> ">", "<=" -> ">=", ">" -> "<",
    ">=" -> "<=")

  /** A condition as JSON objects for Python, and how many values it compares with. */
  private final case class Condition(json: util.Map[String, Any], exact: Boolean, values: Int)

  /**
   * What of `predicates`, all of which hold, the Python data source takes: JSON for it, what it
   * takes, and what Spark still has to evaluate.
   */
  final case class Taken(json: String, taken: Array[Predicate], left: Array[Predicate])

  def take(predicates: Array[Predicate]): Option[Taken] = {
    val known = predicates.map(predicate => predicate -> condition(predicate))
    val taken = known.collect { case (predicate, Some(_)) => predicate }
    if (taken.isEmpty) None
    else {
      val conditions = known.flatMap(_._2)
      val few = conditions.map(_.values).sum <= MostValues
      val left = known.collect { case (predicate, c) if !(few && c.exists(_.exact)) => predicate }
      val json = new ObjectMapper().writeValueAsString(group("and", conditions.toSeq).json)
      Some(Taken(json, taken, left))
    }
  }

  /** The columns by which rows are counted, if that is all that is asked for. */
  def counted(aggregation: Aggregation): Option[Seq[String]] = {
    val columns = aggregation.groupByExpressions.map(name)
    val onlyCounts = aggregation.aggregateExpressions.forall {
      case _: CountStar => true
      case count: Count => !count.isDistinct && name(count.column).exists(neverNull)
      case _ => false
    }
    if (onlyCounts && aggregation.aggregateExpressions.nonEmpty
        && columns.forall(_.exists(Set("topic", "partition")))) Some(columns.flatten.toSeq)
    else None
  }

  private def group(op: String, of: Seq[Condition]): Condition =
    Condition(
      util.Map.of("op", op, "of", of.map(_.json).asJava),
      of.forall(_.exact),
      of.map(_.values).sum)

  private def condition(predicate: Expression): Option[Condition] = predicate match {
    case p: Predicate => (p.name, p.children.toSeq) match {
      case ("AND", Seq(a, b)) =>
        // One side alone excludes less, but nothing that it should not.
        (condition(a), condition(b)) match {
          case (Some(x), Some(y)) => Some(group("and", Seq(x, y)))
          case (x, y) => x.orElse(y).map(_.copy(exact = false))
        }
      case ("OR", Seq(a, b)) =>
        for (x <- condition(a); y <- condition(b)) yield group("or", Seq(x, y))
      case ("NOT", Seq(a)) => condition(a).filter(_.exact).map(x => group("not", Seq(x)))
      case ("IS_NOT_NULL", Seq(a)) =>
        name(a).filter(neverNull).map(_ => group("and", Nil))
      case ("IN", column +: literals) => compared("=", column, literals)
      case (op, Seq(column, literal: Literal[_])) if mirrored.contains(op) =>
        compared(if (op == "<=>") "=" else op, column, Seq(literal))
      case (op, Seq(literal: Literal[_], column)) if mirrored.contains(op) =>
        compared(mirrored(op), column, Seq(literal))
      case _ => None
    }
    case _ => None
  }

  private def compared(op: String, column: Expression, of: Seq[Expression]): Option[Condition] =
    name(column).filter(columns.contains).flatMap { name =>
      val values = of.map {
        case literal: Literal[_] if literal.dataType == columns(name) => value(literal.value)
        case _ => None
      }
      if (values.isEmpty || values.exists(_.isEmpty)) None
      else {
        val json =
          util.Map.of[String, Any]("op", op, "column", name, "values", values.flatten.asJava)
        Some(Condition(json, exactColumns.contains(name), values.length))
      }
    }

  /** Times are microseconds since 1970. */
  private def value(of: Any): Option[Any] = of match {
    case text: UTF8String => Some(text.toString)
    case number: Integer => Some(number)
    case number: java.lang.Long => Some(number)
    case _ => None
  }

  private def name(column: Expression): Option[String] = column match {
    case reference: NamedReference if reference.fieldNames.length == 1 =>
      Some(reference.fieldNames.head)
    case _ => None
  }
}
