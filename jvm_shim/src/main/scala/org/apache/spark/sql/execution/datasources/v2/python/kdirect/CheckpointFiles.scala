package org.apache.spark.sql.execution.datasources.v2.python.kdirect

import java.nio.file.Files
import java.nio.file.attribute.PosixFilePermissions

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.{FSDataOutputStream, LocalFileSystem, Path, RawLocalFileSystem}
import org.apache.hadoop.fs.permission.FsPermission
import org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager

/**
 * Checkpoint files as Spark's own class writes them, with their checksum files and permissions, but
 * without a process for each.
 *
 * Where Hadoop's native library is missing, as in the pyspark package, Hadoop runs `chmod` for each
 * file that it creates. A micro-batch creates four: its entries in the logs of offsets and of
 * commits, and a checksum file for each. Files of another file system than the local one are not
 * concerned.
 *
 * `kdirect_spark.configure` asks for it by a setting; the session's setting that names a class is
 * set here (`use`), where the class is known to be there.
 */
final class CheckpointFiles(path: Path, conf: Configuration)
    extends FileSystemBasedCheckpointFileManager(path, conf) {

  private lazy val local: Option[LocalFileSystem] = fs match {
    case given: LocalFileSystem if CheckpointFiles.createsAsHadoopDoes(given) =>
      val files = new LocalFileSystem(new PermissionsWithoutProcess)
      files.initialize(given.getUri, conf)
      Some(files)
    case _ => None
  }

  override def createTempFile(path: Path): FSDataOutputStream =
    local.fold(super.createTempFile(path))(_.create(path, /* overwrite = */ true))
}

private[kdirect] object CheckpointFiles {

  private val Asked = "spark.kdirect.checkpointFiles"
  private val Manager = "spark.sql.streaming.checkpointFileManagerClass"
  private val Plain = classOf[FileSystemBasedCheckpointFileManager].getName

  /** Has the streams of this session write their checkpoints by it, unless it says otherwise. */
  def use(): Unit =
    if (KdirectSource.isOn(Asked, default = false)) {
      val conf = KdirectSource.settings
      if (conf.getConfString(Manager, "") == Plain)
        conf.setConfString(Manager, classOf[CheckpointFiles].getName)
    }

  /** Hive's local file system, which pyspark's Spark takes, does; one of a user's may not. */
  def createsAsHadoopDoes(files: LocalFileSystem): Boolean =
    files.getRaw.getClass == classOf[RawLocalFileSystem] &&
      files.getClass.getMethods.forall { method =>
        method.getName != "create" || method.getDeclaringClass.getName.startsWith(Hadoops)
      }

  private val Hadoops = "org.apache.hadoop.fs."
}

private final class PermissionsWithoutProcess extends RawLocalFileSystem {

  override def setPermission(path: Path, permission: FsPermission): Unit =
    if (permission.getStickyBit) super.setPermission(path, permission) // Java has none
    else {
      val bits = PosixFilePermissions.fromString(permission.toString)
      try Files.setPosixFilePermissions(pathToFile(path).toPath, bits)
      catch { case _: UnsupportedOperationException => super.setPermission(path, permission) }
    }
}
