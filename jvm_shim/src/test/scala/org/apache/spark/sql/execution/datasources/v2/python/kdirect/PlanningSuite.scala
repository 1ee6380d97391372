package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** What the shim decides without Spark and without Python. */
class PlanningSuite extends munit.FunSuite {

  test("how far a stream is behind, over the partitions that it has begun") {
    val done = Some("""{"t":{"0":10,"1":5},"/topic-id/t/x":{}}""")
    val latest = Some("""{"t":{"0":12,"1":9,"2":100},"/topic-id/t/x":{}}""")
    assertEquals(
      OffsetsBehind.metrics(done, latest).asScala.toMap,
      Map(
        "minOffsetsBehindLatest" -> "2",
        "maxOffsetsBehindLatest" -> "4",
        "avgOffsetsBehindLatest" -> "3.0"))
    assert(OffsetsBehind.metrics(None, latest).isEmpty)
    assert(OffsetsBehind.metrics(done, None).isEmpty)
    val ahead = OffsetsBehind.metrics(Some("""{"t":{"0":10}}"""), Some("""{"t":{"0":7}}"""))
    assertEquals(ahead.get("maxOffsetsBehindLatest"), "0")
  }

  test("hosts of a task, as Python writes them into a pickle") {
    def hosts(text: String) = Placement.hosts(text.getBytes("UTF-8")).toSeq
    assertEquals(hosts("..kdirect.hosts[a,b.example]..."), Seq("a", "b.example"))
    assertEquals(hosts("nothing of the kind"), Nil)
    assertEquals(hosts("kdirect.hosts[]"), Nil)
    assertEquals(hosts("kdirect.hosts[unclosed"), Nil)
    assertEquals(hosts(s"kdirect.hosts[${"x" * 5000}]"), Nil)
  }

  test("options of a table of the catalog are those behind option., whatever their case") {
    val properties = Map(
      "provider" -> "kdirect", "owner" -> "me", "subscribe" -> "t",
      "option.subscribe" -> "t", "Option.failOnDataLoss" -> "false").asJava
    assertEquals(
      CatalogTable.options(properties).asCaseSensitiveMap().asScala.toMap,
      Map("subscribe" -> "t", "failOnDataLoss" -> "false", CatalogTable.Marker -> "true"))
    val query = Map("SUBSCRIBE" -> "t").asJava
    assertEquals(CatalogTable.options(query).asCaseSensitiveMap(), query)
  }

  test("options of a query go before those of its table") {
    def map(options: (String, String)*) = new CaseInsensitiveStringMap(options.toMap.asJava)
    val merged = CatalogTable.merged(map("a" -> "1", "b" -> "2"), map("B" -> "3"))
    assertEquals(merged.get("a"), "1")
    assertEquals(merged.get("b"), "3")
  }
}
