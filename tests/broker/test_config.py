"""Properties, listeners, flags; and what the command says when something is wrong."""

from __future__ import annotations

import io
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kdirect
import kdirect.cli
from kdirect.broker.config import (
    IGNORED,
    BrokerConfig,
    Listener,
    parse_listeners,
    parse_properties,
)
from kdirect.errors import ConfigError, CorruptLogError, KdirectError, LogError
from kdirect.log.config import LogConfig
from kdirect.options import BROKER


def test_a_java_properties_file():
    text = r"""
# a comment
! another
  a = b \t
c:d
e f
long = one \
    two
path=C\:\\x
u=\u0041
empty=
alone
a = last
k\=ey = v=w
trailing=x\\"""
    assert parse_properties(text) == {
        "a": "last",
        "c": "d",
        "e": "f",
        "long": "one two",
        "path": "C:\\x",
        "u": "A",
        "empty": "",
        "alone": "",
        "k=ey": "v=w",
        "trailing": "x\\",
    }


@given(st.text(max_size=300))
def test_any_text_is_properties(text):
    for key, value in parse_properties(text).items():
        assert isinstance(key, str) and isinstance(value, str)


def test_a_stock_properties_file_works_unchanged():
    text = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://:9092,CONTROLLER://:9093
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,\
SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs=/tmp/kraft-combined-logs
num.partitions=1
num.recovery.threads.per.data.dir=1
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""
    config = BrokerConfig(parse_properties(text))
    assert config.listeners == (Listener("PLAINTEXT", "", 9092),) and config.advertised == (
        Listener("PLAINTEXT", "localhost", 9092),
    )
    assert config["log.segment.bytes"] == 1 << 30 and "num.io.threads" in config.ignored


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9092", [("PLAINTEXT", "127.0.0.1", 9092)]),
        ("PLAINTEXT://:0", [("PLAINTEXT", "", 0)]),
        (
            "INTERNAL://h.example:1,plaintext://[::1]:65535",
            [("INTERNAL", "h.example", 1), ("PLAINTEXT", "::1", 65535)],
        ),
    ],
)
def test_listeners(text, expected):
    assert parse_listeners(text) == tuple(Listener(*x) for x in expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "a:b:c",
        "h:70000",
        "SSL://h:1",
        "SASL_PLAINTEXT://h:1",
        "://h:1",
        "h:-1",
        "CONTROLLER://h:1",
    ],
)
def test_bad_listeners(text):
    with pytest.raises(ConfigError, match="listeners"):
        parse_listeners(text)


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ({"num.partition": "3"}, "did you mean num.partitions"),
        ({"num.partitions": "many"}, "num.partitions"),
        ({"num.partitions": "0"}, "out of range"),
        ({"auto.create.topics.enable": "perhaps"}, "true or false"),
        ({"default.replication.factor": "3"}, "default.replication.factor.*zookeeper.connect"),
        ({"min.insync.replicas": "2"}, "min.insync.replicas.*zookeeper.connect"),
        ({"zookeeper.connect": "z:2181", "process.roles": "broker"}, "process.roles"),
        ({"advertised.listeners": "0.0.0.0:1"}, "advertised.listeners"),
        ({"log.cleanup.policy": "keep"}, "use delete, compact, or both"),
    ],
)
def test_bad_properties(properties, says):
    with pytest.raises(ConfigError, match=says):
        BrokerConfig(properties)


def test_a_broker_of_a_cluster_may_ask_for_several_replicas():
    given = {
        "default.replication.factor": "3",
        "min.insync.replicas": "2",
        "offsets.topic.replication.factor": "2",
    }
    config = BrokerConfig({**given, "zookeeper.connect": "z:2181"})
    assert {name: str(config[name]) for name in given} == given
    topic = LogConfig.from_broker(config).with_overrides({"unclean.leader.election.enable": "true"})
    shown = topic.topic_properties()
    assert shown["min.insync.replicas"] == "2" and shown["unclean.leader.election.enable"] == "true"


def test_a_broker_that_is_alone_keeps_one_copy_of_the_offsets():
    assert BrokerConfig({})["offsets.topic.replication.factor"] == 1
    config = BrokerConfig({"offsets.topic.replication.factor": "3", "zookeeper.connect": ""})
    assert config["offsets.topic.replication.factor"] == 1 and not config.ignored


def test_assignors_by_the_names_of_kafkas_classes():
    """The default of Kafka 3.7 and 3.8, which files of properties may have written out."""
    package = "org.apache.kafka.coordinator.group.assignor"
    config = BrokerConfig(
        {"group.consumer.assignors": f"{package}.RangeAssignor,{package}.UniformAssignor"}
    )
    assert config["group.consumer.assignors"] == ["range", "uniform"]
    with pytest.raises(ConfigError, match=r"group\.consumer\.assignors.*MyAssignor"):
        BrokerConfig({"group.consumer.assignors": "com.example.MyAssignor"})


