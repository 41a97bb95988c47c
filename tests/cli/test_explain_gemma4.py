"""`phonograph explain` of Gemma 4: heads of two sizes, layers that read the pages of others, and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from gemma4_configs import DENSE, EXPERTS, SMALL

from phonograph.models.spec import read_model_spec

SIZES = ["--device-name", "h200", "--max-model-len", "32768", "--max-num-seqs", "64"]
BILLION = 1e9


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "parameters", "groups", "block_sizes"),
    [
        # 50 layers of 16 heads of 256, and 10 of 4 heads of 512.
        (DENSE, 30.7, [(10, 1024)] * 5 + [(10, None)], [64] * 5 + [128]),
        (EXPERTS, 25.2, [(5, 1024)] * 5 + [(5, None)], [64] * 5 + [128]),
        # 12 and 3 of 35 layers have keys.
        (SMALL, 4.6, [(3, 512)] * 4 + [(3, None)], [128] * 4 + [64]),
    ],
)
def test_groups_of_two_head_sizes(
    config: dict[str, Any],
    parameters: float,
    groups: list[tuple[int, int | None]],
    block_sizes: list[int],
    tmp_path: Path,
    run_json: Any,
) -> None:
    (facts,) = run_json("explain", folder(tmp_path, config), *SIZES)
    found = facts["kv_groups"]
    assert [(len(group["layers"]), group["window"]) for group in found] == groups
    assert [group["block_size"] for group in found] == block_sizes
    assert {group["backend"] for group in found} == {"triton"} and all(group["reasons"] for group in found)
    assert facts["mode"]["resolved"] == "FULL"
    assert round(read_model_spec(tmp_path).num_parameters / BILLION, 1) == parameters


def test_layers_that_read_the_pages_of_others_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Any
) -> None:
    (facts,) = run_json("explain", folder(tmp_path, SMALL), *SIZES)
    readers = [group["readers"] for group in facts["kv_groups"]]
    assert readers[3] == [layer for layer in range(15, 35) if (layer + 1) % 5] and readers[4] == [19, 24, 29, 34]
    assert readers[:3] == [[]] * 3
    text = " ".join(run(capsys, "explain", str(tmp_path), *SIZES).split())
    assert "4: 3 layers (4-14 by 5, read by 4 more (19-34 by 5)), full attention, blocks of 64 tokens" in text
    # 12 sliding layers with keys, 16 without; 3 full ones with, 4 without.
    for sizes in ("qkv 12 x 2560 x 1536", "qkv 3 x 5120 x 1536", "qkv 16 x 2048 x 1536", "qkv 4 x 4096 x 1536"):
        assert sizes in text
    assert "8 query and 1 KV heads of size 256 or 8 query and 1 KV heads of size 512" in text
