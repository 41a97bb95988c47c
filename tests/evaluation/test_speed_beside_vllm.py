"""Table and chart of speed are those that the records give, and no ratio mixes two records."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def script(benchmark_script: Load) -> ModuleType:
    return benchmark_script("speed_beside_vllm")


@pytest.fixture(scope="module")
def written(script: ModuleType) -> str:
    """Return the table that the page has between the markers."""
    return script.PAGE.read_text().partition(f"{script.BEGIN}\n")[2].partition(f"\n{script.END}")[0]


def test_the_page_has_the_table_that_the_records_give(script: ModuleType, written: str) -> None:
    assert written == script.table(), "python benchmarks/speed_beside_vllm.py --write"


def test_the_chart_shows_the_records(script: ModuleType, tmp_path: Path) -> None:
    script.save(script.chart(), tmp_path / "speed.svg")
    made, stored = (
        re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8"))
        for path in (tmp_path / "speed.svg", script.CHART)
    )
    assert len(made) > len(script.ROWS)
    assert made == stored, "python benchmarks/speed_beside_vllm.py --write"


def test_each_row_names_a_record_that_has_both_sides(script: ModuleType, written: str) -> None:
    for line in written.splitlines()[2:]:
        *_, record = line.strip("| ").split(" | ")
        assert (script.RESULTS / f"{record.strip('`')}.json").exists()
    assert max(map(len, script.table().splitlines())) <= 120


def test_ratios_are_of_the_figures_in_the_record(script: ModuleType, tmp_path: Path) -> None:
    rng = random.Random()
    ours, first, second = (round(rng.uniform(2, 900), 4) for _ in range(3))
    peers = {"OTHER/FULL": 1.0, script.DEFAULTS: first}
    comparison = [
        {"suite": "decode", "case": "9x9", "system": "ours@flash_attn", "ours": 1.0, "peers": peers},
        {"suite": "decode", "case": "9x9", "system": "ours", "ours": ours, "peers": peers},
        {"suite": "throughput", "case": "3", "system": "ours", "ours": ours, "peers": {script.DEFAULTS: second}},
        {"workload": "sweep", "case": "7", "figure": "output_throughput", "ours": second, "other": first},
    ]
    (tmp_path / "run.json").write_text(json.dumps({"same_gpu": True, "comparison": comparison}))
    cases = ("decode", "9x9"), ("throughput", "3"), ("output_throughput", "sweep 7")
    line = script.line(script.Row("label", "run", cases), tmp_path)
    *_, ratios, record = line.strip("| ").split(" | ")
    assert ratios == f"{first / ours:.2f}, {ours / second:.2f}, {second / first:.2f}"
    assert record == "`run`"


@pytest.mark.parametrize(("same_gpu", "peers"), [(True, {}), (False, {"FLASH_ATTN/FULL_AND_PIECEWISE": 2.0})])
def test_a_record_without_both_sides_of_one_run_gives_no_ratio(
    script: ModuleType, tmp_path: Path, same_gpu: bool, peers: dict[str, float]
) -> None:
    row = {"suite": "startup", "case": "first", "system": "ours", "ours": 1.0, "peers": peers}
    (tmp_path / "run.json").write_text(json.dumps({"same_gpu": same_gpu, "comparison": [row]}))
    with pytest.raises(script.RecordError, match=r"^run\.json: "):
        script.line(script.Row("start", "run", (("startup", "first"),)), tmp_path)
