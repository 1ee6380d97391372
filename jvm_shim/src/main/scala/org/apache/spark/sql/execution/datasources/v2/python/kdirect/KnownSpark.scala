package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import org.slf4j.LoggerFactory

/**
 * Whether the classes of Spark that the shim extends are those of the running Spark. If not,
 * Spark's own path for Python data sources is taken, which makes rows, and the log says so.
 *
 * What is loaded before this was asked (`KdirectSource`, `PythonHalf`) uses only what Spark has had
 * since 4.0.
 */
private[kdirect] object KnownSpark {

  /** Versions that one and the same jar is tested on. */
  val Tested: Seq[String] = Seq("4.2", "4.3")

  /**
   * What extends classes of Spark that are no public API, and what calls them most. A test compares
   * the former with the jar (`tests/spark/test_planner.py`).
   */
  val Classes: Seq[String] =
    Seq(
      "KdirectTable",
      "WritableTable",
      "TopicWriteBuilder",
      "TopicWriteBuilder$$anon$2",
      "TopicWrite",
      "TopicWrite$$anon$1",
      "TopicWrite$$anon$2",
      "RealTimeWrite",
      "ColumnarScanBuilder",
      "ColumnarScan",
      "ColumnarBatchScan",
      "ColumnarStream",
      "ColumnarReaderFactory",
      "PlacedPartition",
      "LivePartition",
      "PlannedSource",
      "PlannedSource$$anon$1",
      "PlannedSource$$anon$2",
      "PlannedSource$$anon$3",
      "PlannedSource$$anon$4",
      "PlannedSource$$anon$5",
      "PlannedStream",
      "CheckpointFiles")
      .map("org.apache.spark.sql.execution.datasources.v2.python.kdirect." + _) ++
      Seq("ColumnarRunner", "ColumnarRunner$$anon$1")
        .map("org.apache.spark.sql.execution.python.kdirect." + _)

  lazy val isKnown: Boolean = {
    val reason = unknown(org.apache.spark.SPARK_VERSION, Jar.own.compiledFor)
      .orElse(unlinked(getClass.getClassLoader, Classes))
    reason.foreach { why =>
      LoggerFactory
        .getLogger(classOf[KdirectSource])
        .warn(
          s"kdirect's shim does not know this Spark ($why): records are read as rows, not as "
            + "columns, and what else needs the shim (docs/spark.md) is not there")
    }
    reason.isEmpty
  }

  /** Why a version is not known; None if it is tested, or the jar was compiled for it. */
  def unknown(version: String, compiledFor: Option[String]): Option[String] =
    if ((Tested ++ compiledFor.map(minor)).contains(minor(version))) None
    else Some(s"$version; it knows ${Tested.mkString(" and ")}")

  private def minor(version: String): String = version.split('.').take(2).mkString(".")

  /** Why classes cannot be used here; None if they can. */
  def unlinked(loader: ClassLoader, names: Seq[String]): Option[String] =
    try {
      names.foreach(Class.forName(_, true, loader))
      None
    } catch { case e @ (_: LinkageError | _: ClassNotFoundException) => Some(e.toString) }
}
