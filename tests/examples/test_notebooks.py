"""The notebooks and DataFrame programs of examples/, run as a reader would run them, with a broker
of their own.

A notebook's outputs are not kept in the tree; each ends with a check of what it shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import BrokerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return found


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["delta.ipynb", "explore.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_no_output_and_is_told_in_words(path: Path) -> None:
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert len(cells(path)) - len(code) >= len(code) // 2
    assert any("assert " in "".join(cell["source"]) for cell in code[-2:]), "it ends with a check"
    wide = [line for cell in cells(path) for line in "".join(cell["source"]).splitlines()]
    assert max(map(len, wide)) <= 100


def run(path: Path, broker: BrokerProcess, tmp_path: Path, **environment: str) -> str:
    """What the code cells of a notebook printed and showed, in turn."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(
        env={
            **os.environ,
            "KDIRECT_BROKER": broker.bootstrap_servers,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYTHONSAFEPATH": "1",
            # A short life: compiling Spark's code for speed would take longer than what it does.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            **environment,
        }
    )
    shown = [
        output.get("text") or str(output.get("data"))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    return "\n".join(shown)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_explore(broker_process: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    said = run(EXAMPLES / "explore.ipynb", broker_process(), tmp_path)
    assert "the same 504 means" in said
    assert "the last ten of each partition: 20" in said and "image/png" in said


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_delta(
    broker_process: Callable[..., BrokerProcess], delta_jars: list[Path], tmp_path: Path
) -> None:
    jars = ",".join(map(str, delta_jars))
    said = run(EXAMPLES / "delta.ipynb", broker_process(), tmp_path, DELTA_JARS=jars)
    assert "orders, each in its last state" in said and "MERGE" in said


def test_dataframes(broker_process: Callable[..., BrokerProcess]) -> None:
    """pandas writes, Polars and pandas read: one program, over a broker of another process."""
    broker = broker_process()
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "dataframes.py"),
            "--bootstrap-servers",
            broker.bootstrap_servers,
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "4320 readings" in done.stdout
