package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.io.{BufferedInputStream, BufferedOutputStream, DataInputStream, DataOutputStream}
import java.io.{EOFException, IOException}
import java.nio.channels.{Channels, ClosedByInterruptException}
import java.util

import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

import net.razorvine.pickle.Pickler

import org.apache.spark.{JobArtifactSet, SparkEnv, SparkException}
import org.apache.spark.api.python.{
  PythonFunction,
  PythonUtils,
  PythonWorker,
  PythonWorkerUtils,
  SpecialLengths
}
import org.apache.spark.internal.Logging
import org.apache.spark.internal.config.BUFFER_SIZE
import org.apache.spark.internal.config.Python._
import org.apache.spark.sql.classic.SparkSession
import org.apache.spark.sql.execution.datasources.DataSourceManager
import org.apache.spark.sql.execution.python.{EvaluatePython, PythonPlannerRunner}
import org.apache.spark.sql.internal.SQLConf

/**
 * A Python process of the driver's that answers requests of all kinds, one after another
 * (`pyspark_kdirect.planner`).
 *
 * Spark has a daemon and processes of its own for each kind of request, and starts a process for
 * each stream; each of them imports pyspark and kdirect and connects to the broker. The processes
 * here are kept by Spark as it keeps those of tasks. Used from one thread at a time.
 */
private[kdirect] final class Planner private (
    function: PythonFunction,
    environment: Map[String, String],
    worker: PythonWorker) {

  import Planner._

  private val channel = worker.channel
  worker.selector.close()
  channel.configureBlocking(true)

  private val bufferSize = SparkEnv.get.conf.get(BUFFER_SIZE)
  private val accumulator = Option(function.accumulator).map(_.copyAndReset())

  val out = new DataOutputStream(
    new BufferedOutputStream(Channels.newOutputStream(channel), bufferSize))
  val in = new DataInputStream(
    new BufferedInputStream(Channels.newInputStream(channel), bufferSize))

  /** What every request begins with. */
  def begin(kind: Int, conf: Map[String, String]): Unit = {
    PythonWorkerUtils.writePythonVersion(function.pythonVer, out)
    PythonWorkerUtils.writeSparkFiles(
      JobArtifactSet.getCurrentJobArtifactState.map(_.uuid),
      function.pythonIncludes.asScala.toSet,
      out)
    PythonWorkerUtils.writeBroadcasts(
      function.broadcastVars.asScala.toSeq, worker, SparkEnv.get, out)
    PythonWorkerUtils.writeConf(conf, out)
    out.writeInt(kind)
  }

  /** After the last answer of a request. */
  def release(): Unit = {
    PythonWorkerUtils.receiveAccumulatorUpdates(accumulator, in)
    accumulator.foreach(function.accumulator.merge)
    if (in.readInt() == SpecialLengths.END_OF_STREAM) giveBack() else destroy()
  }

  /** Between requests: the process is there for the next one. */
  def giveBack(): Unit = {
    channel.configureBlocking(false)
    SparkEnv.get.releasePythonWorker(function.pythonExec, Module, Daemon, environment, worker)
  }

  /** After an error: the process ends. */
  def destroy(): Unit =
    SparkEnv.get.destroyPythonWorker(function.pythonExec, Module, Daemon, environment, worker)

  /** The whole of one request that Spark's runner writes and reads. */
  def ask[T](kind: Int, conf: Map[String, String])(
      write: (DataOutputStream, Pickler) => Unit)(read: DataInputStream => T): T = {
    var done = false
    try {
      begin(kind, conf)
      EvaluatePython.registerPicklers()
      write(out, new Pickler(/* useMemo = */ true, /* valueCompare = */ false))
      out.writeInt(SpecialLengths.END_OF_STREAM)
      out.flush()
      val found = read(in)
      release()
      done = true
      found
    } catch {
      case e: ClosedByInterruptException => throw e
      case e: IOException => throw lost(e)
    } finally if (!done) destroy()
  }
}

