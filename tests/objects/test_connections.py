"""Which connections serve the GETs of signed URLs, against a server that says what came on each."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kdirect.errors import ObjectNotFoundError, RemoteAccessError, RemoteUnavailableError
from kdirect.objects import connections, get_presigned

DATA = bytes(range(256)) * 8


class Server:
    """Answers GETs of ranges of DATA.  `got`: for each connection, how many requests it brought.
    `answer(request number of the connection)` says what is done with one: "" to answer it, `close`
    to answer and close without a word, `say close`, `drop`, or a status."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.answer: Callable[[int], str] = lambda number: ""
        self.closed = threading.Semaphore(0)  # by itself
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/bucket/key?signed"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.got.append(0)
            threading.Thread(
                target=self._serve, args=(connection, len(self.got) - 1), daemon=True
            ).start()

    def _serve(self, connection: socket.socket, i: int) -> None:
        with connection, connection.makefile("rb") as lines:
            while line := lines.readline():
                while (header := lines.readline()) != b"\r\n":
                    if header.lower().startswith(b"range:"):
                        first, last = map(int, header.partition(b"=")[2].split(b"-"))
                assert line.startswith(b"GET /bucket/key?signed ")
                self.got[i] += 1
                what = self.answer(self.got[i])
                if what == "drop":
                    break
                if what.isdigit():
                    connection.sendall(
                        b"HTTP/1.1 %s No\r\nContent-Length: 4\r\n\r\nnone" % what.encode()
                    )
                    continue
                more = b"Connection: close\r\n" if what == "say close" else b""
                head = b"HTTP/1.1 206 Partial\r\nContent-Range: bytes %d-%d/%d\r\n"
                head = head % (first, last, len(DATA))
                length = b"Content-Length: %d\r\n\r\n" % (last + 1 - first)
                connection.sendall(head + more + length + DATA[first : last + 1])
                if what == "close":
                    break
        self.closed.release()


@pytest.fixture
def server() -> Iterator[Server]:
    connections._forget()
    server = Server()
    yield server
    server.close()


def get(server: Server, position: int) -> None:
    assert bytes(get_presigned(server.url, position, 100)) == DATA[position : position + 100]


def test_one_connection_serves_one_get_after_the_other(server: Server) -> None:
    for position in range(20):
        get(server, position)
    assert server.got == [20]


def test_gets_at_the_same_time_have_a_connection_each(server: Server) -> None:
    both = threading.Barrier(3)

    def answer(number: int) -> str:
        both.wait(10)
        return ""

    server.answer = answer
    threads = [threading.Thread(target=get, args=(server, i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.answer = lambda number: ""
    get(server, 7)
    assert sorted(server.got) == [1, 1, 2]


def test_one_that_the_server_has_closed_costs_no_error(server: Server) -> None:
    server.answer = lambda number: "close"
    for position in range(5):
        get(server, position)
        assert server.closed.acquire(timeout=10)
    assert server.got == [1] * 5


def test_a_server_that_drops_each_request_is_asked_once_more_at_most(server: Server) -> None:
    server.answer = lambda number: "drop"
    with pytest.raises(RemoteUnavailableError):
        get(server, 0)
    assert server.got == [1], "on a new connection it is asked once"
    server.answer = lambda number: "" if number == 1 and len(server.got) == 2 else "drop"
    get(server, 0)
    with pytest.raises(RemoteUnavailableError):
        get(server, 1)
    assert server.got == [1, 2, 1]


@pytest.mark.parametrize("what", ["say close", "403", "404", "503"])
def test_none_is_kept_that_may_have_something_left(server: Server, what: str) -> None:
    server.answer = lambda number: what if len(server.got) == 1 else ""
    if what.isdigit():
        with pytest.raises((RemoteAccessError, ObjectNotFoundError, RemoteUnavailableError)):
            get(server, 0)
    else:
        get(server, 0)
    get(server, 1)
    get(server, 2)
    assert server.got == [1, 2]


def test_an_old_one_is_not_used_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    get(server, 0)
    monkeypatch.setattr(connections, "MOST_IDLE_S", 0.0)
    get(server, 1)
    assert server.got == [1, 1]
    assert server.closed.acquire(timeout=10), "the old one is closed"


def test_so_many_are_kept_at_most(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_IDLE", 1)
    other = Server()
    get(server, 0)
    get(other, 0)
    assert server.closed.acquire(timeout=10), "the one that was used last is kept"
    get(other, 1)
    assert (server.got, other.got) == ([1], [2])
    other.close()


def test_a_forked_process_has_its_own(server: Server) -> None:
    get(server, 0)
    child = os.fork()
    if child == 0:
        try:
            get(server, 1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    get(server, 2)
    assert server.got == [2, 1]
