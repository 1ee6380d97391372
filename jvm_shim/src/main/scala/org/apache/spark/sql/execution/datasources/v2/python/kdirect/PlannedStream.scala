package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.io.IOException
import java.lang.ref.Cleaner
import java.nio.channels.ClosedByInterruptException

import scala.util.control.NonFatal

import org.apache.spark.api.python.{PythonFunction, PythonWorkerUtils, SpecialLengths}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.read.streaming.{Offset, ReadAllAvailable, ReadLimit}
import org.apache.spark.sql.errors.{QueryCompilationErrors, QueryExecutionErrors}
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingSourceReadLimit
import org.apache.spark.sql.execution.python.streaming.PythonStreamingSourceRunner
import org.apache.spark.sql.execution.python.streaming.PythonStreamingSourceRunner._
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.StructType

/**
 * A stream's reader in Python, in a `Planner` and not in a process that is started for it.
 *
 * The engine calls it from one thread. A stream that ends well gives its process back; one that is
 * interrupted in a call, or gets an error, ends it at once: the engine stops no stream that fails
 * while its query is set up. Every later call gets the same error again.
 */
private[kdirect] final class PlannedStream(
    planner: Planner,
    function: PythonFunction,
    schema: StructType)
    extends PythonStreamingSourceRunner(function, schema) {

  // Whether the last call has got its whole answer.
  private var clean = false
  private var failure: Option[Throwable] = None

  // The engine stops no source where another one of the same query cannot be made, as in a union:
  // then the process ends when this stream is collected as garbage.
  private val held = new PlannedStream.Held(planner)
  private val unreachable = PlannedStream.cleaner.register(this, held)

  override def init(): Unit = guarded {
    planner.begin(Planner.Stream, Map.empty)
    PythonWorkerUtils.writePythonFunction(function, planner.out)
    PythonWorkerUtils.writeUTF(schema.json, planner.out)
    planner.out.writeInt(PlannedSource.withRowLimit(SQLConf.get.arrowMaxRecordsPerBatch))
    planner.out.flush()
    if (planner.in.readInt() == SpecialLengths.PYTHON_EXCEPTION_THROWN)
      throw QueryCompilationErrors.pythonDataSourceError(
        action = "plan",
        tpe = "initialize source",
        msg = PythonWorkerUtils.readUTF(planner.in))
  }

  private def ask[T](action: String, number: Int, arguments: String*)(answer: Int => T): T =
    guarded {
      planner.out.writeInt(number)
      arguments.foreach(PythonWorkerUtils.writeUTF(_, planner.out))
      planner.out.flush()
      val first = planner.in.readInt()
      if (first == SpecialLengths.PYTHON_EXCEPTION_THROWN)
        throw QueryExecutionErrors.pythonStreamingDataSourceRuntimeError(
          action, PythonWorkerUtils.readUTF(planner.in))
      answer(first)
    }

  private def guarded[T](call: => T): T = {
    failure.foreach(e => throw e)
    clean = false
    try {
      val found = call
      clean = true
      found
    } catch {
      case e: Throwable =>
        val told = e match {
          case lost: IOException if !lost.isInstanceOf[ClosedByInterruptException] =>
            Planner.lost(lost)
          case other => other
        }
        failure = Some(told)
        end()
        throw told
    }
  }

  private def text(length: Int): String = PythonWorkerUtils.readUTF(length, planner.in)

  // Python has a reader that does both, or refuses the query with an error of its own.
  override def checkSupportedFeatures(): SupportedFeatures = SupportedFeatures(true, true)

  override def initialOffset(): String = ask("initialOffset", INITIAL_OFFSET_FUNC_ID)(text)

  override def latestOffset(): String = ask("latestOffset", LATEST_OFFSET_FUNC_ID)(text)

  override def latestOffset(start: Offset, limit: ReadLimit): String = {
    val most = limit match {
      case _: ReadAllAvailable => READ_ALL_AVAILABLE_JSON
      case given: PythonStreamingSourceReadLimit => given.json
      case other =>
        throw new UnsupportedOperationException(s"unsupported read limit ${other.getClass.getName}")
    }
    ask("latestOffset", LATEST_OFFSET_ADMISSION_CONTROL_FUNC_ID, start.json, most)(text)
  }

  override def getDefaultReadLimit(): String =
    ask("getDefaultReadLimit", GET_DEFAULT_READ_LIMIT_FUNC_ID)(text)

  override def reportLatestOffset(): String =
    ask("reportLatestOffset", REPORT_LATEST_OFFSET_FUNC_ID) { length =>
      if (length == 0) null else text(length)
    }

  override def prepareForTriggerAvailableNow(): Unit =
    ask("prepareForTriggerAvailableNow", PREPARE_FOR_TRIGGER_AVAILABLE_NOW_FUNC_ID)(_ => ())

  override def partitions(
      start: String,
      end: String): (Array[Array[Byte]], Option[Iterator[InternalRow]]) =
    ask("planPartitions", PARTITIONS_FUNC_ID, start, end) { count =>
      val found = Array.fill(count)(PythonWorkerUtils.readBytes(planner.in))
      if (planner.in.readInt() != PREFETCHED_RECORDS_NOT_FOUND)
        throw QueryExecutionErrors.pythonStreamingDataSourceRuntimeError(
          "planPartitions", "kdirect's reader prefetches nothing, but rows were announced")
      (found, None)
    }

  override def commit(end: String): Unit = ask("commitSource", COMMIT_FUNC_ID, end)(_ => ())

  override def stop(): Unit =
    try {
      if (clean) {
        planner.out.writeInt(Planner.Stop)
        planner.out.writeInt(SpecialLengths.END_OF_STREAM)
        planner.out.flush()
        planner.release()
        held.isGivenBack = true
      }
    } catch {
      case NonFatal(e) => logDebug("a stream's planner was not given back: " + e)
    } finally end()

  /** The process is of no more use to this stream. */
  private def end(): Unit = {
    clean = false
    unreachable.clean()
  }
}

private object PlannedStream {

  private val cleaner = Cleaner.create()

  /** What ends a stream's planner, once.  It must not reach the stream. */
  private final class Held(planner: Planner) extends Runnable {
    @volatile var isGivenBack = false
    override def run(): Unit = if (!isGivenBack) planner.destroy()
  }
}
