package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.nio.charset.StandardCharsets.UTF_8

import org.apache.spark.sql.execution.datasources.v2.python.PythonInputPartition

/**
 * What a task reads, pickled by Python, with the hosts where it should run: those of the broker
 * that has it.  Python writes them into the pickle between two marks
 * (`kdirect_spark/placement.py`); without them a task may run anywhere.
 */
private final class PlacedPartition(index: Int, pickled: Array[Byte])
    extends PythonInputPartition(index, pickled) {

  override def preferredLocations(): Array[String] = Placement.hosts(pickled)
}

private object Placement {
  private val Begin = "kdirect.hosts[".getBytes(UTF_8)
  private val MostBytes = 4096

  def hosts(pickled: Array[Byte]): Array[String] = {
    val found = pickled.indexOfSlice(Begin)
    val start = found + Begin.length
    val end = if (found < 0) -1 else pickled.indexOf(']'.toByte, start)
    if (end <= start || end - start > MostBytes) Array.empty
    else new String(pickled, start, end - start, UTF_8).split(',')
  }
}
