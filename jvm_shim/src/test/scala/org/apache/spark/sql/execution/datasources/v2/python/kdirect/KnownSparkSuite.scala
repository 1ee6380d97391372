package org.apache.spark.sql.execution.datasources.v2.python.kdirect

class KnownSparkSuite extends munit.FunSuite {

  test("tested versions are known, and what the jar was compiled for") {
    Seq("4.2.0", "4.2.1", "4.3.0", "4.3.0-SNAPSHOT").foreach { version =>
      assertEquals(KnownSpark.unknown(version, None), None)
    }
    assertEquals(KnownSpark.unknown("4.4.0", Some("4.4.1")), None)
  }

  test("others are not, whatever the jar was compiled for") {
    Seq("4.1.4", "4.4.0", "5.0.0", "4.20.0").foreach { version =>
      val why = KnownSpark.unknown(version, Some("4.2.0"))
      assertEquals(why, Some(s"$version; it knows 4.2 and 4.3"))
    }
  }

  test("classes of this Spark link, and a class that is not there is a reason") {
    assert(KnownSpark.isKnown)
    assertEquals(
      KnownSpark.unlinked(getClass.getClassLoader, Seq("no.such.Thing")),
      Some("java.lang.ClassNotFoundException: no.such.Thing"))
  }
}
