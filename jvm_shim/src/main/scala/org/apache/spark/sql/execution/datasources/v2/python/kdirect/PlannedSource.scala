package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import scala.jdk.CollectionConverters._

import org.apache.spark.api.python.PythonFunction
import org.apache.spark.sql.catalyst.util.CaseInsensitiveMap
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, WriterCommitMessage}
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonDataSourceCreationResult,
  PythonDataSourceReadInfo,
  PythonDataSourceV2,
  PythonDataSourceWriteInfo,
  PythonStreamingSinkCommitRunner,
  UserDefinedPythonDataSource,
  UserDefinedPythonDataSourceCommitRunner,
  UserDefinedPythonDataSourceReadRunner,
  UserDefinedPythonDataSourceRunner,
  UserDefinedPythonDataSourceWriteRunner
}
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** Python's data source of kdirect, with a `Planner` for what Spark asks it for on the driver. */
private[kdirect] final class PlannedSource(cls: PythonFunction)
    extends UserDefinedPythonDataSource(cls) {

  // What the tasks of a stream run, and for which question Python gave it. On the driver only.
  @transient private var ofStream: Option[(Any, PythonDataSourceWriteInfo)] = None

  override def createDataSourceInPython(
      name: String,
      options: CaseInsensitiveStringMap,
      schema: Option[StructType]): PythonDataSourceCreationResult = {
    val given = CaseInsensitiveMap(options.asCaseSensitiveMap().asScala.toMap)
    new UserDefinedPythonDataSourceRunner(cls, name, schema, given)
      with InPlanner[PythonDataSourceCreationResult] {
      override protected def function: PythonFunction = cls
      override protected def kind: Int = Planner.Create
    }.runInPython()
  }

  override def createReadInfoInPython(
      created: PythonDataSourceCreationResult,
      schema: StructType,
      isStreaming: Boolean): PythonDataSourceReadInfo = {
    val source = createPythonFunction(created.dataSource)
    val input = UserDefinedPythonDataSource.readInputSchema
    PlannedSource.withRowLimit {
      new UserDefinedPythonDataSourceReadRunner(source, input, schema, isStreaming)
        with InPlanner[PythonDataSourceReadInfo] {
        override protected def function: PythonFunction = source
        override protected def kind: Int = Planner.Read
      }.runInPython()
    }
  }

  /**
   * Spark asks for each micro-batch. A stream's writer knows its options only, so that the first
   * answer holds for all of them. That of a batch is drawn for one write, and never kept.
   */
  override def createWriteInfoInPython(
      provider: String,
      schema: StructType,
      options: CaseInsensitiveStringMap,
      overwrite: Boolean,
      isStreaming: Boolean): PythonDataSourceWriteInfo = synchronized {
    val given = options.asCaseSensitiveMap().asScala.toMap
    val question = (provider, schema, given, overwrite)
    ofStream match {
      case Some((`question`, info)) if isStreaming => info
      case _ =>
        val runner = new UserDefinedPythonDataSourceWriteRunner(
          cls, provider, schema, given, overwrite, isStreaming)
          with InPlanner[PythonDataSourceWriteInfo] {
          override protected def function: PythonFunction = cls
          override protected def kind: Int = Planner.Write
        }
        val info = runner.runInPython()
        if (isStreaming) ofStream = Some((question, info))
        info
    }
  }

  override def commitWriteInPython(
      writer: Array[Byte],
      messages: Array[WriterCommitMessage],
      abort: Boolean): Unit =
    new UserDefinedPythonDataSourceCommitRunner(cls, writer, messages, abort)
      with InPlanner[Unit] {
      override protected def function: PythonFunction = cls
      override protected def kind: Int = Planner.CommitBatch
    }.runInPython()
}

private[kdirect] object PlannedSource {

  private val RowLimit = SQLConf.ARROW_EXECUTION_MAX_RECORDS_PER_BATCH

  /**
   * Says what the session has as the most rows of an Arrow batch, where that is "no limit" (0 or
   * less), by a number: PySpark's code for data sources refuses all others. kdirect yields Arrow
   * batches, to which the limit does not apply.
   */
  def withRowLimit[T](ask: => T): T =
    if (SQLConf.get.arrowMaxRecordsPerBatch > 0) ask
    else {
      val limited = SQLConf.get.clone()
      limited.setConf(RowLimit, Int.MaxValue)
      SQLConf.withExistingConf(limited)(ask)
    }

  /** Ends a micro-batch in Python, as Spark's `PythonStreamingWrite` does, but in a `Planner`. */
  def endBatch(
      source: PythonDataSourceV2,
      info: LogicalWriteInfo,
      truncates: Boolean,
      batch: Long,
      messages: Array[WriterCommitMessage],
      abort: Boolean): Unit = {
    val created =
      source.getOrCreateDataSourceInPython(KdirectSource.Name, info.options, Some(info.schema))
    val made = source.source.createPythonFunction(created.dataSource)
    new PythonStreamingSinkCommitRunner(made, info.schema, messages, batch, truncates, abort)
      with InPlanner[Unit] {
      override protected def function: PythonFunction = made
      override protected def kind: Int = Planner.CommitStream
    }.runInPython()
  }
}
