"""The DataFrames whose analyzed plans are kept in `plans/`: supported ones, and refused ones with
what their error must name.  Each is a function of a session of Spark that has `TypedTopics`."""

from __future__ import annotations

from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.schema import Field, fields
from kdirect_spark.slash import Leaf

TYPES = (
    "id int64, n int32, s string, d float64, f float32, dec decimal128(10,2), day date32,"
    " ts timestamp(us), ms int64, b bool, u uint64, sm int16, bin binary"
)
COLUMNS = fields(TYPES)
DDL = (
    "id bigint, n int, s string, d double, f float, dec decimal(10,2), day date, ts timestamp,"
    " ms bigint, b boolean, u decimal(20,0), sm smallint, bin binary"
)
FEW = fields("id int64, n int32, ts timestamp(us)")
FEW_DDL = "id bigint, n int, ts timestamp"
LAYOUT = FixedLayout.of("id:uint32", "x:uint8", "at:int64", "name:string[4]")
FIXED_DDL = "id bigint, x smallint, at bigint, name string"
LONDON = "Europe/London"


def leaf(topic="t", held: tuple[Field, ...] = COLUMNS, streaming=True, **more) -> Leaf:
    return Leaf(
        topic=topic, value_format=more.pop("value_format", "json"), fields=held,
        is_streaming=streaming, **more,
    )  # fmt: skip


def _topic(spark, ddl, streaming=True):
    reader = spark.readStream if streaming else spark.read
    return reader.format("kdirect").option("ddl", ddl).load()


def typed(spark, streaming=True):
    return _topic(spark, DDL, streaming)


def few(spark, streaming=True):
    return _topic(spark, FEW_DDL, streaming)


def marked(spark):
    return typed(spark).withWatermark("ts", "10 seconds")


# -- supported -------------------------------------------------------------------------------------


def tumbling(spark, F):
    rows = few(spark).withWatermark("ts", "10 seconds").where("n = 0 and id > 5")
    return rows.groupBy(F.window("ts", "10 minutes"), "id").agg(
        F.count("*").alias("n"), F.sum("n"), F.avg("id").alias("a")
    )


def tumbling_offset(spark, F):
    window = F.window("ts", "1 hour", startTime="90 seconds")
    return few(spark).withWatermark("ts", "1 minute 500 milliseconds").groupBy(window).count()


def sliding(spark, F):
    rows = few(spark).withWatermark("ts", "1 month 2 days 3 hours 1.5 seconds")
    return rows.groupBy(F.window("ts", "10 minutes", "2 minutes"), "id").count()


def sliding_uneven(spark, F):
    window = F.window("ts", "10 minutes", "3 minutes", "1 minute")
    return few(spark).withWatermark("ts", "0 seconds").groupBy(window, "n").count()


def session(spark, F):
    rows = few(spark).withWatermark("ts", "10 seconds")
    return rows.groupBy(F.session_window("ts", "5 minutes"), "id").count()


def every_aggregate(spark, F):
    return marked(spark).groupBy(F.window("ts", "1 hour"), "s").agg(
        F.count("n"), F.count(F.lit(1)), F.sum("n"), F.sum("f"), F.sum("dec"),
        F.sum(F.col("n").cast("long")).alias("again"), F.min("s"), F.max("d"), F.min("day"),
        F.avg("sm"), F.avg("dec"), F.stddev("n"), F.stddev_pop("dec"), F.variance("f"),
        F.var_pop("d"), F.approx_count_distinct("s"), F.approx_count_distinct("u", 0.02),
        F.collect_list("n"), F.collect_set("bin"), F.min_by("n", "ts"), F.max_by("s", "ts"),
        F.max(F.col("n").cast("long")), F.max("u"), F.mean("d"),
    )  # fmt: skip


def every_key(spark, F):
    keys = ["id", "n", "s", "dec", "day", "ts", "b", "u", "sm", "bin"]
    return typed(spark, False).groupBy(*keys).agg(F.min("ms"))


def batch(spark, F):
    rows = few(spark, False).withWatermark("ts", "1 minute")
    return rows.groupBy(F.window("ts", "10 minutes"), "id").count()


def no_window(spark, F):
    return few(spark).where("ts is not null").groupBy("n").agg(F.max("id"))


def keys_alone(spark, F):
    return few(spark, False).groupBy("n").agg(F.lit(1).alias("one"))


def renamed(spark, F):
    rows = few(spark).withColumnRenamed("ts", "at").select("at", F.col("id").alias("a"), "n")
    rows = rows.withWatermark("at", "2 seconds").withColumn("unused", F.col("n") * 2).drop("n")
    return rows.groupBy(F.window("at", "1 minute"), "a").count()