def test_keywords_have_underscores_for_dots_and_go_first():
    config = BrokerConfig.from_arguments(
        {"num.partitions": 2, "broker.id": 5}, num_partitions=4, node_id=None
    )
    assert config["num.partitions"] == 4 and config["node.id"] == 5


# -- the embedded broker ---------------------------------------------------------------------------
def test_importing_kdirect_loads_next_to_nothing():
    heavy = ("kafka", "pyarrow", "asyncio", "kdirect.broker", "kdirect.client")
    code = f"import sys, kdirect; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
    assert set(kdirect.__all__) <= set(dir(kdirect))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kdirect.nothing


def test_an_embedded_broker_starts_stops_and_starts_again(tmp_path):
    b = kdirect.Broker(log_dirs=tmp_path / "log", num_partitions=2)
    assert repr(b) == "Broker(stopped)"
    with pytest.raises(KdirectError, match="not running"):
        _ = b.bootstrap_servers
    for _ in range(2):
        assert b.start() is b and b.start() is b
        assert b.statistics()["broker_connections"] == 0
        b.stop()
        b.stop()
    with pytest.raises(RuntimeError, match="mine"), b:
        raise RuntimeError("mine")
    assert (tmp_path / "log" / ".kafka_cleanshutdown").exists()


def test_properties_in_the_place_of_directories_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"not a mapping of num\.partitions") as e:
        kdirect.Broker({"num.partitions": 3})
    assert "properties={...}" in e.value.hint and not list(tmp_path.iterdir())


def test_a_temporary_log_is_removed():
    with kdirect.Broker() as b:
        directory = b.log_dirs[0]
        assert directory.is_dir()
    assert not directory.exists()


def test_mistakes_of_an_embedded_broker(tmp_path):
    with pytest.raises(ConfigError, match="did you mean"):
        kdirect.Broker(num_partition=1)
    with kdirect.Broker(log_dirs=tmp_path) as b:
        with pytest.raises(KdirectError, match="in use by another broker"):
            kdirect.Broker(log_dirs=tmp_path).start()
        with pytest.raises(KdirectError, match=f"cannot listen on {b.bootstrap_servers}"):
            kdirect.Broker(listeners=b.bootstrap_servers).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="cannot be used"):
        kdirect.Broker(log_dirs=tmp_path / "file").start()


def test_a_damaged_topics_file_is_named(tmp_path):
    with kdirect.Broker(log_dirs=tmp_path):
        pass
    (tmp_path / "topics.json").write_text("{nonsense")
    with pytest.raises(KdirectError, match=r"topics\.json is damaged"):
        kdirect.Broker(log_dirs=tmp_path).start()


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"\x00" * 8, b"-5", b"9" * 30], ids=repr)
@pytest.mark.parametrize("name", ["topics.json", "producer_ids"])
def test_a_file_of_wrong_bytes_is_named_at_the_start_and_may_be_removed(tmp_path, name, data):
    with kdirect.Broker(log_dirs=tmp_path) as broker:
        kdirect.connect(broker.bootstrap_servers).admin.create_topic("t", 1)
        with kdirect.Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "transport": "tcp"}
        ) as producer:
            assert producer.send("t", b"x", partition=0).result(10).offset() == 0
    (tmp_path / name).write_bytes(data)
    with pytest.raises(
        CorruptLogError, match=rf"{name} is damaged: .*; restore it, or remove it: "
    ):
        kdirect.Broker(log_dirs=tmp_path).start()
    (tmp_path / name).unlink()
    broker = kdirect.Broker(log_dirs=tmp_path)
    with (
        broker,
        kdirect.Producer(
            {"bootstrap.servers": broker.start().bootstrap_servers, "transport": "tcp"}
        ) as producer,
    ):
        assert producer.send("t", b"x", partition=0).result(10).offset() == 1


# -- the command -----------------------------------------------------------------------------------
def run(*arguments, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "kdirect.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def one_line_error(result, status):
    assert result.returncode == status, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("kdirect: ")]
    assert len(errors) == 1
    return errors[0]


def test_the_command_starts_with_flags_file_and_settings(broker_process, tmp_path):
    (tmp_path / "server.properties").write_text(
        f"num.partitions=2\nlog.dirs={tmp_path / 'elsewhere'}\n"
        "num.io.threads=8\nmessage.max.bytes=2000\n"
    )
    command = [sys.executable, "-m", "kdirect.cli", "broker", "--config",
               tmp_path / "server.properties", "--listeners", "127.0.0.1:0",
               "--log-dirs", tmp_path / "log", "--num-partitions", "3", "--set",
               "auto.create.topics.enable=false"]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready = process.stdout.readline()
        assert ready.startswith("kdirect broker ready on 127.0.0.1:")
        admin = kdirect.connect({"bootstrap.servers": ready.split()[-1], "transport": "tcp"}).admin
        values = {name: entry.value for name, entry in admin.describe_configs(broker=1).items()}
        assert (
            values["num.partitions"],
            values["auto.create.topics.enable"],
            values["message.max.bytes"],
        ) == ("3", "false", "2000")
        assert (tmp_path / "log" / "topics.json").exists() and not (tmp_path / "elsewhere").exists()
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert (
        "num.io.threads means nothing" in errors
        and "stopped" in errors
        and "Traceback" not in errors
    )


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {address}" in one_line_error(
            run("broker", "--listeners", address, "--log-dirs", tmp_path / "a"), 1
        )