private[kdirect] object Planner extends Logging {

  val Daemon = "pyspark_kdirect.daemon"
  val Module = "pyspark_kdirect.planner"

  // Kinds of requests, as pyspark_kdirect.planner knows them.
  val Create = 1
  val Read = 2
  val Stream = 3
  val Write = 4
  val CommitBatch = 5
  val CommitStream = 6
  val Stop = 0

  // The environment in which there is no such daemon: its Python does not find kdirect before it
  // has got the files of a session.
  @volatile private var missingIn: Option[SparkEnv] = None

  /**
   * A process for requests about `function`; None where Spark's own way has to be taken: where the
   * session asks for what this does not do (dumps of crashed workers, logs as tables, profiles), or
   * where no daemon can be had.
   */
  def find(function: PythonFunction, conf: Map[String, String]): Option[Planner] = {
    val env = SparkEnv.get
    if (missingIn.contains(env) || conf.nonEmpty || !isPlain(env)) None
    else {
      val environment = environmentOf(function, env)
      try {
        val (worker, _) =
          env.createPythonWorker(function.pythonExec, Module, Daemon, environment, true)
        Some(new Planner(function, environment, worker))
      } catch {
        case e: ClosedByInterruptException => throw e
        case NonFatal(e) =>
          missingIn = Some(env)
          logWarning("kdirect plans with PySpark's own processes, which takes longer: " + e)
          None
      }
    }
  }

  private def isPlain(env: SparkEnv): Boolean = {
    val conf = SQLConf.get
    env.conf.get(PYTHON_USE_DAEMON) && env.conf.get(PYTHON_WORKER_REUSE) &&
    !conf.pythonUDFWorkerFaulthandlerEnabled && !conf.pythonWorkerLoggingEnabled &&
    conf.pythonUDFWorkerIdleTimeoutSeconds <= 0 &&
    conf.pythonUDFWorkerTracebackDumpIntervalSeconds <= 0
  }

  /** What Spark sets for planners. One daemon serves all requests with the same values. */
  private def environmentOf(function: PythonFunction, env: SparkEnv): Map[String, String] = {
    val all = new util.HashMap[String, String](function.envVars)
    val directories = env.blockManager.diskBlockManager.localDirs.map(_.getPath).mkString(",")
    all.put("SPARK_LOCAL_DIRS", directories)
    all.put("SPARK_REUSE_WORKER", "1")
    if (SQLConf.get.pysparkHideTraceback) all.put("SPARK_HIDE_TRACEBACK", "1")
    if (SQLConf.get.pysparkSimplifiedTraceback) all.put("SPARK_SIMPLIFIED_TRACEBACK", "1")
    SQLConf.get.pythonPlannerExecMemory.foreach { megabytes =>
      all.put("PYSPARK_PLANNER_MEMORY_MB", megabytes.toString)
    }
    all.put("SPARK_AUTH_SOCKET_TIMEOUT", env.conf.get(PYTHON_AUTH_SOCKET_TIMEOUT).toString)
    all.put("SPARK_BUFFER_SIZE", env.conf.get(BUFFER_SIZE).toString)
    val artifacts = JobArtifactSet.getCurrentJobArtifactState.map(_.uuid)
    all.put("SPARK_JOB_ARTIFACT_UUID", artifacts.getOrElse("default"))
    all.put("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    all.asScala.toMap
  }

  def lost(cause: IOException): SparkException = {
    val how = if (cause.isInstanceOf[EOFException]) "exited unexpectedly (crashed)" else "failed"
    new SparkException(s"kdirect's planner, a Python process of the driver's, $how", cause)
  }
}

/**
 * The Python class of the format. Spark finds it by importing every installed module of a certain
 * name, in a process that does nothing else. Where the installed kdirect has answered as a planner,
 * that is not needed.
 */
private[kdirect] object Registered extends Logging {

  // Asks Python for its version.
  private lazy val installed: PythonFunction =
    new KdirectFunction(PythonUtils.createPythonFunction(PythonHalf.PickledClass))

  def kdirect(): PythonFunction = {
    val manager = SparkSession.active.sessionState.dataSourceManager
    val isInstalled =
      try {
        !isRegisteredByUser(manager) &&
        Planner.find(installed, Map.empty).map(_.giveBack()).isDefined
      } catch {
        case NonFatal(e) =>
          logDebug("Spark looks for the format itself: " + e)
          false
      }
    if (isInstalled) installed else manager.lookupDataSource(KdirectSource.Name).dataSourceCls
  }

  /** Whether `spark.dataSource.register` was called for the format, which Spark does not tell. */
  private def isRegisteredByUser(manager: DataSourceManager): Boolean =
    try {
      val field = classOf[DataSourceManager].getDeclaredField("runtimeDataSourceBuilders")
      field.setAccessible(true)
      field.get(manager).asInstanceOf[util.Map[String, _]].containsKey(KdirectSource.Name)
    } catch {
      case NonFatal(e) =>
        logDebug("Spark does not say what was registered: " + e)
        true // then Spark looks itself
    }
}

/** A request of Spark's that is sent to a `Planner`. */
private[kdirect] trait InPlanner[T] extends PythonPlannerRunner[T] {
  protected def function: PythonFunction
  protected def kind: Int

  override def runInPython(useDaemon: Boolean): T =
    Planner.find(function, runnerConf) match {
      case Some(planner) => planner.ask(kind, runnerConf)(writeToPython)(receiveFromPython)
      case None => super.runInPython(useDaemon)
    }
}
