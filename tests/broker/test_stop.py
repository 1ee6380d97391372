"""The end of a broker: what fails to end keeps nothing else open; all queue pairs are closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kdirect
from kdirect.broker import server
from kdirect.format import protocol as p
from kdirect.format.schema import build


@pytest.fixture
def broker(tmp_path: Path) -> Any:
    with kdirect.Broker(tmp_path / "log") as broker:
        yield broker


def session_of(broker: kdirect.Broker) -> Any:
    return kdirect.connect({"bootstrap.servers": broker.bootstrap_servers, "transport": "shm"})


def used(broker: kdirect.Broker) -> Any:
    """A session that has produced and read over shm."""
    session = session_of(broker)
    session.admin.create_topic("t", 1)
    with session.producer() as producer:
        assert producer.produce_sync("t", b"x", partition=0) == 0
    return session


STEPS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "groups": lambda s: (s.groups, "close"),
    "waiters": lambda s: (s.waiters, "close"),
    "links": lambda s: (s.access.links, "close"),
    "queue pairs": lambda s: (s.access._queue_pairs, "close"),
    "worker": lambda s: (s.access.engines[0], "stop"),
    "files": lambda s: (s.files, "close"),
    "flusher": lambda s: (s.flusher, "close"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_fails_keeps_nothing_else_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = kdirect.Broker(tmp_path / "log").start()
    session = used(broker)
    devices = [engine.device for engine in broker.server.access.engines]
    owner, method = STEPS[name](broker.server)
    close = getattr(owner, method)

    def failing() -> None:
        close()
        raise RuntimeError(f"planted in {name}")

    monkeypatch.setattr(owner, method, failing)
    session.close()
    with pytest.raises(RuntimeError, match=f"planted in {name}"):
        broker.stop()
    assert devices and all(device.closed for device in devices)
    with (
        kdirect.Broker(tmp_path / "log") as again,
        session_of(again) as session,
        session.producer() as producer,
    ):
        assert producer.produce_sync("t", b"y", partition=0) == 1


def test_the_first_of_two_errors_is_told(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(name: str) -> Callable[[], None]:
        def fail() -> None:
            raise RuntimeError(f"planted in {name}")

        return fail

    monkeypatch.setattr(broker.server.groups, "close", failing("groups"))
    monkeypatch.setattr(broker.server.waiters, "close", failing("waiters"))
    with pytest.raises(RuntimeError, match="planted in waiters"):
        broker.stop()
    assert "planted in groups" in caplog.text


def test_a_client_whose_access_cannot_be_released(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = used(broker)
    producer = session.producer()
    assert producer.produce_sync("t", b"y", partition=0) == 1
    released = threading.Event()

    def failing(grant: Any, *, clean: bool) -> None:
        released.set()
        raise OSError("planted")

    monkeypatch.setattr(broker.server.access, "_release", failing)
    for connection in list(broker.server._connections):
        broker.server._loop.call_soon_threadsafe(connection.close, "")
    assert released.wait(10)
    broker.stop()
    producer.close()
    session.close()


def test_a_queue_pair_that_no_thread_has_come_to_close(
    broker: kdirect.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STOP_GRACE_SECONDS", 0.05)
    session = used(broker)
    files, go = broker.server.files, threading.Event()
    for _ in range(8):
        files._reads.submit(go.wait, 30)  # a disk that hangs
    close = files.close

    def close_then() -> None:
        go.set()
        close()

    monkeypatch.setattr(files, "close", close_then)
    asked = threading.Event()
    background = files.background

    def noted(work: Any) -> None:
        background(work)
        asked.set()

    monkeypatch.setattr(files, "background", noted)
    session.close()
    assert asked.wait(10)
    broker.stop()


def test_no_queue_pair_is_opened_once_the_broker_stops(broker: kdirect.Broker) -> None:
    session = used(broker)
    access = broker.server.access
    session.close()
    broker.stop()
    request = build(
        p.OpenQueuePairRequest, transport="shm", address=b"", max_recv=8, message_bytes=0
    )
    with pytest.raises(kdirect.errors.RefusedError, match="stopping"):
        access._queue_pairs.open(object(), request, None)
