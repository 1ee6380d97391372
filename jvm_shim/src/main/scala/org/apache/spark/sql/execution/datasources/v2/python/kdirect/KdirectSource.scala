package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import scala.util.control.NonFatal

import org.apache.spark.SparkContext
import org.apache.spark.sql.classic.SparkSession
import org.apache.spark.sql.connector.catalog.{Table, TableCapability}
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.connector.metric.CustomMetric
import org.apache.spark.sql.connector.read.{
  Batch,
  InputPartition,
  PartitionReaderFactory,
  Scan,
  ScanBuilder,
  SupportsPushDownAggregates,
  SupportsPushDownRequiredColumns,
  SupportsPushDownV2Filters
}
import org.apache.spark.sql.connector.read.streaming.{
  MicroBatchStream,
  Offset,
  ReadLimit,
  PartitionOffset,
  ReportsSourceMetrics,
  SupportsRealTimeMode,
  SupportsTriggerAvailableNow
}
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, WriteBuilder}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonDataSourceReadInfo,
  PythonDataSourceV2,
  PythonMicroBatchStreamWithTriggerAvailableNow,
  PythonScan,
  PythonStreamingInputPartition,
  UserDefinedPythonDataSource
}
import org.apache.spark.sql.execution.python.streaming.PythonStreamingSourceRunner
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.sources.{DataSourceRegister, Filter}
import org.apache.spark.sql.types.{LongType, StructField, StructType}
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
final class KdirectSource
    extends PythonDataSourceV2
    with DataSourceRegister
    with SavesInEveryMode {

  override def shortName(): String = KdirectSource.Name

  private[python] override lazy val source: UserDefinedPythonDataSource = PythonHalf.source()

  override def getTable(
      schema: StructType,
      partitioning: Array[Transform],
      properties: util.Map[String, String]): Table =
    if (KnownSpark.isKnown) {
      CatalogTable.check(properties) // with columns Spark does not ask for a schema
      RealTimeWrite.admit()
      CheckpointFiles.use()
      new KdirectTable(this, schema, properties)
    } else super.getTable(schema, partitioning, properties)

  /** Spark asks at CREATE TABLE without columns, and keeps the answer in its catalog. */
  override def inferSchema(options: CaseInsensitiveStringMap): StructType =
    if (KnownSpark.isKnown) {
      CatalogTable.check(options)
      super.inferSchema(KdirectSource.marked(CatalogTable.options(options)))
    } else super.inferSchema(KdirectSource.marked(options))
}

object KdirectSource {
  val Name = "kdirect"
  val Columnar = "spark.kdirect.columnar"

  // Options: which columns the Python reader reads, and the schema that values are decoded with.
  val Columns = "columns"
  val ValueFormat = "valueFormat"
  val ValueSchema = "valueSchema"

  /** The session that plans on this thread: Spark tells a data source of none. */
  private[kdirect] def session: Option[SparkSession] =
    SparkSession.getActiveSession.orElse(SparkSession.getDefaultSession)

  /** Its settings, to be changed. */
  private[kdirect] def settings: SQLConf = session.fold(SQLConf.get)(_.sessionState.conf)

  /** A setting of the session that is true or false. */
  def isOn(setting: String, default: Boolean): Boolean = {
    val said = SQLConf.get.getConfString(setting, default.toString).trim
    said.toBooleanOption.getOrElse(
      throw new IllegalArgumentException(s"$setting is $said; set it to true or false"))
  }

  // An option that only the shim sets.
  val LoadedBy = "kdirectLoadedBy"

  /**
   * The options with what tells Python whether load() of a batch or of a stream asks, so that it
   * refuses there what such a query cannot have, as Spark's Kafka connector does. Spark itself
   * tells no data source.
   */
  private def marked(options: CaseInsensitiveStringMap): CaseInsensitiveStringMap =
    loadedBy.fold(options) { kind =>
      val more = new util.HashMap[String, String](options.asCaseSensitiveMap())
      more.put(LoadedBy, kind)
      new CaseInsensitiveStringMap(more)
    }

  private val Readers =
    Map("DataStreamReader" -> "stream", "DataFrameReader" -> "batch")

