package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.io.File
import java.nio.file.{Files, Path}
import java.util.Comparator
import java.util.zip.{ZipEntry, ZipOutputStream}

import scala.jdk.CollectionConverters._
import scala.util.Using

class PythonHalfSuite extends munit.FunSuite {

  private val directory = FunFixture[Path](
    _ => Files.createTempDirectory("kdirect-jar"),
    path => Files.walk(path).sorted(Comparator.reverseOrder[Path]).forEach(Files.delete(_)))

  private def zip(path: Path, entries: (String, String)*): Path = {
    Using.resource(new ZipOutputStream(Files.newOutputStream(path))) { out =>
      entries.foreach { case (name, content) =>
        out.putNextEntry(new ZipEntry(name))
        out.write(content.getBytes("UTF-8"))
      }
    }
    path
  }

  private val properties = Jar.PropertiesEntry -> "version=1.2.3\nspark=4.2.0\n"

  directory.test("a jar says what it is, and whether it holds Python packages") { home =>
    val thin = zip(home.resolve("thin.jar"), properties)
    val whole = zip(home.resolve("whole jar.jar"), properties, Jar.ManifestEntry -> "{}")
    assertEquals(
      Jar.of(thin), Jar(Some(thin.toString), holdsPython = false, Some("1.2.3"), Some("4.2.0")))
    assertEquals(
      Jar.of(whole), Jar(Some(whole.toString), holdsPython = true, Some("1.2.3"), Some("4.2.0")))
    val old = zip(home.resolve("old.jar"), "x" -> "y")
    assertEquals(Jar.of(old), Jar(Some(old.toString), holdsPython = false, None, None))
  }

  directory.test("a directory of classes is a jar without Python packages") { home =>
    Files.createDirectories(home.resolve(Jar.PropertiesEntry).getParent)
    Files.writeString(home.resolve(Jar.PropertiesEntry), properties._2)
    assertEquals(
      Jar.of(home), Jar(Some(home.toString), holdsPython = false, Some("1.2.3"), Some("4.2.0")))
  }

  private val whole = Jar(Some("/x/k.jar"), holdsPython = true, Some("1.2.3"), None)

  test("a jar with packages goes before what is on Python's path") {
    val given = Map("PYTHONPATH" -> "/a:/b", "OTHER" -> "1").asJava
    val all = PythonHalf.environment(given, whole)
    assertEquals(all.get("PYTHONPATH"), Seq("/x/k.jar", "/a:/b").mkString(File.pathSeparator))
    assertEquals(all.get("OTHER"), "1")
    assertEquals(all.get(PythonHalf.VersionVariable), "1.2.3")
    assertEquals(given.get("PYTHONPATH"), "/a:/b")
    val alone = PythonHalf.environment(Map.empty[String, String].asJava, whole)
    assertEquals(alone.get("PYTHONPATH"), "/x/k.jar")
  }

  test("a jar without packages changes no path, and tells its version where it has one") {
    val given = Map("PYTHONPATH" -> "/a").asJava
    val thin = whole.copy(holdsPython = false)
    assertEquals(
      PythonHalf.environment(given, thin).asScala.toMap,
      Map("PYTHONPATH" -> "/a", PythonHalf.VersionVariable -> "1.2.3"))
    assertEquals(
      PythonHalf.environment(given, Jar.Nothing).asScala.toMap, Map("PYTHONPATH" -> "/a"))
  }

  test("the class is pickled by a name that Python has") {
    assertEquals(
      new String(PythonHalf.PickledClass, "US-ASCII"),
      "ckdirect_spark.datasource\nKdirectDataSource\n.")
  }
}
