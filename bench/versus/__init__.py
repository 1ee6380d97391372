"""kdirect beside Apache Kafka and Spark's Kafka connector: the same workloads on both, in turns, in
one run.

`systems` starts the two brokers, `jars` gets what Kafka is made of, `worker` and `perf_tools` are
clients in processes of their own, `measure` takes turns and makes figures, `rows_*` are the
workloads, `report` writes what a reader looks at.  Started by bench/vs_kafka.py.
"""
