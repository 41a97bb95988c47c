"""`phonograph verify`: every graph is replayed, a right backend never differs, and a frozen number is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from phonograph.cli.app import main

STALE = """
"A backend that hands a host integer of the batch to its kernel: harmless when eager, frozen in a graph."

from dataclasses import replace

from phonograph.attention.metadata import MetadataBuilder
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.attention.selection import Registered


class Capabilities(ReferenceCapabilities):
    name = "stale"


class Builder(MetadataBuilder):
    def __init__(self, backend, inner):
        self.backend = backend
        self.inner = inner

    def build(self, common, *, key):
        self.backend.longest = common.max_seq_len
        return self.inner.build(common, key=key)


class Backend(ReferenceBackend):
    capabilities = Capabilities()

    def make_builder(self):
        return Builder(self, super().make_builder())

    def forward(self, query, call, *outputs):
        # No key is further back than the longest sequence is long: a bound that excludes nothing, while it is true.
        layer = replace(call.layer, window=(self.longest - 1, 0))
        super().forward(query, call._replace(layer=layer), *outputs)


registered = Registered(capabilities=Capabilities(), loader=lambda: Backend)
"""


@pytest.fixture
def stale_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs an out-of-tree backend, as a package would: a module and its entry point."""
    (tmp_path / "stale_attention.py").write_text(STALE)
    metadata = tmp_path / "stale_attention-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stale-attention\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[phonograph.attention_backends]\nstale = stale_attention:registered\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stale_attention", raising=False)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_graph_that_explain_lists_is_replayed_and_equals_eager(run_json: Any, tiny: list[str], mode: str) -> None:
    flags = [*tiny, "--cudagraph-mode", mode]
    (facts,) = run_json("verify", *flags)
    assert facts["ok"] and facts["mismatches"] == [] and facts["num_mismatches"] == 0
    assert facts["replays"] == 200 == sum(graph["replays"] for graph in facts["graphs"])
    (explained,) = run_json("explain", *flags)
    listed = {(name, size) for name in ("decode", "mixed", "piecewise") for size in explained["captures"][name]}
    assert {(graph["graphs"], graph["num_tokens"]) for graph in facts["graphs"]} == listed
    assert facts["num_graphs"] == len(listed)
    assert all(graph["replays"] >= 200 // len(listed) for graph in facts["graphs"])


@pytest.mark.usefixtures("stale_backend")
def test_a_number_that_a_graph_froze_is_found(run_json: Any, tiny: list[str]) -> None:
    flags = [*tiny, "--attention-backend", "stale"]
    (facts,) = run_json("verify", *flags, code=1)
    assert facts["attention_backend"] == "stale" and not facts["ok"]
    differing = [graph for graph in facts["graphs"] if graph["mismatches"]]
    assert len(differing) > len(facts["graphs"]) // 2
    assert facts["num_mismatches"] == len(facts["mismatches"]) == sum(graph["mismatches"] for graph in differing)
    assert {mismatch["tensor"] for mismatch in facts["mismatches"]} >= {"hidden", "logits"}
    assert all(mismatch["max_abs_error"] > 0 for mismatch in facts["mismatches"])
    batches = [
        [mismatch["batch"] for mismatch in run_json("verify", *flags, "--verify-seed", seed, code=1)[0]["mismatches"]]
        for seed in ("0", "1")
    ]
    assert batches[0] == [mismatch["batch"] for mismatch in facts["mismatches"]] != batches[1]


@pytest.mark.usefixtures("stale_backend")
def test_attention_between_pieces_freezes_no_number(run_json: Any, tiny: list[str]) -> None:
    (facts,) = run_json(
        "verify", *tiny, "--attention-backend", "stale", "--cudagraph-mode", "FULL_AND_PIECEWISE", code=1
    )
    assert {mismatch["graphs"] for mismatch in facts["mismatches"]} == {"decode"}


@pytest.mark.usefixtures("stale_backend")
def test_the_table_for_people(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *tiny, "--replays", "30"]) == 0
    captured = capsys.readouterr()
    words = " ".join(captured.out.split())
    assert "decode" in words and "mixed" in words and "1-16" in words
    assert "30 replays of " in words and "each equal to eager bit by bit" in words
    assert captured.err == "mode FULL (default)\n"

    assert main(["verify", *tiny, "--attention-backend", "stale"]) == 1
    out = capsys.readouterr().out
    assert "logits differs in " in out and " more; --json has them all" in out
    assert "bit by bit" not in out


def test_few_replays_still_touch_every_graph(run_json: Any, tiny: list[str]) -> None:
    few = [*tiny, "--cudagraph-capture-sizes", "1,3,7"]
    (facts,) = run_json("verify", *few, "--replays", "1")
    assert {graph["replays"] for graph in facts["graphs"]} == {1}
    assert facts["replays"] == facts["num_graphs"] == 5


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--cudagraph-mode", "NONE"], "there is no graph to verify; ask for a mode with graphs"),
        (["--enforce-eager"], "there is no graph to verify"),
        (["--replays", "0"], "replays=0: must be a whole number >= 1"),
        (["--verify-seed", "-1"], "verify_seed=-1: must be a whole number >= 0"),
    ],
)
def test_nothing_to_verify(tiny: list[str], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *tiny, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and says in captured.err


@pytest.mark.parametrize(("mode", "kinds"), [("FULL", {"decode", "mixed"}), ("FULL_DECODE_ONLY", {"decode"})])
def test_graphs_of_decodes_with_drafts(run_json: Any, tiny: list[str], mode: str, kinds: set[str]) -> None:
    """They are captured and replayed, though no drafter is there to serve with."""
    drafts = ["--num-speculative-tokens", "3", "--cudagraph-mode", mode]
    (facts,) = run_json("verify", *tiny, *drafts, "--replays", "30")
    assert facts["ok"] and {graph["graphs"] for graph in facts["graphs"]} == kinds
    decodes = [graph for graph in facts["graphs"] if graph["graphs"] == "decode"]
    sizes = {longest: [one["num_tokens"] for one in decodes if one["query_len"] == longest] for longest in (1, 4)}
    assert sizes == {1: [4, 3, 2, 1], 4: [16, 12, 8, 6, 4, 3]}
    assert main(["generate", *tiny, *drafts, "--token-ids", "1,2,3"]) == 2


def test_drawn_batches_are_counted(run_json: Any, tiny: list[str]) -> None:
    (facts,) = run_json("verify", *tiny, "--cudagraph-mode", "FULL", "--replays", "200")
    drawn = facts["batches"]
    assert 10 < drawn["mixed"] < 200 and 5 < drawn["skewed"] < 200
    assert 100 < drawn["longest_sequence"] <= 200, "the model's own limit"
