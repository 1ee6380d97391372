"""The model of the paper's cluster: every line says what it is, and its arithmetic holds."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slash_model", HERE / "bench/slash_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slash_model"] = module
    spec.loader.exec_module(module)
    return module


model = load()
COSTS = model.Costs(read=1e-9, update=10e-9, merge=20e-9, partition=10e-9, apply=10e-9,
                    entry_bytes=24, tuple_bytes=24)  # fmt: skip
FEW = model.Workload(name="few", record_bytes=64, kept=1, keys=1000, skew=0, paper="nothing")


def test_every_line_says_that_it_is_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    assert model.main(["--rows", "4096", "--write", str(path)]) == 0
    first = capsys.readouterr().out.splitlines()
    assert model.main(["--costs", str(path)]) == 0
    again = capsys.readouterr().out.splitlines()
    assert first == again
    assert len(again) == 5 + 2 + 5 * 5
    assert all(line.startswith("MODEL: ") for line in again)
    assert {"YSB", "CM", "NB7", "NB8", "NB11"} == set(json.loads(path.read_text()))


def test_slash_is_bounded_by_its_cores_where_an_epoch_aggregates() -> None:
    two, sixteen = (model.slash(FEW, COSTS, n) for n in (2, 16))
    assert two.bound == sixteen.bound == "the cores"
    # 11 ns a record on 20 cores, and hardly any entries.
    assert two.records_s == pytest.approx(20 / 11e-9, rel=0.02)
    assert sixteen.records_s == pytest.approx(8 * two.records_s, rel=0.02)


def test_half_of_the_cores_partition_in_uppar() -> None:
    rate = model.uppar(FEW, replace(COSTS, apply=1e-9), 2)
    assert rate.bound == "partitioning"
    assert rate.records_s == pytest.approx(10 / 11e-9)


def test_the_hottest_key_bounds_uppar_and_not_slash() -> None:
    hot = replace(FEW, skew=1.1, keys=1_000_000)
    assert model.uppar(hot, COSTS, 16).bound == "the hottest key"
    assert model.slash(hot, COSTS, 16).records_s > 5 * model.uppar(hot, COSTS, 16).records_s


def test_tuples_are_sent_where_an_epoch_hardly_aggregates() -> None:
    many = replace(FEW, keys=1 << 40)
    costs = replace(COSTS, entry_bytes=1e9, merge=1)
    assert model.slash(many, costs, 4).records_s == model.slash(many, COSTS, 4).records_s


def test_the_network_bounds_what_is_sent() -> None:
    many = replace(FEW, keys=1 << 40)
    rate = model.slash(many, replace(COSTS, tuple_bytes=1000), 2)
    assert rate.bound == "the network"
    assert rate.records_s == pytest.approx(2 * 11.8e9 / (1000 / 2), rel=0.01)
