"""`kdirect doctor --remote-storage`: a store is tried, and what it does not do is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kdirect.objects.proof import prove
from tests.object_servers import SECRET, Gate, Place
from tests.objects.faulty import Chances, FaultyHandler, faulty_store

STEPS = ["remote put", "remote get", "remote list", "remote delete"]


def test_a_store_that_does_all(place: Place) -> None:
    store = place.store()
    steps = prove(store)
    assert [(s.step, s.ok) for s in steps] == [(name, True) for name in STEPS]
    assert list(store.list()) == []


def test_a_store_without_permission_to_delete(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    gate.fault = lambda r: (403, "AccessDenied") if r.method == "DELETE" else None
    steps = prove(place.store())
    assert [s.ok for s in steps] == [True, True, True, False]
    assert "s3:DeleteObject" in steps[-1].hint


def test_a_store_that_cannot_be_written(gated: tuple[Gate, Place]) -> None:
    gate, place = gated
    gate.fault = lambda r: (403, "AccessDenied") if r.method == "PUT" else None
    [step] = prove(place.store())
    assert not step.ok and "s3:PutObject" in step.hint


def test_a_store_that_does_not_keep_what_it_is_given() -> None:
    handler = FaultyHandler(1, Chances(missing=1.0))
    steps = {s.step: s.ok for s in prove(faulty_store(handler))}
    assert steps["remote put"] and not steps["remote get"]

    class Forger(FaultyHandler):
        def put(self, path: str, data: bytes) -> None:
            super().put(path, bytes(len(data)))

    steps = {s.step: s.ok for s in prove(faulty_store(Forger(1)))}
    assert not steps["remote get"] and steps["remote list"] and steps["remote delete"]


def doctor(uri: str, *more: str) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-m", "kdirect.cli", "doctor", "--transport", "shm"]
        + ["--remote-storage", uri, *more],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.returncode, run.stdout + run.stderr


def test_the_doctor(s3: Place, tmp_path: Path) -> None:
    properties = tmp_path / "broker.properties"
    properties.write_text(
        "log.dirs=/nowhere\n" + "".join(f"rsm.config.{n}={v}\n" for n, v in s3.config.items())
    )
    status, said = doctor(s3.uri, "--config", str(properties))
    assert status == 0 and all(f"ok    {step}" in said for step in STEPS), said
    assert SECRET not in said
    properties.write_text("rsm.config.access_key=nobody-77\nrsm.config.secret_key=wrong-but-5599\n")
    status, said = doctor(s3.uri, "--config", str(properties))
    assert status == 1 and "the object store cannot be used" in said
    assert "rsm.config.access_key" in said and "wrong-but-5599" not in said


@pytest.mark.parametrize("uri", ["s3://", "s4://bucket", "s3://a:b@bucket"])
def test_the_doctor_refuses_a_wrong_uri(uri: str) -> None:
    status, said = doctor(uri)
    assert status == 1 and "NO    remote storage" in said and "shm would be used" in said