@pytest.fixture
def command(capsysbinary, monkeypatch):
    """``command(*arguments, stdin=b"")`` runs one command in this process: (status, standard
    output, standard error)."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        status = kdirect.cli.main([str(a) for a in arguments])
        out, errors = capsysbinary.readouterr()
        return status, out.decode(), errors.decode()

    return call


def test_the_command_says_what_is_wrong(command, tmp_path):
    def error(status, *arguments):
        got, out, errors = command("broker", *arguments)
        assert got == status and out == ""
        lines = [line for line in errors.splitlines() if line.startswith("kdirect: ")]
        assert len(lines) == 1 and "Traceback" not in errors
        return lines[0]

    assert "did you mean num.partitions" in error(2, "--set", "num.partition=1")
    assert "not KEY=VALUE" in error(2, "--set", "nonsense")
    assert "'x' is not an integer" in error(2, "--num-partitions", "x")
    assert "cannot read the properties file" in error(2, "--config", tmp_path / "none")
    assert "cannot be used" in error(
        1, "--listeners", "127.0.0.1:0", "--log-dirs", "/proc/1/kdirect"
    )
    with kdirect.Broker(log_dirs=tmp_path / "held"):
        assert "in use by another broker" in error(
            1, "--listeners", "127.0.0.1:0", "--log-dirs", tmp_path / "held"
        )


def test_commands_without_arguments_and_the_version(command):
    assert run("version").stdout == f"kdirect {kdirect.__version__}\n"
    assert command()[0] == command("topic")[0] == 2
    with pytest.raises(SystemExit):
        command("broker", "--help")


def test_tools(broker, command):
    at = ("--broker", broker.bootstrap_servers)

    def output(*arguments, stdin=b""):
        status, out, errors = command(*arguments, *at, stdin=stdin)
        assert status == 0, errors
        return out

    assert (
        output("topic", "create", "t", "--partitions", 2, "--config", "retention.ms=60000")
        == "created t\n"
    )
    status, _, errors = command("topic", "create", "t", *at)
    assert status == 1 and "TOPIC_ALREADY_EXISTS" in errors
    output("produce", "t", "--partition", 1, "--key-separator", ":", stdin=b"a:1\nb:2\n3\n")
    assert output("consume", "t") == "1\n2\n3\n"
    assert output(
        "consume", "t", "--from", 1, "--partition", 1, "--count", 1, "--show", "all"
    ).split("\t")[3:] == ["b", "2\n"]
    assert output("topic", "list") == "t\t2\n"
    described = output("topic", "describe", "t")
    assert "partition 1\toffsets [0, 3)" in described and "config retention.ms\t60000" in described
    assert "\tleader 1\tepoch 0\treplicas 1\tin sync 1\n" in described
    described = output("cluster", "describe")
    assert "controller\t1\n" in described and "\track -\n" in described
    assert "replicas of broker 1\tleads 2\n" in described
    assert output("cluster", "health") == "well\n"
    assert output("partition", "elect", "t:0") == "t:0\telected\n"
    assert output("partition", "reassign") == ""
    status, _, errors = command("partition", "reassign", "t:0=2", *at)
    assert status == 1 and "moving t-0" in errors
    for wrong in (["reassign", "t=1"], ["elect", "t"], ["elect", "--unclean"]):
        assert command("partition", *wrong, *at)[0] == 2
    assert command("consume", "t", "--from", "somewhere", *at)[0] == 2
    assert output("topic", "delete", "t") == "deleted t\n"
    assert output("topic", "list") == ""


def test_what_tunes_kafka_is_accepted_and_what_would_forbid_is_not():
    """A broker's file of Kafka's that is tuned, or that kafka-python's tests start brokers with,
    works; one that asks for a policy that nobody would enforce does not."""
    tuned = {
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
        "replica.socket.timeout.ms": "1000",
        "replica.fetch.wait.max.ms": "250",
        "group.coordinator.threads": "8",
        "controller.quorum.fetch.timeout.ms": "4000",
        "metadata.log.segment.ms": "3600000",
    }
    assert set(BrokerConfig(tuned).ignored) == set(tuned)
    for name in ("create.topic.policy.class.name", "max.connections.per.ip"):
        with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
            BrokerConfig({name: "1"})


def test_no_property_of_the_table_is_ignored():
    assert not [row.name for row in BROKER.rows if row.name in IGNORED]
