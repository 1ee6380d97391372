// sbt tests the shim and builds the one jar, which carries kdirect's Python packages too.
//
//   sbt test package    the jar, as `make jar` makes it without sbt
//   sbt publish         and into dist/maven, for spark-submit --packages
//
// Without an sbt of your own: make sbt ARGS="test package" (jvm_shim/sbt.py).
//
// SPARK_HOME names a Spark whose jars are compiled against, for example that of pyspark; without it
// they are fetched.  KDIRECT_PYTHON names the Python that kdirect is installed for.

import scala.sys.process.Process

val sparkVersion = "4.2.0"

ThisBuild / scalaVersion := "2.13.18"
ThisBuild / organization := "io.github.kdirect"
ThisBuild / version := "0.1.0"
ThisBuild / versionScheme := Some("early-semver")
Global / autoStartServer := false

val sparkJars =
  sys.env.get("SPARK_HOME").toSeq.flatMap(home => (file(home) / "jars" * "*.jar").get())

val ofSparkSql = "spark-sql_2[.]13-(.*)[.]jar".r

val compiledFor =
  sparkJars.map(_.getName).collectFirst { case ofSparkSql(version) => version }
    .getOrElse(sparkVersion)

val ofPython = taskKey[Seq[(File, String)]]("what Python needs, as entries of the jar")

lazy val shim = (project in file("jvm_shim"))
  .settings(
    name := "kdirect-spark",
    licenses := Seq("Apache-2.0" -> url("https://www.apache.org/licenses/LICENSE-2.0")),
    libraryDependencies += "org.scalameta" %% "munit" % "1.1.1" % Test,
    // Spark has Scala's library, so the jar depends on nothing that --packages would fetch.
    autoScalaLibrary := false,
    libraryDependencies += "org.scala-lang" % "scala-library" % scalaVersion.value % Provided,
    libraryDependencies ++= {
      if (sparkJars.isEmpty) Seq("org.apache.spark" %% "spark-sql" % sparkVersion % Provided)
      else Nil
    },
    Compile / unmanagedJars ++= sparkJars.classpath,
    Test / unmanagedJars ++= sparkJars.classpath,
    scalacOptions ++= Seq("-release", "17", "-deprecation", "-Xlint"),
    ofPython := {
      val out = target.value / "of-python"
      IO.delete(out)
      val base = (ThisBuild / baseDirectory).value
      val python = sys.env.getOrElse("KDIRECT_PYTHON", (base / ".venv/bin/python").getPath)
      val command = Seq(python, "-m", "kdirect_spark.one_jar", "--parts", out.getPath)
      if (Process(command, base, "PYTHONSAFEPATH" -> "1").! != 0)
        sys.error(s"kdirect's Python packages cannot be collected by $python: run make install")
      IO.write(
        out / "META-INF/kdirect.properties", s"version=${version.value}\nspark=$compiledFor\n")
      (out ** "*").filter(_.isFile).get().map(file => file -> IO.relativize(out, file).get)
    },
    Compile / packageBin / mappings ++= ofPython.value,
    Compile / packageDoc / publishArtifact := false,
    Compile / packageSrc / publishArtifact := false,
    publishTo := Some(MavenCache("dist", (ThisBuild / baseDirectory).value / "dist" / "maven"))
  )

lazy val root = (project in file(".")).aggregate(shim).settings(publish / skip := true)
