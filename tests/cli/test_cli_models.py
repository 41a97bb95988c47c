"""`phonograph models`: the catalog with sizes, and what fits a device."""

from __future__ import annotations

from typing import Any

import pytest
from commands import run

from phonograph.cli.app import main
from phonograph.core.host_resources import FreeMemory
from phonograph.files.catalog import HUB_IDS

GIB = 1024**3


def test_sizes_are_published_ones_and_what_fits_goes_by_the_device(run_json: Any) -> None:
    small, large = ({row["name"]: row for row in run_json("models", "--device-name", name)} for name in ("a10", "h200"))
    assert list(small) == ["demo", *HUB_IDS]
    llama = small["llama-3.1-8b"]
    assert llama["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert llama["num_parameters"] == 8_030_261_248 and llama["bytes_16_bits"] == 2 * 8_030_261_248
    # The embedding and the head stay in 16 bits; a group of 128 has a scale of 16 bits and a zero of 8.
    dense = 2 * 2 * 128256 * 4096
    assert llama["bytes_4_bits"] == pytest.approx(dense + (8_030_261_248 - dense / 2) * (4 + 24 / 128) / 8, rel=0.001)
    fits = {name: (small[name]["fits"], large[name]["fits"]) for name in small}
    assert fits["llama-3.1-8b"] == fits["demo"] == ("yes", "yes")
    assert fits["qwen2.5-14b"] == ("in 4 bits", "yes")
    assert fits["llama-3.1-70b"] == (None, "in 4 bits")
    assert fits["llama-3.1-405b"] == (None, None)
    assert fits["qwen3-30b-a3b"] == ("in 4 bits", "yes")
    assert all(row["unsupported"] is None for row in small.values())


def test_a_cpu_that_has_no_room_for_float32_is_told_the_type_that_fits(
    run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phonograph.engine import memory

    monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(22 * GIB))
    rows = {row["name"]: row["fits"] for row in run_json("models", "--device-name", "cpu")}
    assert (rows["qwen3-4b"], rows["llama-3.1-8b"], rows["qwen3-14b"]) == ("yes", "in bfloat16", "in 4 bits")


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(capsys, "models", "--device-name", "a10").splitlines()
    assert len(lines) == 2 + len(HUB_IDS)
    assert " ".join(lines[0].split()) == "model parameters 16 bits 4 bits fits"
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["Qwen/Qwen2.5-14B-Instruct"] == ["14.8", "B", "27.51", "9.34", "in", "4", "bits"]
    assert rows["Qwen/Qwen3-30B-A3B"] == ["30.5", "B", "56.87", "15.76", "in", "4", "bits"]


def test_an_unknown_device_is_named_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--device-name", "z80"]) == 2
    assert "device_name='z80': is not known; known are cpu, " in capsys.readouterr().err
