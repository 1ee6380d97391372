package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.io.File
import java.nio.charset.StandardCharsets
import java.nio.file.{Files, Path, Paths}
import java.util
import java.util.Properties
import java.util.zip.ZipFile

import scala.util.Using
import scala.util.control.NonFatal

import org.apache.spark.api.python.{PythonBroadcast, PythonFunction, PythonUtils}
import org.apache.spark.broadcast.Broadcast
import org.apache.spark.sql.execution.datasources.v2.python.{
  PythonDataSourceV2,
  UserDefinedPythonDataSource
}
import org.apache.spark.util.CollectionAccumulator

/**
 * The Python data source behind the shim, and where Spark's Python processes find it.
 *
 * A jar that carries kdirect's Python packages is put on the path of every process that runs them,
 * under the name that it has on that process's host. (`kdirect_spark/unpack.py` does the rest.) A
 * jar without them leaves it to Spark to look up an installed package. Both tell Python the version
 * of the jar, so that another one is noticed before anything is read.
 */
private[kdirect] object PythonHalf {

  /** Python compares it with its own version (`kdirect_spark/versions.py`). */
  val VersionVariable = "KDIRECT_JAR_VERSION"

  private val PathVariable = "PYTHONPATH"

  /** The class KdirectDataSource, pickled by its name. */
  val PickledClass: Array[Byte] =
    "ckdirect_spark.datasource\nKdirectDataSource\n.".getBytes(StandardCharsets.US_ASCII)

  def source(): UserDefinedPythonDataSource = {
    val found =
      if (Jar.own.holdsPython) PythonUtils.createPythonFunction(PickledClass)
      else if (KnownSpark.isKnown) Registered.kdirect()
      else {
        val looked = new PythonDataSourceV2
        looked.setShortName(KdirectSource.Name)
        looked.source.dataSourceCls
      }
    val function = new KdirectFunction(found)
    if (KnownSpark.isKnown) new PlannedSource(function)
    else UserDefinedPythonDataSource(function)
  }

  /** `given` with what a Python process needs to find the packages of `jar`. */
  def environment(given: util.Map[String, String], jar: Jar): util.Map[String, String] = {
    val all = new util.HashMap[String, String](given)
    if (jar.holdsPython) {
      val rest = Option(given.get(PathVariable)).filter(_.nonEmpty)
      all.put(PathVariable, (jar.path.toSeq ++ rest).mkString(File.pathSeparator))
    }
    jar.version.foreach(all.put(VersionVariable, _))
    all
  }
}

/**
 * A function of the Python data source. It travels to executors, and its environment is asked for
 * where a Python process is started, because each host has its own copy of the jar.
 */
private[kdirect] final class KdirectFunction(base: PythonFunction)
    extends PythonFunction with Serializable {

  override def command: Seq[Byte] = base.command
  override def envVars: util.Map[String, String] =
    PythonHalf.environment(base.envVars, Jar.own)
  override def pythonIncludes: util.List[String] = base.pythonIncludes
  override def pythonExec: String = base.pythonExec
  override def pythonVer: String = base.pythonVer
  override def broadcastVars: util.List[Broadcast[PythonBroadcast]] = base.broadcastVars
  override def accumulator: CollectionAccumulator[Array[Byte]] = base.accumulator
}

/** A jar, or a directory of classes, and what it says of itself. */
private[kdirect] final case class Jar(
    path: Option[String],
    holdsPython: Boolean,
    version: Option[String],
    compiledFor: Option[String])

private[kdirect] object Jar {

  /** Written when the jar is built: `version` of kdirect, and `spark` that it was compiled for. */
  val PropertiesEntry = "META-INF/kdirect.properties"

  /** What the packages of Python are listed in, if the jar holds them. */
  val ManifestEntry = "kdirect-python/manifest.json"

  val Nothing: Jar = Jar(None, holdsPython = false, None, None)

  /** The one that this class was loaded from. */
  lazy val own: Jar =
    try
      Option(getClass.getProtectionDomain.getCodeSource)
        .map(source => of(Paths.get(source.getLocation.toURI)))
        .getOrElse(Nothing)
    catch { case NonFatal(_) => Nothing } // no file of this host

  def of(path: Path): Jar = {
    val properties = new Properties()
    var holdsPython = false
    if (Files.isDirectory(path)) {
      val file = path.resolve(PropertiesEntry)
      if (Files.exists(file)) Using.resource(Files.newInputStream(file))(properties.load(_))
    } else
      Using.resource(new ZipFile(path.toFile)) { zip =>
        Option(zip.getEntry(PropertiesEntry)).foreach { entry =>
          Using.resource(zip.getInputStream(entry))(properties.load(_))
        }
        holdsPython = zip.getEntry(ManifestEntry) != null
      }
    Jar(
      Some(path.toAbsolutePath.normalize.toString),
      holdsPython,
      Option(properties.getProperty("version")),
      Option(properties.getProperty("spark")))
  }
}