def having(spark, F):
    rows = few(spark).withWatermark("ts", "10 seconds")
    rows = rows.groupBy(F.window("ts", "10 minutes"), "id").agg(
        (F.sum("n") / F.count("*")).alias("x"), F.count("n").alias("c")
    )
    rows = rows.where("x > 1.5 and window.start > '2020-06-01' and c between 2 and 5")
    return rows.select(
        F.window_time("window"), "window.start", "id", F.col("x").cast("int"),
        F.when(F.col("x") > 1, "it's \\ ü").otherwise("b").alias("k"),
        F.coalesce("x", F.lit(0.0)), (-F.col("c")).alias("minus"), F.round("x", 2),
        F.col("c").isin(1, 2), F.lit(None).cast("date").alias("nothing"),
        F.expr("c % 2 = 0 or not x <=> 1.5BD"), F.expr("if(isnan(x), 1S, 2S)").alias("if"),
    )  # fmt: skip


def window_filter(spark, F):
    rows = few(spark).withWatermark("ts", "10 seconds")
    rows = rows.select(F.window("ts", "10 minutes", "5 minutes").alias("w"), "id")
    return rows.where("w.end > timestamp'2021-01-01 00:00:00' and id < 7").groupBy("w").count()


def sql(spark, F):
    few(spark).withWatermark("ts", "10 seconds").createOrReplaceTempView("v")
    return spark.sql(
        "with x as (select id, n as m, ts from v where n > 1) select window.end as e, m,"
        " count(*) c from x group by window(ts, '1 minute'), m"
        " having count(*) > 1 and sum(id) > 5"
    )


def fixed(spark, F):
    rows = _topic(spark, FIXED_DDL).withColumn("t", F.expr("timestamp_millis(at)"))
    rows = rows.withWatermark("t", "5 seconds").where("t >= '2020-01-01' and x > 3")
    return rows.groupBy(F.window("t", "1 minute"), "name").agg(F.sum("x"), F.max("id"))


def _timed(expression):
    def query(spark, F):
        rows = few(spark).withColumn("t", F.expr(expression)).withWatermark("t", "1 second")
        return rows.groupBy(F.session_window("t", "90 seconds"), "n").count()

    return query


def london(spark, F):
    rows = few(spark).where("ts > '2020-07-01' and ts < date'2021-01-01'")
    rows = rows.withWatermark("ts", "1 second").groupBy(F.window("ts", "1 day"), "id").count()
    return rows.where("window.start > timestamp'2020-07-01 12:00:00'")


def _sides(spark, F, on="1 hour"):
    a = few(spark).withWatermark("ts", "1 minute").select(F.window("ts", on).alias("w"), "id", "n")
    b = few(spark).withWatermark("ts", "2 minutes")
    return a, b.select(F.window("ts", "1 hour").alias("w2"), F.col("id").alias("id2"), "n")


def _join(how, extra=None):
    def query(spark, F):
        a, b = _sides(spark, F)
        on = (a.w == b.w2) & (a.id == b.id2)
        return a.join(b, on if extra is None else on & extra(a, b), how)

    return query


def join_using(how):
    def query(spark, F):
        a, b = _sides(spark, F)
        b = b.toDF("w", "id", "m")
        return a.join(b, ["w", "id"], how).where("coalesce(n, 0) < 5")

    return query


def join_batch(spark, F):
    a, b = few(spark, False), few(spark, False)
    a = a.select(F.window("ts", "1 hour").alias("w"), "id", "n")
    b = b.select(F.window("ts", "1 hour").alias("w"), "id", F.col("n").alias("m"))
    on = (a.w.start == b.w.start) & (b.id == a.id) & (b.m > 3)
    return a.join(b, on).select(a.w.end.alias("e"), (a.n + b.m).alias("sum"))


ONE = (leaf("t", FEW),)
FULL = (leaf(),)
ONE_BATCH = (leaf("t", FEW, False),)
TWO = (leaf("t", FEW), leaf("other", FEW))
FIXED = (
    leaf("t", fields(LAYOUT.schema()), layout=LAYOUT, value_format="fixed", mode="FAILFAST",
         idle_timeout_ms=500),
)  # fmt: skip

