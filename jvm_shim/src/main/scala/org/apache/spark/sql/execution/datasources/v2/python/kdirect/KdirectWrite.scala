package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import org.apache.spark.sql.{DataFrame, SaveMode, SQLContext}
import org.apache.spark.sql.catalyst.util.CaseInsensitiveMap
import org.apache.spark.sql.connector.catalog.{TableCapability, TableCatalog}
import org.apache.spark.sql.connector.read.streaming.ReportsSinkMetrics
import org.apache.spark.sql.connector.write.{
  LogicalWriteInfo,
  LogicalWriteInfoImpl,
  Write,
  WriteBuilder
}
import org.apache.spark.sql.connector.write.streaming.StreamingWrite
import org.apache.spark.sql.execution.datasources.DataSourceUtils
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonDataSourceV2,
  PythonTable,
  PythonWrite,
  PythonWriteBuilder
}
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend
import org.apache.spark.sql.sources.{BaseRelation, CreatableRelationProvider}
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * `df.write.format("kdirect").save()` in the modes that Spark's Kafka connector has: append, and
 * error if exists, the default, which appends too, because a topic has no content that would be in
 * the way.
 *
 * Spark asks a source of tables for no mode but append and overwrite. A table that cannot be
 * written in batches makes it come here, with the mode, and from here it is sent back with a mark.
 * Python refuses to overwrite.
 */
private[kdirect] trait SavesInEveryMode extends CreatableRelationProvider {

  override def createRelation(
      context: SQLContext,
      mode: SaveMode,
      parameters: Map[String, String],
      data: DataFrame): BaseRelation = {
    if (mode == SaveMode.Ignore)
      throw new IllegalArgumentException(
        "a topic cannot be written with mode(\"ignore\"); leave out the mode, or write with "
          + "mode(\"append\")")
    val given = parameters match {
      case options: CaseInsensitiveMap[String @unchecked] => options.originalMap
      case options => options
    }
    val marks =
      Seq(DataSourceUtils.PARTITIONING_COLUMNS_KEY, DataSourceUtils.CLUSTERING_COLUMNS_KEY)
    if (marks.exists(given.contains))
      throw new IllegalArgumentException(
        "a topic is not partitioned by columns; remove partitionBy and clusterBy, and name the "
          + "partition of a row in its column partition")
    data.write
      .format(KdirectSource.Name)
      .mode(if (mode == SaveMode.Overwrite) mode else SaveMode.Append)
      .options(given + (WritableTable.Saved -> "true"))
      .save()
    new BaseRelation {
      override def sqlContext: SQLContext = context
      override def schema: StructType = data.schema
    }
  }
}

private[kdirect] object WritableTable {

  /** The mark of a batch that came through SavesInEveryMode. Python never sees it. */
  val Saved = "__kdirectSaved"

  val AsyncProgress = "asyncProgressTrackingEnabled"

  /** Spark admits asynchronous progress tracking for sinks of these names only. */
  val NameThatSparkAdmits = "KafkaTable"
}

/** The half of the table that writes. `properties` are the options of the query. */
private[kdirect] abstract class WritableTable(
    source: PythonDataSourceV2,
    schema: StructType,
    properties: util.Map[String, String])
    extends PythonTable(source, KdirectSource.Name, schema)
    with ReportsSinkMetrics {

  private val given = new CaseInsensitiveStringMap(properties)
  private val written = new CountsWritten

  /** What the last micro-batch wrote. */
  override def metrics(): util.Map[String, String] = Metrics.progressOfSink(written.take())

  /** For a query's progress. */
  override def toString: String =
    Option(given.get("topic")).fold(name())(topic => s"${KdirectSource.Name}[$topic]")

  // With exactly-once, Python refuses the combination and says why.
  override def name(): String =
    if (given.getBoolean(WritableTable.AsyncProgress, false)) WritableTable.NameThatSparkAdmits
    else KdirectSource.Name

  override def capabilities(): util.Set[TableCapability] = {
    val all = util.EnumSet.copyOf(super.capabilities())
    val ofCatalog = given.containsKey(TableCatalog.PROP_PROVIDER)
    if (!ofCatalog && !given.containsKey(WritableTable.Saved))
      all.remove(TableCapability.BATCH_WRITE)
    all
  }

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
    val options = new util.HashMap[String, String](info.options.asCaseSensitiveMap())
    options.keySet.removeIf(_.equalsIgnoreCase(WritableTable.Saved))
    new TopicWriteBuilder(
      source,
      LogicalWriteInfoImpl(info.queryId, info.schema, new CaseInsensitiveStringMap(options)),
      written)
  }
}

/**
 * Output mode update appends what comes, by this mark. Output mode complete does by the truncation
 * that Python hears of and ignores in a stream, as Spark's Kafka sink does.
 */
private final class TopicWriteBuilder(
    source: PythonDataSourceV2,
    info: LogicalWriteInfo,
    written: CountsWritten)
    extends PythonWriteBuilder(source, KdirectSource.Name, info)
    with SupportsStreamingUpdateAsAppend {

  private var truncates = false

  override def truncate(): WriteBuilder = {
    truncates = true
    super.truncate()
  }

  override def build(): Write =
    if (!RealTimeWrite.isFor(info.queryId)) new TopicWrite(source, info, truncates, written)
    else {
      val told = RealTimeWrite.told(info)
      new PythonWrite(source, KdirectSource.Name, told, truncates) {
        override def toStreaming(): StreamingWrite =
          new RealTimeWrite(source, told, truncates, written)
      }
    }
}
