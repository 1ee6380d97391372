package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.connector.catalog.Table
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read.{
  Batch,
  InputPartition,
  PartitionReaderFactory,
  Scan,
  ScanBuilder,
  SupportsPushDownRequiredColumns
}
import org.apache.spark.sql.connector.read.streaming.{
  MicroBatchStream,
  Offset,
  ReadLimit,
  SupportsTriggerAvailableNow
}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonDataSourceReadInfo,
  PythonDataSourceV2,
  PythonInputPartition,
  PythonMicroBatchStreamWithTriggerAvailableNow,
  PythonScan,
  PythonStreamingInputPartition,
  PythonTable
}
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.sources.{DataSourceRegister, Filter}
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * `format("kdirect")` with columns: everything is the Python data source of that name, except how
 * the JVM takes what its tasks read.
 *
 * Spark finds this class by its short name before it looks for a Python data source. Options,
 * offsets, planning, the sink and every error come from Python. Here, Arrow batches stay columns,
 * and a batch query reads only the columns that it needs (option `columns`).
 * `spark.kdirect.columnar=false` chooses Spark's own path, which makes rows.
 *
 * It uses classes of Spark that are not public API, so kdirect_spark.shim compiles it for the Spark
 * that is installed.
 */
final class KdirectSource extends PythonDataSourceV2 with DataSourceRegister {

  override def shortName(): String = KdirectSource.Name

  override def getTable(
      schema: StructType,
      partitioning: Array[Transform],
      properties: util.Map[String, String]): Table =
    new KdirectTable(this, schema)
}

object KdirectSource {
  val Name = "kdirect"
  val Columnar = "spark.kdirect.columnar"

  // Options: which columns the Python reader reads, and the schema that values are decoded with.
  val Columns = "columns"
  val ValueFormat = "valueFormat"
  val ValueSchema = "valueSchema"

  /**
   * What is read for a query that asks for no column at all, as count() does: the narrowest one. Of
   * Kafka's row this is `partition`.
   */
  def narrowest(schema: StructType): StructType =
    StructType(schema.minByOption(_.dataType.defaultSize).toSeq)
}

private final class KdirectTable(source: PythonDataSourceV2, schema: StructType)
    extends PythonTable(source, KdirectSource.Name, schema) {

  override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder =
    if (SQLConf.get.getConfString(KdirectSource.Columnar, "true").toBoolean)
      new ColumnarScanBuilder(source, schema, options)
    else super.newScanBuilder(options)
}

private final class ColumnarScanBuilder(
    source: PythonDataSourceV2,
    schema: StructType,
    options: CaseInsensitiveStringMap)
    extends SupportsPushDownRequiredColumns {

  private var required = schema

  /** Only whole columns are pruned, not their fields. Spark does not prune those of a stream. */
  override def pruneColumns(wanted: StructType): Unit = {
    val names = wanted.fieldNames.toSet
    val some = schema.filter(field => names.contains(field.name))
    required = if (some.isEmpty) KdirectSource.narrowest(schema) else StructType(some)
  }

  override def build(): Scan = new ColumnarScan(source, schema, required, options)
}

private final class ColumnarScan(
    source: PythonDataSourceV2,
    schema: StructType,
    required: StructType,
    options: CaseInsensitiveStringMap)
    extends PythonScan(source, KdirectSource.Name, schema, options, Array.empty[Filter]) {

  override def readSchema(): StructType = required

  override def columnarSupportMode(): Scan.ColumnarSupportMode = Scan.ColumnarSupportMode.SUPPORTED

  override def getMetaData(): Map[String, String] = Map("ReadSchema" -> required.simpleString)

  override def toBatch(): Batch = new ColumnarBatchScan(source, schema, required, options)

  override def toMicroBatchStream(checkpointLocation: String): MicroBatchStream =
    super.toMicroBatchStream(checkpointLocation) match {
      case stream: PythonMicroBatchStreamWithTriggerAvailableNow =>
        new ColumnarStream(stream, source, schema, options)
      case other =>
        throw new IllegalStateException(
          s"kdirect's stream reader supports Trigger.AvailableNow, but $other does not")
    }
}

/**
 * Planned again for each query, so that each reads what exists when it starts, as with Spark's
 * Kafka connector.
 */
private final class ColumnarBatchScan(
    source: PythonDataSourceV2,
    schema: StructType,
    required: StructType,
    options: CaseInsensitiveStringMap)
    extends Batch {

  private lazy val info: PythonDataSourceReadInfo = {
    val created =
      if (required == schema)
        source.getOrCreateDataSourceInPython(KdirectSource.Name, options, Some(schema))
      else {
        val narrower = new util.HashMap[String, String](options.asCaseSensitiveMap())
        narrower.keySet.removeIf(_.equalsIgnoreCase(KdirectSource.Columns))
        narrower.put(KdirectSource.Columns, required.fieldNames.mkString(","))
        // The reader gets the narrower schema, but values are written with the whole one.
        if (options.containsKey(KdirectSource.ValueFormat)
            && !options.containsKey(KdirectSource.ValueSchema))
          narrower.put(KdirectSource.ValueSchema, schema.json)
        source.source.createDataSourceInPython(
          KdirectSource.Name, new CaseInsensitiveStringMap(narrower), Some(required))
      }
    source.source.createReadInfoInPython(created, required, isStreaming = false)
  }

  override def planInputPartitions(): Array[InputPartition] =
    info.partitions.zipWithIndex.map { case (pickled, i) =>
      PythonInputPartition(i, pickled): InputPartition
    }.toArray

  override def createReaderFactory(): PartitionReaderFactory =
    new ColumnarReaderFactory(source.source, info.func, required)
}

/** Spark's stream over a Python data source, with tasks that read columns. */
private final class ColumnarStream(
    stream: PythonMicroBatchStreamWithTriggerAvailableNow,
    source: PythonDataSourceV2,
    schema: StructType,
    options: CaseInsensitiveStringMap)
    extends MicroBatchStream
    with SupportsTriggerAvailableNow {

  private lazy val info =
    source.getOrCreateReadInfo(KdirectSource.Name, options, schema, isStreaming = true)

  override def planInputPartitions(start: Offset, end: Offset): Array[InputPartition] =
    stream.planInputPartitions(start, end).map { planned =>
      val partition = planned.asInstanceOf[PythonStreamingInputPartition]
      PythonInputPartition(partition.index, partition.pickedPartition)
    }

  override def createReaderFactory(): PartitionReaderFactory =
    new ColumnarReaderFactory(source.source, info.func, schema)

  override def initialOffset(): Offset = stream.initialOffset()
  override def latestOffset(): Offset = stream.latestOffset()
  override def latestOffset(start: Offset, limit: ReadLimit): Offset =
    stream.latestOffset(start, limit)
  override def reportLatestOffset(): Offset = stream.reportLatestOffset()
  override def getDefaultReadLimit(): ReadLimit = stream.getDefaultReadLimit()
  override def prepareForTriggerAvailableNow(): Unit = stream.prepareForTriggerAvailableNow()
  override def deserializeOffset(json: String): Offset = stream.deserializeOffset(json)
  override def commit(end: Offset): Unit = stream.commit(end)
  override def stop(): Unit = stream.stop()
  override def toString: String = {
    val given = options.asScala
    s"kdirect[${given.get("subscribe").orElse(given.get("subscribePattern")).getOrElse("")}]"
  }
}