  /** Whose load() is on the stack of this thread. */
  private def loadedBy: Option[String] =
    Thread.currentThread().getStackTrace.iterator
      .filter(_.getMethodName == "load")
      .flatMap(frame => Readers.get(frame.getClassName.split('.').last))
      .nextOption()

  /**
   * What is read for a query that asks for no column at all, as count() does: the narrowest one. Of
   * Kafka's row this is `partition`.
   */
  def narrowest(schema: StructType): StructType =
    StructType(schema.minByOption(_.dataType.defaultSize).toSeq)
}

/** What a reader, a writer or a table of the catalog names.  A query's own options go first. */
private final class KdirectTable(
    source: PythonDataSourceV2,
    schema: StructType,
    told: util.Map[String, String])
    extends WritableTable(source, schema, told) {

  private val own = CatalogTable.options(told)

  // For nodes of plans. With asynchronous progress, Spark looks at the name.
  override def name(): String = {
    val topics = Topics.read(own)
    val name = super.name()
    if (topics.isEmpty || name != KdirectSource.Name) name else s"$name $topics"
  }

  override def properties(): util.Map[String, String] =
    if (CatalogTable.isOne(told)) told else super.properties()

  /** A sink takes what columns it needs by their names, and ignores others. */
  override def capabilities(): util.Set[TableCapability] = {
    val all = new util.HashSet(super.capabilities())
    if (CatalogTable.isOne(told)) all.add(TableCapability.ACCEPT_ANY_SCHEMA)
    all
  }

  override def newScanBuilder(options: CaseInsensitiveStringMap): ScanBuilder = {
    val all = CatalogTable.merged(own, options)
    if (KdirectSource.isOn(KdirectSource.Columnar, default = true))
      new ColumnarScanBuilder(source, schema, all)
    else super.newScanBuilder(all)
  }

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder =
    super.newWriteBuilder(CatalogTable.merged(own, info))
}

private final class ColumnarScanBuilder(
    source: PythonDataSourceV2,
    schema: StructType,
    options: CaseInsensitiveStringMap)
    extends SupportsPushDownRequiredColumns
    with SupportsPushDownV2Filters
    with SupportsPushDownAggregates {

  private var required = schema
  private var filter: Option[Pushdown.Taken] = None
  private var counted: Option[Seq[String]] = None

  // Columns of values may have the names of Kafka's, and mean something else.
  private val isKafkasRow = !options.containsKey(KdirectSource.ValueFormat)

  /** Only whole columns are pruned, not their fields. Spark does not prune those of a stream. */
  override def pruneColumns(wanted: StructType): Unit = {
    val names = wanted.fieldNames.toSet
    val some = schema.filter(field => names.contains(field.name))
    required = if (some.isEmpty) KdirectSource.narrowest(schema) else StructType(some)
  }

  override def pushPredicates(predicates: Array[Predicate]): Array[Predicate] = {
    if (isKafkasRow) filter = Pushdown.take(predicates)
    filter.fold(predicates)(_.left)
  }

  override def pushedPredicates(): Array[Predicate] = filter.fold(Array.empty[Predicate])(_.taken)

  /** Each task gives a row for what it reads, so Spark adds them up. */
  override def pushAggregation(aggregation: Aggregation): Boolean = {
    counted = if (isKafkasRow) Pushdown.counted(aggregation) else None
    counted.foreach { names =>
      val numbers = aggregation.aggregateExpressions.indices
      val counts = numbers.map(i => StructField(s"count$i", LongType))
      required = StructType(names.map(schema(_)) ++ counts)
    }
    counted.isDefined
  }

  override def build(): Scan =
    new ColumnarScan(source, schema, required, options, Pushed(filter, counted))
}

/** What a scan does of a query's filters and counts. */
private final case class Pushed(filter: Option[Pushdown.Taken], counted: Option[Seq[String]]) {

  def isEmpty: Boolean = filter.isEmpty && counted.isEmpty

  /** For the plan that Spark shows. */
  def metadata: Map[String, String] =
    filter.map(x => "PushedFilters" -> x.taken.mkString("[", ", ", "]")).toMap ++
      counted.map { names =>
        val by = if (names.isEmpty) "" else names.mkString(" by ", ", ", "")
        "PushedAggregates" -> s"count$by"
      }

  /** For the Python data source. */
  def options: Map[String, String] =
    filter.map(Pushdown.FilterOption -> _.json).toMap ++
      counted.map(Pushdown.CountOption -> _.mkString(","))
}