SUPPORTED = {
    "tumbling": (tumbling, ONE),
    "tumbling-offset": (tumbling_offset, ONE),
    "sliding": (sliding, ONE),
    "sliding-uneven": (sliding_uneven, ONE),
    "session": (session, ONE),
    "every-aggregate": (every_aggregate, FULL),
    "every-key": (every_key, (leaf(streaming=False),)),
    "batch": (batch, ONE_BATCH),
    "no-window": (no_window, ONE),
    "keys-alone": (keys_alone, ONE_BATCH),
    "renamed": (renamed, ONE),
    "having": (having, ONE),
    "window-filter": (window_filter, ONE),
    "sql": (sql, ONE),
    "fixed": (fixed, FIXED),
    "time-ms": (_timed("timestamp_millis(id)"), ONE),
    "time-us": (_timed("timestamp_micros(id)"), ONE),
    "time-s": (_timed("timestamp_seconds(id)"), ONE),
    "time-cast": (_timed("cast(n as timestamp)"), ONE),
    "time-wider": (_timed("timestamp_millis(cast(n as bigint))"), ONE),
    "london": (london, ONE),
    "join-inner": (_join("inner", lambda a, b: (a.n > 1) & (b.n < 9)), TWO),
    "join-left": (_join("left", lambda a, b: b.n < 9), TWO),
    "join-right": (_join("right", lambda a, b: a.n < 9), TWO),
    "join-full": (_join("full"), TWO),
    "join-using-left": (join_using("left"), TWO),
    "join-using-full": (join_using("full"), TWO),
    "join-batch": (join_batch, (leaf("t", FEW, False), leaf("other", FEW, False))),
}
ZONES = {"london": LONDON}

# -- refused ---------------------------------------------------------------------------------------


def _grouped(make):
    """A tumbling window of `make(rows)` over a stream with a watermark."""
    return lambda spark, F: make(marked(spark), F)


def _windowed(*aggregates):
    def query(spark, F):
        rows = marked(spark).groupBy(F.window("ts", "1 minute"), "id")
        return rows.agg(*(F.expr(text) for text in aggregates))

    return query


def _two_watermarks(spark, F):
    rows = few(spark).withWatermark("ts", "1 second").withWatermark("ts", "2 seconds")
    return rows.groupBy(F.window("ts", "1 minute")).count()


def _other_watermark(spark, F):
    rows = few(spark).withColumn("at", F.expr("timestamp_millis(id)"))
    return rows.withWatermark("at", "1 second").groupBy(F.window("ts", "1 minute")).count()


def _dynamic_session(spark, F):
    gap = F.when(F.col("n") > 1, "5 seconds").otherwise("1 minute")
    return marked(spark).groupBy(F.session_window("ts", gap)).count()


def _sides_of(make):
    def query(spark, F):
        return make(*_sides(spark, F), F)

    return query


def _mixed(spark, F):
    a, _ = _sides(spark, F)
    b = few(spark, False).select(F.window("ts", "1 hour").alias("w2"), F.col("id").alias("id2"))
    return a.join(b, (a.w == b.w2) & (a.id == b.id2))


def _sizes(spark, F):
    a, b = _sides(spark, F, "2 hours")
    return a.join(b, (a.w == b.w2) & (a.id == b.id2))


def _session_filter(spark, F):
    rows = marked(spark).select(F.session_window("ts", "1 minute").alias("w"), "id")
    return rows.where("w.start > '2020-01-01'").groupBy("w", "id").count()


def _window_or(spark, F):
    rows = marked(spark).select(F.window("ts", "1 minute").alias("w"), "id", "n")
    return rows.where("w.start > '2020-01-01' or n > 2").groupBy("w", "id").count()


def _nested(spark, F):
    rows = few(spark, False).groupBy("n").count()
    return rows.groupBy("count").count()


def _rest(text):
    def query(spark, F):
        rows = marked(spark).groupBy(F.window("ts", "1 minute"), "s").count()
        return rows.select(F.expr(text).alias("x"))

    return query


