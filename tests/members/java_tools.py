"""The programs of Kafka's system tests, VerifiableProducer and VerifiableConsumer, which tell in
lines of JSON what was acknowledged and consumed."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.support import die_with_parent

WAIT_S = 60


class Tool:
    """One of the programs, with the lines of JSON that it has printed."""

    def __init__(self, jars: list[Path], name: str, *arguments: str) -> None:
        command = ["java", "-cp", os.pathsep.join(map(str, jars)), "-Xmx128m"]
        command += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlog4j2.level=off"]
        self.process = subprocess.Popen(
            [*command, f"org.apache.kafka.tools.{name}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,
        )
        self._told: dict[str, list[dict[str, Any]]] = {}
        self._taken: dict[str, int] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                self._told.setdefault(found.get("name", ""), []).append(found)

    def told(self, name: str) -> list[dict[str, Any]]:
        """All lines of this name."""
        return list(self._told.get(name, ()))

    def take(self, name: str) -> list[dict[str, Any]]:
        """The lines of this name that were not taken yet."""
        start = self._taken.get(name, 0)
        found = self._told.get(name, [])[start:]
        self._taken[name] = start + len(found)
        return found

    def counts(self) -> dict[str, int]:
        """How many lines there are of each name."""
        return {name: len(rows) for name, rows in list(self._told.items())}

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self._thread.join()
            assert self.process.stdout is not None
            self.process.stdout.close()