private final class ColumnarScan(
    source: PythonDataSourceV2,
    schema: StructType,
    required: StructType,
    options: CaseInsensitiveStringMap,
    pushed: Pushed)
    extends PythonScan(source, KdirectSource.Name, schema, options, Array.empty[Filter]) {

  override def readSchema(): StructType = required

  private var stream: Option[ColumnarStream] = None

  /** Real-Time Mode takes rows. Spark asks after it has told the stream its trigger. */
  override def columnarSupportMode(): Scan.ColumnarSupportMode =
    if (stream.exists(_.isRealTime)) Scan.ColumnarSupportMode.UNSUPPORTED
    else Scan.ColumnarSupportMode.SUPPORTED

  override def getMetaData(): Map[String, String] =
    Map("ReadSchema" -> required.simpleString, "Topics" -> Topics.read(options)) ++ pushed.metadata

  override def supportedCustomMetrics(): Array[CustomMetric] =
    super.supportedCustomMetrics() ++ Metrics.ofScan

  override def description(): String = {
    val of = s"${super.description()} ${Topics.read(options)}"
    (of +: pushed.metadata.map { case (name, value) => s"$name: $value" }.toSeq).mkString(", ")
  }

  override def toBatch(): Batch = new ColumnarBatchScan(source, schema, required, options, pushed)

  override def toMicroBatchStream(checkpointLocation: String): MicroBatchStream = {
    // First, because the stream keeps the planner from then on.
    val info =
      source.getOrCreateReadInfo(KdirectSource.Name, options, schema, isStreaming = true)
    val created =
      source.getOrCreateDataSourceInPython(KdirectSource.Name, options, Some(schema))
    val function = source.source.createPythonFunction(created.dataSource)
    val runner = Planner
      .find(function, Map.empty)
      .fold(new PythonStreamingSourceRunner(function, schema))(
        new PlannedStream(_, function, schema))
    try runner.init()
    catch { case e: Throwable => runner.stop(); throw e }
    val planned = new PythonMicroBatchStreamWithTriggerAvailableNow(
      source, KdirectSource.Name, schema, options, runner)
    val made = new ColumnarStream(planned, source.source, info.func, schema, options)
    this.stream = Some(made)
    made
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
    options: CaseInsensitiveStringMap,
    pushed: Pushed)
    extends Batch {

  private lazy val info: PythonDataSourceReadInfo = {
    val created =
      if (required == schema && pushed.isEmpty && !options.containsKey(CatalogTable.Marker))
        source.getOrCreateDataSourceInPython(KdirectSource.Name, options, Some(schema))
      else {
        val narrower = new util.HashMap[String, String](options.asCaseSensitiveMap())
        if (pushed.counted.isEmpty) {
          narrower.keySet.removeIf(_.equalsIgnoreCase(KdirectSource.Columns))
          narrower.put(KdirectSource.Columns, required.fieldNames.mkString(","))
        }
        // The reader gets the narrower schema, but values are written with the whole one.
        if (options.containsKey(KdirectSource.ValueFormat)
            && !options.containsKey(KdirectSource.ValueSchema))
          narrower.put(KdirectSource.ValueSchema, schema.json)
        pushed.options.foreach { case (name, value) => narrower.put(name, value) }
        source.source.createDataSourceInPython(
          KdirectSource.Name, new CaseInsensitiveStringMap(narrower), Some(required))
      }
    source.source.createReadInfoInPython(created, required, isStreaming = false)
  }

  override def planInputPartitions(): Array[InputPartition] =
    info.partitions.zipWithIndex.map { case (pickled, i) =>
      new PlacedPartition(i, pickled): InputPartition
    }.toArray

  override def createReaderFactory(): PartitionReaderFactory =
    new ColumnarReaderFactory(source.source, info.func, required)
}

/**
 * Spark's stream over a Python data source, with tasks that read columns; in Real-Time Mode rows,
 * as they come.
 */
private final class ColumnarStream(
    stream: PythonMicroBatchStreamWithTriggerAvailableNow,
    source: UserDefinedPythonDataSource,
    read: Array[Byte],
    schema: StructType,
    options: CaseInsensitiveStringMap)
    extends MicroBatchStream
    with SupportsTriggerAvailableNow
    with SupportsRealTimeMode
    with ReportsSourceMetrics {

  // What the planner reported last. The engine asks for it before it asks for metrics, in each
  // trigger and from the same thread.
  private var latest: Option[Offset] = None

  override def planInputPartitions(start: Offset, end: Offset): Array[InputPartition] =
    stream.planInputPartitions(start, end).map { planned =>
      val partition = planned.asInstanceOf[PythonStreamingInputPartition]
      new PlacedPartition(partition.index, partition.pickedPartition): InputPartition
    }

  // Registered where the first micro-batch is planned: before, nobody may be there to count.
  private lazy val counted = {
    val counts = new CountsOfTasks
    SparkSession.active.sparkContext.register(counts)
    counts
  }

  override def createReaderFactory(): PartitionReaderFactory =
    if (isRealTime) new RealTimeReaderFactory(source, liveRead, schema, counted)
    else new ColumnarReaderFactory(source, read, schema, Some(counted))

  // Real-Time Mode: the start of the batch that runs, and how tasks read.
  private var start: Option[Offset] = None

  @volatile private[kdirect] var isRealTime = false

  private lazy val liveRead: Array[Byte] = {
    val tasks = RealTime.schemaOfTasks(schema)
    val more = new util.HashMap[String, String](options.asCaseSensitiveMap())
    more.put(RealTime.Mark, "true")
    val made = source.createDataSourceInPython(
      KdirectSource.Name, new CaseInsensitiveStringMap(more), Some(tasks))
    source.createReadInfoInPython(made, tasks, isStreaming = true).func
  }

  override def prepareForRealTimeMode(): Unit = {
    try RealTime.refuseIfOff()
    catch { case e: IllegalArgumentException => stop(); throw e } // the engine does not stop it
    isRealTime = true
  }

  override def planInputPartitions(from: Offset): Array[InputPartition] = {
    start = Some(from)
    val planned = stream.planInputPartitions(from, stream.deserializeOffset(RealTime.NoEnd))
    Slots.keep(this, planned.length, SparkContext.getOrCreate())
    planned.map { planned =>
      val partition = planned.asInstanceOf[PythonStreamingInputPartition]
      new LivePartition(partition.index, partition.pickedPartition): InputPartition
    }
  }

  override def mergeOffsets(done: Array[PartitionOffset]): Offset = {
    val ranges = done.toSeq.collect { case ReadUpTo(ranges) => ranges }.flatten
    stream.deserializeOffset(LiveOffsets.merged(start.get.json, ranges))
  }

  override def initialOffset(): Offset = stream.initialOffset()
  override def latestOffset(): Offset = stream.latestOffset()
  override def latestOffset(start: Offset, limit: ReadLimit): Offset =
    stream.latestOffset(start, limit)
  override def reportLatestOffset(): Offset = {
    val reported = stream.reportLatestOffset()
    latest = Option(reported)
    reported
  }
  override def metrics(consumed: util.Optional[Offset]): util.Map[String, String] = {
    val done = Option(consumed.orElse(null))
    // What was latest when a real-time batch began is long past when it ends.
    if (isRealTime) done.foreach(refreshLatest)
    val behind = OffsetsBehind.metrics(done.map(_.json), latest.map(_.json))
    val all = new util.HashMap[String, String](behind)
    all.putAll(Metrics.progressOfSource(counted.take()))
    all
  }
  private def refreshLatest(done: Offset): Unit =
    try {
      stream.latestOffset(done, ReadLimit.allAvailable())
      reportLatestOffset()
    } catch {
      // The next batch asks again, and says what is wrong.
      case NonFatal(_) => ()
    }
  override def getDefaultReadLimit(): ReadLimit = stream.getDefaultReadLimit()
  override def prepareForTriggerAvailableNow(): Unit = stream.prepareForTriggerAvailableNow()
  override def deserializeOffset(json: String): Offset = stream.deserializeOffset(json)
  override def commit(end: Offset): Unit = stream.commit(end)
  override def stop(): Unit = {
    Slots.release(this)
    stream.stop()
  }
  override def toString: String = s"${KdirectSource.Name}[${Topics.read(options)}]"
}