# Name: the query, its leaves, words that the error must have.
REFUSED = {
    "no-watermark": (lambda spark, F: few(spark).groupBy(F.window("ts", "1 minute")).count(),
                     ONE, ["withWatermark", "ts", "topic t"]),
    "other-watermark": (_other_watermark, ONE, ["MillisToTimestamp(id)", "ts"]),
    "two-watermarks": (_two_watermarks, ONE, ["two watermarks"]),
    "no-group": (lambda spark, F: few(spark, False).agg(F.count("*")), ONE_BATCH, ["groupBy"]),
    "no-aggregate": (lambda spark, F: few(spark).where("n > 1"), ONE, ["no aggregate"]),
    "deduplicate": (lambda spark, F: few(spark, False).dropDuplicates(["n"]).groupBy("n").count(),
                    ONE_BATCH, ["Deduplicate", "dropDuplicates"]),
    "distinct": (lambda spark, F: few(spark, False).select("n").distinct(), ONE_BATCH,
                 ["Deduplicate"]),
    "union": (lambda spark, F: few(spark).union(few(spark)).groupBy("n").count(), TWO, ["Union"]),
    "order": (lambda spark, F: few(spark, False).groupBy("n").count().orderBy("n"), ONE_BATCH,
              ["Sort"]),
    "limit": (lambda spark, F: few(spark, False).groupBy("n").count().limit(3), ONE_BATCH,
              ["limit"]),
    "cube": (lambda spark, F: few(spark).cube("id", "n").count(), ONE, ["grouping sets"]),
    "explode": (lambda spark, F: few(spark).select(F.explode(F.array("n")).alias("n"))
                .groupBy("n").count(), ONE, ["Generate"]),
    "nested": (_nested, ONE_BATCH, ["an aggregate above an aggregate"]),
    "computed-key": (lambda spark, F: few(spark).groupBy((F.col("n") + 1).alias("m")).count(), ONE,
                     ["(n + 1)", "key"]),
    "window-start-key": (_grouped(lambda d, F: d.select(F.window("ts", "1 minute").alias("w"))
                                  .groupBy("w.start").count()), FULL, ["whole window"]),
    "float-key": (_grouped(lambda d, F: d.groupBy(F.window("ts", "1 minute"), "d").count()), FULL,
                  ["groupBy of d", "double"]),
    "time-key": (_grouped(lambda d, F: d.groupBy("ts").count()), FULL, ["event time ts"]),
    "nothing": (_grouped(lambda d, F: d.groupBy(F.window(F.to_timestamp("s"), "1 minute"))
                         .count()), FULL, ["window over"]),
    "dynamic-session": (_dynamic_session, FULL, ["gap", "differs from row to row"]),
    "session-filter": (_session_filter, FULL, ["session before it is complete"]),
    "window-or": (_window_or, FULL, ["on a window"]),
    "count-distinct": (_windowed("count(distinct n)"), FULL, ["DISTINCT"]),
    "filter-clause": (_windowed("count(*) filter (where n > 1)"), FULL, ["FILTER"]),
    "count-two": (_windowed("count(n, s)"), FULL, ["Count(n, s)"]),
    "first": (_windowed("first(n)"), FULL, ["First(n)", "order in which rows arrive"]),
    "last": (_windowed("last(n, true)"), FULL, ["Last(n)", "arrive"]),
    "any-value": (_windowed("any_value(n)"), FULL, ["arrive"]),
    "min-by": (_windowed("min_by(n, id)"), FULL, ["MinBy(n, id)", "event time"]),
    "percentile": (_windowed("percentile(n, 0.5)"), FULL, ["Percentile"]),
    "sum-computed": (_windowed("sum(n * 2)"), FULL, ["Sum((n * 2))"]),
    "sum-cast": (_windowed("sum(cast(n as double))"), FULL, ["Sum(cast(n as double))"]),
    "sum-unsigned": (_windowed("sum(u)"), FULL, ["u is uint64"]),
    "try-sum": (_windowed("try_sum(n)"), FULL, ["try_sum"]),
    "deviation": (_windowed("approx_count_distinct(n, 0.001)"), FULL, ["0.001"]),
    "respect-nulls": (_windowed("collect_list(n) respect nulls"), FULL, ["RESPECT NULLS"]),
    "udf-above": (_rest("regexp_replace(s, 'a', 'b')"), FULL, ["RegExpReplace", "above"]),
    "now-above": (_rest("current_timestamp()"), FULL, ["CurrentTimestamp", "above"]),
    "bytes-above": (_rest("X'00ff'"), FULL, ["binary"]),
    "like": (lambda spark, F: typed(spark).where("s like 'a%'").groupBy("n").count(), FULL,
             ["Like(s, 'a%')"]),
    "join-self": (_join("inner"), (leaf("t", FEW), leaf("t", FEW)), ["topic t with itself"]),
    "join-semi": (_join("leftsemi"), TWO, ["LeftSemi"]),
    "join-no-window": (_sides_of(lambda a, b, F: a.join(b, a.id == b.id2)), TWO, ["window"]),
    "join-no-key": (_sides_of(lambda a, b, F: a.join(b, a.w == b.w2)), TWO, ["equal key"]),
    "join-sizes": (_sizes, TWO, ["same size"]),
    "join-types": (_sides_of(lambda a, b, F: a.join(b, (a.w == b.w2) & (a.id == b.n))), TWO,
                   ["equal columns of one type", "cast(n as long)"]),
    "join-mixed": (_mixed, (leaf("t", FEW), leaf("other", FEW, False)), ["stream with a batch"]),
    "join-left-extra": (_join("left", lambda a, b: a.n < 9), TWO, ["(n < 9)", "left join"]),
    "join-full-extra": (_join("full", lambda a, b: b.n < 9), TWO, ["(n < 9)", "full join"]),
    "join-both": (_join("inner", lambda a, b: a.n < b.n), TWO, ["(n < n)", "inner join"]),
    "join-aggregate": (_sides_of(lambda a, b, F: a.join(b, (a.w == b.w2) & (a.id == b.id2))
                                 .groupBy("w").count()), TWO, ["an aggregate above"]),
    "kafka": (lambda spark, F: few(spark).groupBy("n").count(),
              (leaf("t", FEW, value_format=""),), ["valueFormat", "topic t"]),
    "other-source": (lambda spark, F: few(spark, False).groupBy("n").count(),
                     (leaf("t", FEW, False, source="parquet"),), ["source parquet"]),
}  # fmt: skip

