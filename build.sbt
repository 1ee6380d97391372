// `sbt package` builds the JVM shim as a jar.  `make jar` builds the same without sbt, with the
// Scala compiler that comes with pyspark.
val sparkVersion = "4.2.0"

ThisBuild / scalaVersion := "2.13.18"
ThisBuild / organization := "io.github.kdirect"
ThisBuild / version := "0.1.0"

lazy val shim = (project in file("jvm_shim"))
  .settings(
    name := "kdirect-spark-shim",
    libraryDependencies += "org.apache.spark" %% "spark-sql" % sparkVersion % Provided,
    scalacOptions ++= Seq("-release", "17", "-deprecation", "-Xlint")
  )

lazy val root = (project in file(".")).aggregate(shim).settings(publish / skip := true)
