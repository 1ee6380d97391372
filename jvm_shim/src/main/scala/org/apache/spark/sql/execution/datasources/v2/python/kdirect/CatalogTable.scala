package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.util

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.connector.catalog.TableCatalog
import org.apache.spark.sql.connector.write.LogicalWriteInfo
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * The options of a table: those of `CREATE TABLE ... USING kdirect OPTIONS (...)`, or those of a
 * reader or writer.
 *
 * Spark's session catalog mixes the options of a table with its properties: an option `x` is there
 * as `x` and as `option.x`, beside `provider`, `owner` and the like, and `path`, a directory of the
 * warehouse that means nothing for a topic.  `provider` is there if and only if the table is one of
 * the catalog.
 */
private object CatalogTable {

  /**
   * Tells the Python data source that options are those of a table, which may be read and written:
   * the source does without those of a sink, and the other way round
   * (`kdirect_spark/shim_options.py`).
   */
  val Marker = "kdirect.table"

  def isOne(properties: util.Map[String, String]): Boolean =
    properties.containsKey(TableCatalog.PROP_PROVIDER)

  /** Refuses a table with a place in the file system, of which nothing would be read. */
  def check(properties: util.Map[String, String]): Unit =
    if (isOne(properties) && properties.containsKey(TableCatalog.PROP_LOCATION)
        && properties.get(TableCatalog.PROP_IS_MANAGED_LOCATION) != "true")
      throw new IllegalArgumentException(
        "a kdirect table has no LOCATION: remove it, and name topics by OPTIONS (subscribe 'x')")

  /** What the Python data source is given for these properties. */
  def options(properties: util.Map[String, String]): CaseInsensitiveStringMap =
    if (!isOne(properties)) new CaseInsensitiveStringMap(properties)
    else {
      val own = new util.HashMap[String, String]()
      // Whatever case the catalog has put names into, they are the same options.
      properties.asScala.foreach { case (name, value) =>
        if (name.toLowerCase(util.Locale.ROOT).startsWith(TableCatalog.OPTION_PREFIX))
          own.put(name.substring(TableCatalog.OPTION_PREFIX.length), value)
      }
      own.put(Marker, "true")
      new CaseInsensitiveStringMap(own)
    }

  /** Options of a query before those of the table. */
  def merged(
      table: CaseInsensitiveStringMap,
      query: CaseInsensitiveStringMap): CaseInsensitiveStringMap =
    if (query == table) query
    else {
      val all = new util.HashMap[String, String](table.asCaseSensitiveMap())
      query.asCaseSensitiveMap().forEach { (name, value) =>
        all.keySet.removeIf(_.equalsIgnoreCase(name))
        all.put(name, value)
      }
      new CaseInsensitiveStringMap(all)
    }

  /** What a writer is told, with the options of the table. */
  def merged(table: CaseInsensitiveStringMap, info: LogicalWriteInfo): LogicalWriteInfo =
    new LogicalWriteInfo {
      override def options(): CaseInsensitiveStringMap = merged(table, info.options())
      override def queryId(): String = info.queryId()
      override def schema(): StructType = info.schema()
      override def rowIdSchema(): util.Optional[StructType] = info.rowIdSchema()
      override def metadataSchema(): util.Optional[StructType] = info.metadataSchema()
    }
}