# -- conditions ------------------------------------------------------------------------------------

# Each is read as a condition of the engine; those of REFUSED_CONDITIONS are refused.
CONDITIONS = [
    "n > 5", "n > 5L", "n >= sm", "d > 1", "d > 1.5", "d < 1e3", "f > 1.5", "f > n", "n > d",
    "f > id", "d = f", "dec > 1", "dec > 1.555", "dec = 1.5", "dec = n", "id > 1.5", "n > - 5.5BD",
    "id = 5", "n != 3", "n > -5", "sm < 100000", "u > 5", "u = 18446744073709551615", "u < 2.5",
    "ts > '2020-01-01'", "ts >= timestamp'2020-01-01 03:04:05.678'", "ts < date'2020-01-02'",
    "ts <= timestamp_millis(1577836805678)", "ts between '2020-01-01' and '2020-01-02T00:00:00Z'",
    "day = '2020-01-01'", "day > date'2020-01-01'", "s = 'a''b'", "s > 'b'", "s in ('a', 'é')",
    "s = ''", "n in (1, 2, 3L)", "n in (1, null)", "dec in (1, 2.5)", "n not in (1, 2)",
    "n between 1 and 5", "n <=> null", "n <=> sm", "d <=> f", "n is null", "s is not null",
    "not b", "b", "b = true", "b is null", "sm + 1 > 5", "cast(n as bigint) * 2 > id",
    "d * 2 > f", "d + d < 1.5", "f * 2 > f", "isnan(d)", "not isnan(f)", "n > '5'",
    "d = double('NaN')",
    "d < double('NaN')", "d = -0.0D", "f = float('1.1')", "f < float('Infinity')", "true", "false",
    "s is not null and (n > 1 or id < 2)", "not (n > 1 and d > 1)", "bin = bin", "bin is null",
    "timestamp_millis(ms) > '2020-01-01'", "timestamp_millis(ms) = timestamp'2020-01-01 00:00:00'",
    "timestamp_millis(ms) = timestamp'2020-01-01 00:00:00.000001'",
    "timestamp_millis(ms) < timestamp'2020-01-01 00:00:00.000001'",
    "timestamp_millis(ms) <= timestamp'2020-01-01 00:00:00.000001'",
    "timestamp_millis(ms) >= timestamp'2020-01-01 00:00:00.000001'",
    "'2020-01-01' < timestamp_micros(ms)", "timestamp_millis(ms) is not null",
    "(n > 1) is null", "n = cast(null as int)",
]  # fmt: skip
REFUSED_CONDITIONS = {
    "s like 'a%'": "Like", "startswith(s, 'a')": "StartsWith", "n + 1 > 5": "may overflow",
    "id * id > 5": "may overflow", "n % 2 = 0": "(n % 2)", "coalesce(n, 0) > 1": "Coalesce",
    "case when n > 1 then true else false end": "CaseWhen", "n > s": "cast of string to long",
    "s > 5": "cast of string", "d > dec": "cast of decimal(10,2) to double",
    "bin = X'00ff'": "binary", "s = concat('a', 'b')": "Concat", "ts = day": "cast of date",
    "cast(ts as date) = '2020-01-01'": "cast of timestamp to date", "b > true": "order of booleans",
    "s collate utf8_lcase = 'a'": "Collate",
    "cast(n as double) = cast(sm as double)": "compares as floats",
    "cast(n as float) > f": "cast of integer to float", "upper(s) = 'A'": "Upper",
    "ts > 'yesterday'": "constant", "n > rand()": "Rand", "timestamp_millis(ms) = ts": "converted",
    "id > cast('1.5' as bigint)": "constant", "d > - n": "UnaryMinus",
    "n = 1 and current_date() > day": "CurrentDate",
}  # fmt: skip
