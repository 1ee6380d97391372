"""A schema registry for tests: the part of the documented REST API of Confluent's that serializers
and readers use, over real HTTP, in memory.  Like the real one it gives a schema the same id in all
subjects, and answers 404 with error codes of its own for what it does not have.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

UNKNOWN = {"subject": 40401, "version": 40402, "schema": 40403}


class SchemaRegistryServer:
    """Serves from `__enter__` to `__exit__`.  `user_info` or `token` is what clients must give;
    `delay_s` and `status` make it slow, and answer all with an error.  `asked` has the paths that
    were asked for.
    """

    def __init__(self, user_info: str | None = None, token: str | None = None) -> None:
        self.wanted = None if token is None else f"Bearer {token}"
        if user_info is not None:
            self.wanted = "Basic " + base64.b64encode(user_info.encode()).decode()
        self.delay_s = 0.0
        self.status = 200
        self.asked: list[str] = []
        self._schemas: list[dict] = []
        self._subjects: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> SchemaRegistryServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self, None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer._answer(self, json.loads(body))

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def register(
        self, subject: str, schema: str, kind: str = "AVRO", references: tuple = ()
    ) -> int:
        """The id of a schema, as a version of a subject."""
        given = {"schema": schema, "schemaType": kind, "references": list(references)}
        with self._lock:
            if given not in self._schemas:
                self._schemas.append(given)
            number = self._schemas.index(given) + 1
            versions = self._subjects.setdefault(subject, [])
            if number not in versions:
                versions.append(number)
        return number

    # -- the API

    def _answer(self, request: BaseHTTPRequestHandler, body: dict | None) -> None:
        path = unquote(urlparse(request.path).path)
        self.asked.append(path)
        time.sleep(self.delay_s)
        status, found = self._refused(request) or self._found(path, body)
        data = json.dumps(found).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _refused(self, request: BaseHTTPRequestHandler) -> tuple[int, dict] | None:
        if self.status != 200:
            return self.status, {"error_code": self.status, "message": "out of order"}
        if self.wanted not in (None, request.headers.get("Authorization", "")):
            return 401, {"error_code": 401, "message": "Unauthorized"}
        return None

    def _found(self, path: str, body: dict | None) -> tuple[int, object]:
        if match := re.fullmatch(r"/schemas/ids/(\d+)", path):
            number = int(match[1])
            if not 1 <= number <= len(self._schemas):
                return self._unknown("schema")
            return 200, self._schemas[number - 1]
        if match := re.fullmatch(r"/subjects/(.+)/versions", path):
            if body is not None:
                kind = body.get("schemaType", "AVRO")
                number = self.register(match[1], body["schema"], kind, body.get("references") or ())
                return 200, {"id": number}
            if match[1] not in self._subjects:
                return self._unknown("subject")
            return 200, list(range(1, len(self._subjects[match[1]]) + 1))
        if match := re.fullmatch(r"/subjects/(.+)/versions/(\d+|latest)", path):
            versions = self._subjects.get(match[1])
            if versions is None:
                return self._unknown("subject")
            version = len(versions) if match[2] == "latest" else int(match[2])
            if not 1 <= version <= len(versions):
                return self._unknown("version")
            return 200, self._version(match[1], version)
        if body is not None and (match := re.fullmatch(r"/subjects/([^/]+)", path)):
            for version, number in enumerate(self._subjects.get(match[1], ()), 1):
                if self._schemas[number - 1]["schema"] == body["schema"]:
                    return 200, self._version(match[1], version)
            return self._unknown("schema")
        return 404, {"error_code": 404, "message": f"HTTP 404 Not Found: {path}"}

    def _version(self, subject: str, version: int) -> dict:
        number = self._subjects[subject][version - 1]
        return {"subject": subject, "version": version, "id": number, **self._schemas[number - 1]}

    def _unknown(self, what: str) -> tuple[int, dict]:
        return 404, {"error_code": UNKNOWN[what], "message": f"{what} not found"}
