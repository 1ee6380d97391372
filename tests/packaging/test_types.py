"""What a user's type checker sees of the installed package, from a directory outside of this
tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kdirect

PROGRAM = """\
import kdirect
from kdirect import BrokerError, KdirectError, TopicPartition

with kdirect.Producer({"bootstrap.servers": "host:9092"}) as producer:
    reveal_type(producer.produce_sync("t", b"v"))
    reveal_type(producer.send("t", b"v").result().offset())
    producer.produce(5)
with kdirect.Consumer("host:9092") as consumer:
    message = consumer.poll(1.0)
    if message is not None:
        reveal_type(message)
        reveal_type(message.headers())
reveal_type(kdirect.connect("host:9092").transport)
reveal_type(kdirect.Broker().bootstrap_servers)
reveal_type(TopicPartition("t", 0).partition)
kdirect.Broker().no_such_thing
try:
    reveal_type(kdirect.TopicPartition("t", 0).topic)
except kdirect.BrokerUnavailableError as e:
    reveal_type(e.hint)
except BrokerError as e:
    reveal_type(e.code)
except KdirectError as e:
    reveal_type(e.retriable)
reveal_type(kdirect.connect("host:9092").reader(TopicPartition("t", 0), 0, 1).next_offset)
reveal_type(kdirect.__version__)
kdirect.NoSuchError
kdirect.connect(5)
from kdirect.format.codec import ArrowDecoder, encode_records
from kdirect.rdma import open_device

data = encode_records([(b"k", b"v", None, 0)])
reveal_type(data)
reveal_type(ArrowDecoder("t", 0).feed(data))
ArrowDecoder("t", "0")
encode_records(["v"])
reveal_type(open_device("shm").create_cq().poll())
open_device("shm").alloc_pd().register(b"", 1)
reveal_type(kdirect.OffsetOutOfRangeError("deleted").offset)
"""
REVEALED = {
    5: "builtins.int",
    6: "builtins.int",
    11: "kdirect.client.message.Message",
    12: "list[tuple[str, bytes | None]] | None",
    13: "builtins.str",
    14: "builtins.str",
    15: "builtins.int",
    18: "builtins.str",
    20: "builtins.str",
    22: "builtins.int",
    24: "builtins.bool",
    25: "builtins.int",
    26: "builtins.str",
    33: "builtins.bytes",
    34: "builtins.int",
    37: "builtins.list[kdirect.rdma.contract.WorkCompletion]",
    39: "builtins.int | None",
}
ERRORS = {
    7: "arg-type",
    16: "attr-defined",
    27: "attr-defined",
    28: "arg-type",
    35: "arg-type",
    36: "list-item",
    38: "arg-type",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of `PROGRAM`, line by line."""
    directory = tmp_path_factory.mktemp("user")
    (directory / "program.py").write_text(PROGRAM)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")
    }
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file=",
            "--cache-dir",
            str(directory / "cache"),
            "program.py",
        ],
        cwd=directory,
        env={**environment, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    return run.stdout.splitlines()


@pytest.mark.timeout(600)
def test_mypy_sees_the_types_of_the_installed_package(seen: list[str]) -> None:
    revealed = {}
    for line in seen:
        if found := re.fullmatch(r'program\.py:(\d+): note: Revealed type is "(.*)"', line):
            revealed[int(found[1])] = plain(found[2])
    assert revealed == {n: plain(t) for n, t in REVEALED.items()}, "\n".join(seen)


def plain(revealed: str) -> str:
    """A type as mypy prints it, however it spells unions."""
    text = re.sub(r"\bbuiltins\.", "", revealed)
    return re.sub(r"Union\[(.+?), None\]", r"\1 | None", text)


@pytest.mark.timeout(600)
def test_mypy_finds_a_users_mistakes_and_none_of_ours(seen: list[str]) -> None:
    errors = [
        re.match(r"(.*?):(\d+): error: .*\[([\w-]+)\]$", line)
        for line in seen
        if ": error: " in line
    ]
    assert {(e[1], int(e[2])): e[3] for e in errors if e} == {
        ("program.py", n): code for n, code in ERRORS.items()
    }, "\n".join(seen)


def test_the_stub_of_messages_names_what_they_have() -> None:
    stub = (Path(kdirect.__file__).parent / "client/message.pyi").read_text()
    described = set(
        re.findall(r"^    def ([a-z]\w*)\(", stub[: stub.index("class MessageQueue")], re.MULTILINE)
    )
    assert described == {name for name in dir(kdirect.Message) if not name.startswith("_")}


@pytest.mark.parametrize("package", ["kdirect", "kdirect_spark", "pyspark_kdirect"])
def test_the_installed_packages_say_that_they_are_typed(package: str) -> None:
    assert (Path(kdirect.__file__).parent.parent / package / "py.typed").exists()


def test_the_package_shows_what_users_need_and_nothing_else() -> None:
    shown = {name for name in dir(kdirect) if not name.startswith("__")}
    assert shown == set(kdirect.__all__) - {"__version__"}
    for name in kdirect.__all__:
        assert getattr(kdirect, name) is not None
    assert {name for name in dir(kdirect) if not name.startswith("__")} == shown
    assert issubclass(kdirect.BrokerUnavailableError, kdirect.KdirectError)
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        kdirect.no_such_thing  # noqa: B018


def test_importing_the_package_imports_no_room() -> None:
    """Besides the module that makes names lazy, which imports nothing of the package."""
    program = "import sys, kdirect; print([m for m in sys.modules if m.startswith('kdirect.')])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "['kdirect.lazy_names']"
