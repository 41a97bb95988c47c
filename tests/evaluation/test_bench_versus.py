"""The comparison with vLLM and its charts, with a script in vLLM's place."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from checks.bench_plots import bar_chart, line_chart, save, stacked_chart

Load = Callable[[str], ModuleType]

FAKE_PEER = """
import json, os, sys, time
model, backend, mode, suites, out = sys.argv[1:]
if backend == "BROKEN":
    sys.exit("no kernel image\\nis available")
if backend == "HANGING":
    time.sleep(600)
rows = [{"suite": "startup", "seconds": 1.5}]
if "latency" in suites:
    rows.append({"suite": "latency", "input_len": 9, "out_len": 4, "ms": 1e6})
if "mixed" in suites:
    rows.append({"suite": "mixed", "ctx": 16384, "s": 3.0 / int(os.environ.get("CAPTURE_MAX", 1))})
with open(out, "a") as file:
    for row in rows:
        row.update(engine="vllm", model=model, backend=backend, mode=mode, limit=os.environ.get("MAX_MODEL_LEN"))
        print(json.dumps(row), flush=True)
        file.write(json.dumps(row) + "\\n")
"""


PEER_LOG = """
(EngineCore pid=771) INFO 11-26 18:01:12 [gptq_marlin.py:371] Using MacheteLinearKernel for GPTQMarlinLinearMethod
(EngineCore pid=771) INFO 11-26 18:01:12 [cuda.py:366] Using FLASH_ATTN attention backend out of ['FLASH_ATTN']
(EngineCore pid=771) INFO 11-26 18:01:13 [fa_utils.py:42] Using FlashAttention version 3
INFO 11-26 18:01:13 [core.py:9] Initializing with config: dtype=bfloat16, quantization=gptq_marlin, seed=0
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  20%
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    folder = tmp_path / "peer"
    folder.mkdir()
    (folder / "vllm_anchor.py").write_text(FAKE_PEER)
    return folder


def _flags(tmp_path: Path, peer: Path) -> list[str]:
    flags = ["--model", "demo", "--dtype", "float32", "--peer-scripts", str(peer), "--folder", str(tmp_path / "runs")]
    return [*flags, "--output", str(tmp_path / "result.json"), "--max-model-len", "64"]


def test_both_sides_run_and_are_compared(
    benchmark_script: Load, tmp_path: Path, peer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark_script("vs_vllm")
    small = "--latency-cases 9 --max-num-seqs 2 --cudagraph-capture-sizes 1,16"
    runs = ["ours=latency", "FLASH_ATTN/FULL=latency", "BROKEN/FULL=decode"]
    script.main([*_flags(tmp_path, peer), "--our-flags", small, "--runs", *runs])
    result = json.loads((tmp_path / "result.json").read_text())
    (row,) = result["comparison"]
    assert (row["suite"], row["case"], row["peers"]) == ("latency", "9", {"FLASH_ATTN/FULL": 1e6})
    assert row["speedups"]["FLASH_ATTN/FULL"] == pytest.approx(1e6 / row["ours"], rel=1e-3)
    assert row["bars"][0]["pass"] and (result["bars"], result["passed"]) == (1, 1)
    assert [run["problem"] for run in result["runs"]] == [None, None, "exit code 1"]
    assert {"date", "commit", "hardware", "versions", "command"} < result.keys()
    assert result["same_gpu"] is None and str(tmp_path) not in json.dumps(result)
    ours = next(row for row in result["rows"] if row["system"] == "ours")
    assert ours["steps"] and ours["value"] == row["ours"]
    # From the start of the process, not what the script says itself, which leaves its imports out.
    (startup,) = (row for row in result["rows"] if row["suite"] == "startup")
    assert startup["case"] == "first" and 0 < startup["value"] != 1.5
    peers_row = json.loads((tmp_path / "runs" / "FLASH_ATTN-FULL-latency.jsonl").read_text().splitlines()[0])
    assert peers_row["limit"] == "64"
    assert "no kernel image" in (tmp_path / "runs" / "BROKEN-FULL-decode.log").read_text()
    shown = capsys.readouterr().out
    assert "BROKEN/FULL (decode) failed: exit code 1" in shown
    assert json.loads(shown.splitlines()[-1])["passed"] == 1


def test_runs_that_ended_well_are_kept(benchmark_script: Load, tmp_path: Path, peer: Path) -> None:
    script = benchmark_script("vs_vllm")
    runs = ["FLASH_ATTN/FULL/16=mixed", "BROKEN/FULL=mixed", "HANGING/FULL=mixed"]
    flags = [*_flags(tmp_path, peer), "--skip-existing", "--timeout", "1.5", "--runs", *runs]
    script.main(flags)
    (peer / "vllm_anchor.py").write_text("raise SystemExit(3)")
    script.main(flags)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [run["problem"] for run in result["runs"]] == [None, "exit code 3", "exit code 3"]
    assert [row["value"] for row in result["rows"] if row["suite"] == "mixed"] == [3.0 / 16]
    assert result["comparison"] == [], "nothing of ours to compare"


def test_a_run_that_hangs_is_ended(benchmark_script: Load, tmp_path: Path, peer: Path) -> None:
    script = benchmark_script("vs_vllm")
    script.main([*_flags(tmp_path, peer), "--timeout", "1", "--runs", "HANGING/FULL=mixed"])
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert run["problem"] == "more than 1 s" and run["seconds"] < 30


def test_commands(benchmark_script: Load, tmp_path: Path) -> None:
    script = benchmark_script("vs_vllm")
    settings = script.Settings(
        model="models/m",
        peer_scripts=Path("peer"),
        peer_site=Path("site"),
        folder=tmp_path,
        dtype="bfloat16",
        max_model_len=None,
        our_flags=("--seed", "1"),
        timeout=1,
    )
    rows = Path("rows.jsonl")
    peer = script.Run.parse("FLASH_ATTN/FULL/16=mixed")
    script_path = str(Path("peer") / "vllm_anchor.py")
    assert settings.command(peer, rows)[1:] == [script_path, "models/m", "FLASH_ATTN", "FULL", "mixed", "rows.jsonl"]
    assert settings.environment(peer)["CAPTURE_MAX"] == "16" and settings.environment(peer)["PYTHONPATH"] == "site"
    default = script.Run.parse("FLASH_ATTN/FULL=mixed")
    assert "CAPTURE_MAX" not in settings.environment(default)
    ours = settings.command(script.Run.parse("ours:NONE=mixed"), rows)
    assert ours[:4] == [sys.executable, "-m", "bench", "suite"]
    assert ours[-4:] == ["--seed", "1", "--cudagraph-mode", "NONE"]
    for text in ("ours", "ours=speed", "FLASH_ATTN=decode", "ours=mixed,decode", "a/b/c/d=mixed"):
        with pytest.raises(script.argparse.ArgumentTypeError):
            script.Run.parse(text)
    for text in script.DEFAULT_RUNS:
        script.Run.parse(text)


def test_our_backends_find_the_peers_libraries(
    benchmark_script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = benchmark_script("vs_vllm")
    arguments = {"model": "m", "peer_scripts": Path("peer"), "folder": tmp_path, "dtype": "bfloat16"}
    arguments |= {"max_model_len": None, "our_flags": (), "timeout": 1}
    monkeypatch.setenv("PYTHONPATH", "ours")
    for site, system, path in (
        ("site", "ours@flash_attn:3", f"ours{os.pathsep}site"),
        ("site", "ours", "ours"),
        (None, "ours@flash_attn:3", "ours"),
    ):
        settings = script.Settings(peer_site=site and Path(site), **arguments)
        assert (
            settings.environment(script.Run.parse(f"{system}=decode"))["PYTHONPATH"]
            == f"{script.Path(script.__file__).parent}{os.pathsep}{path}"
        )


def test_commands_of_our_backends(benchmark_script: Load, tmp_path: Path) -> None:
    script = benchmark_script("vs_vllm")
    settings = script.Settings(
        model="models/m",
        peer_scripts=Path("peer"),
        peer_site=None,
        folder=tmp_path,
        dtype="bfloat16",
        max_model_len=None,
        our_flags=(),
        timeout=1,
    )
    expected = {
        "ours@flash_attn:FULL=decode": ["--backend", "flash_attn", "--cudagraph-mode", "FULL"],
        "ours@flash_attn:2=decode": ["--backend", "flash_attn", "--flash-attn-version", "2"],
        "ours@flash_attn:3:PIECEWISE=decode": [
            *("--backend", "flash_attn", "--flash-attn-version", "3", "--cudagraph-mode", "PIECEWISE")
        ],
        "ours@prefill=flash_attn,decode=triton=decode": ["--backend", "prefill=flash_attn,decode=triton"],
        "ours:NONE=decode": ["--cudagraph-mode", "NONE"],
        "ours=decode": [],
    }
    names: set[str] = set()
    for text, flags in expected.items():
        run = script.Run.parse(text)
        assert run.is_ours and run.suites == ("decode",)
        command = settings.command(run, Path("rows.jsonl"))
        assert command[command.index("rows.jsonl") + 1 :] == flags, text
        names.add(run.name)
    assert len(names) == len(expected) and not set("".join(names)) & set("/:@=,")
    runs = script.Run.parse_all("ours@flash_attn:FULL=decode,mixed,latency")
    assert [run.suites for run in runs] == [("decode", "latency"), ("mixed",)]
    assert [run.suites for run in script.Run.parse_all("ours=mixed")] == [("mixed",)]
    for text in ("ours@triton:FAST=decode", "ours@flash_attn:FULL:2=decode", "ours:3=decode", "oursX=decode"):
        with pytest.raises(script.argparse.ArgumentTypeError):
            script.Run.parse_all(text)


def test_our_backends_stand_beside_each_other(benchmark_script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    script = benchmark_script("vs_vllm")
    composite = "ours@prefill=flash_attn,decode=triton"
    rows = [
        _row(system, "decode", case, value)
        for case, factor in (("1x1024", 1.0), ("8x1024", 2.0))
        for system, value in (
            *(("ours", 4.0 * factor), ("ours@flash_attn:3:FULL", 5.0 * factor), (composite, 8.0 * factor)),
            *(("ours:NONE", 1.0), ("FLASH_ATTN/FULL", 6.0 * factor), ("FLASHINFER/FULL", 12.0 * factor)),
        )
    ]
    table = script.compare(sorted(rows, key=lambda row: str(row["system"])))
    assert [row["case"] for row in table] == ["1x1024"] * 3 + ["8x1024"] * 3
    by_system = {row["system"]: row for row in table[:3]}
    assert by_system["ours"]["bars"] and not by_system["ours"]["same_kind"]
    flash = by_system["ours@flash_attn:3:FULL"]
    assert flash["speedups"] == {"FLASH_ATTN/FULL": 1.2, "FLASHINFER/FULL": 2.4}
    assert flash["same_kind"] == by_system[composite]["same_kind"] == ["FLASH_ATTN/FULL"] and flash["bars"] == []
    script.show(table, [], [])
    shown = capsys.readouterr().out
    assert "6 (1.20x*)" in shown and "12 (2.40x)" in shown and "6 (1.50x)" in shown and composite[:20] in shown


def _row(system: str, suite: str, case: str, value: float) -> dict[str, object]:
    return {"system": system, "suite": suite, "case": case, "value": value}


def test_arguments_of_the_peer(benchmark_script: Load) -> None:
    """vLLM gets backend, mode and context of the run, and what is given counts more."""
    script = benchmark_script("vs_vllm")
    speculation = {"speculative_config": {"method": "ngram"}}
    settings = script.Settings(
        model="m", peer_scripts=Path("scripts"), peer_site=None, folder=Path("runs"), dtype="bfloat16",
        max_model_len=34000, our_flags=(), timeout=1.0, peer_arguments={"max_model_len": 4000, **speculation},
    )  # fmt: skip
    command = settings.command(script.Run("FLASH_ATTN/FULL", ("decode",)), Path("rows.jsonl"))
    assert command[1:5] == ["scripts/vllm_features.py", "m", "FLASH_ATTN/FULL", "rows.jsonl"]
    expected = {"attention_backend": "FLASH_ATTN", "compilation_config": {"cudagraph_mode": "FULL"}}
    assert json.loads(command[5]) == {**expected, "max_model_len": 4000, **speculation}
    assert script.case_of({"suite": "throughput", "out_tok_s": 1.0}) == "256"


@pytest.mark.parametrize(
    ("suite", "case", "ours", "peers", "verdicts"),
    [
        # Against the best of all; a tenth more for one sequence.
        ("decode", "8x1024", 4.9, {"FLASH_ATTN/FULL": 5.0, "FLASHINFER/FULL": 6.0}, [("FLASH_ATTN/FULL", True)]),
        ("decode", "8x1024", 5.0, {"FLASH_ATTN/FULL": 5.0}, [("FLASH_ATTN/FULL", False)]),
        ("decode", "1x1024", 4.7, {"FLASH_ATTN/FULL": 5.0}, [("FLASH_ATTN/FULL", False)]),
        ("decode", "1x1024", 4.5, {"FLASH_ATTN/FULL": 5.0}, [("FLASH_ATTN/FULL", True)]),
        # Only FlashAttention counts for latency; long prompts may take 1.15 times as long.
        ("latency", "2000", 60.0, {"FLASH_ATTN/FULL": 60.0, "FLASHINFER/FULL": 50.0}, [("FLASH_ATTN/FULL", True)]),
        ("latency", "2000", 61.0, {"FLASH_ATTN/FULL": 60.0}, [("FLASH_ATTN/FULL", False)]),
        ("latency", "4000", 114.0, {"FLASH_ATTN/FULL": 100.0}, [("FLASH_ATTN/FULL", True)]),
        ("latency", "4000", 116.0, {"FLASH_ATTN/FULL": 100.0}, [("FLASH_ATTN/FULL", False)]),
        ("throughput", "256", 10500.0, {"FLASH_ATTN/FULL": 10000.0}, [("FLASH_ATTN/FULL", True)]),
        ("throughput", "256", 10400.0, {"FLASH_ATTN/FULL": 10000.0}, [("FLASH_ATTN/FULL", False)]),
        (
            "mixed",
            "65536",
            0.6,
            {"FLASH_ATTN/F_A_P": 1.3, "FLASH_ATTN/FULL/16": 0.5, "TRITON_ATTN/FULL": 2.5, "FLASHINFER/F_A_P": 1.1},
            [
                ("FLASH_ATTN/F_A_P", True),
                ("FLASH_ATTN/FULL/16", False),
                ("TRITON_ATTN/FULL", True),
                ("FLASHINFER/F_A_P", False),
            ],
        ),
        ("mixed", "16384", 0.6, {"TRITON_ATTN/FULL": 1.3}, []),
        ("startup", "first", 12.0, {"FLASH_ATTN/FULL": 46.0}, [("FLASH_ATTN/FULL", True)]),
        ("decode", "8x1024", 4.9, {}, []),
    ],
)
def test_bars(
    benchmark_script: Load,
    suite: str,
    case: str,
    ours: float,
    peers: dict[str, float],
    verdicts: list[tuple[str, bool]],
) -> None:
    rows = [_row("ours", suite, case, ours), _row("ours:NONE", suite, case, ours / 100)]
    rows += [_row(peer, suite, case, value) for peer, value in peers.items()]
    (row,) = benchmark_script("vs_vllm").compare(rows)
    assert row["ours"] == ours and row["peers"] == peers
    assert [(bar["against"], bar["pass"]) for bar in row["bars"]] == verdicts


def test_charts_of_results(benchmark_script: Load, tmp_path: Path) -> None:
    versus, attention = tmp_path / "versus.json", tmp_path / "attention.jsonl"
    peers = {"FLASH_ATTN/FULL": 30.0}
    comparison = [
        {"suite": "latency", "case": case, "ours": 20.0 * place, "peers": peers}
        for place, case in enumerate(("500", "1000", "16000"), start=1)
    ]
    comparison.append({"suite": "decode", "case": "1x1024", "ours": 3.9, "peers": {"A & B": 4.75, "C": 4.5}})
    rows = [{"suite": "decode", "case": "1x1024", "system": "ours", "floor_ms": 3.5, "value": 3.9}]
    versus.write_text(json.dumps({"model": "m", "comparison": comparison, "rows": rows}))
    kernels = [
        {"rows": [{"suite": "attention", "case": "one", "provider": "triton", "us": 8.0, "floor_us": 4.0}]},
        {"case": "one", "provider": "fa3", "page": 16, "us": 12.0},
        {"case": "one", "provider": "fa3", "page": 128, "us": 10.0},
        {"case": "one", "provider": "fa2", "page": 16, "error": "failed"},
    ]
    attention.write_text("\n".join(json.dumps(one) for one in kernels))
    script = benchmark_script("plot_results")
    script.main(["--versus", str(versus), "--attention", str(attention), "--folder", str(tmp_path / "plots")])
    texts = {path.stem: path.read_text() for path in (tmp_path / "plots").iterdir()}
    assert texts.keys() == {"latency", "decode", "attention"}
    for text in texts.values():
        ElementTree.fromstring(text)
    assert ">16000<" in texts["latency"] and ">vLLM<" in texts["latency"] and "FLASH_ATTN" not in texts["latency"]
    assert ">vLLM, A &amp; B<" in texts["decode"] and ">1x1024<" in texts["decode"]
    attention = script.attention_chart(kernels)
    assert [bar.get_height() for bar in attention.patches] == [2.0, 2.5], "the best of each provider, over the floor"
    script.main(["--versus", str(versus), "--folder", str(tmp_path / "others")])
    assert not (tmp_path / "others" / "attention.svg").exists()


def test_a_chart_of_sums(tmp_path: Path, benchmark_script: Load) -> None:
    file = tmp_path / "sums.json"
    sums = [{"rows": rows, "nccl_us": 7.0 * rows, "peer_us": 3.0, "peer_norm_us": 4.0} for rows in (1, 64)]
    file.write_text(json.dumps({"ranks": 2, "width": 512, "sums": sums}))
    benchmark_script("plot_results").main(["--sums", str(file), "--folder", str(tmp_path)])
    text = (tmp_path / "sums.svg").read_text()
    assert ">NCCL<" in text and ">64<" in text and "512 over 2 GPUs" in text


def test_a_chart_of_servers(tmp_path: Path, benchmark_script: Load) -> None:
    def row(workload: str, case: str, figure: str, ratio: float) -> dict[str, object]:
        return {"workload": workload, "case": case, "figure": figure, "ratio": ratio}

    comparison = [
        row("table", "", "output_throughput", 1.1),
        row("table", "", "duration", 7.7),
        row("sweep", "32", "median_itl_ms", 5.25),
        row("streams", "offline", "output_throughput", 9.9),
    ]
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"model": "m", "comparison": comparison}))
    benchmark_script("plot_results").main(["--serving", str(file), "--folder", str(tmp_path)])
    chart = (tmp_path / "serving.svg").read_text()
    ElementTree.fromstring(chart)
    assert ">table<" in chart and ">5.25<" in chart and ">as good<" in chart
    assert ">7.7<" not in chart and ">9.9<" not in chart, "figures that no chart is made of"


def test_a_bar_is_as_high_as_its_value() -> None:
    chart = bar_chart("t", "ms", ["a", "b"], {"x": [2.0, 4.0], "y": [None, 1.0]}, [1.0, None])
    assert [bar.get_height() for bar in chart.patches] == pytest.approx([2.0, 4.0, math.nan, 1.0], nan_ok=True)
    (floors,) = chart.collections
    assert [segment[:, 1].tolist() for segment in floors.get_segments()] == [[1.0, 1.0]], (
        "one floor, below the first bar"
    )


def test_a_bar_above_the_cap_is_cut_and_says_so() -> None:
    chart = bar_chart("t", "ms", ["a", "b"], {"x": [2.0, 49.5]}, cap=4.0)
    assert [bar.get_height() for bar in chart.patches] == [2.0, 4.0]
    assert [text.get_text() for text in chart.texts] == ["", "49.5"]


def test_stacked_bars_have_their_shares() -> None:
    chart = stacked_chart("t", "ms", ["a", "b"], {"x": [3.0, 6.0], "y": [1.0, 0.25]})
    assert [(bar.get_y(), bar.get_height()) for bar in chart.patches] == [(0, 3), (0, 6), (3, 1), (6, 0.25)]
    assert [text.get_text() for text in chart.texts] == ["75%", "96%", "25%", "", "4", "6.25"]


def test_a_line_is_logarithmic() -> None:
    chart = line_chart("t", "x", "y", {"a": [(1, 10.0), (100, 1000.0), (10, 100.0)]})
    assert chart.get_xscale() == chart.get_yscale() == "log"
    assert chart.lines[0].get_xydata().tolist() == [[1, 10], [10, 100], [100, 1000]]


def test_a_chart_has_twelve_bars_at_most(benchmark_script: Load) -> None:
    script = benchmark_script("plot_results")
    assert script.fitting(["a", "b", "c"], ["b"], 4) == ["a", "b", "c"]
    assert script.fitting([f"{place}" for place in range(7)], ["5", "1"], 2) == ["1", "5"]
    assert script.fitting([f"{place}" for place in range(7)], [], 2) == [f"{place}" for place in range(6)]


def test_a_chart_takes_the_colours_of_the_text_around_it(tmp_path: Path) -> None:
    save(bar_chart("t", "ms", ["a", "b"], {"x": [2.0, 4.0]}, [1.0, None]), tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    ElementTree.fromstring(text)
    assert "currentColor" in text and "#000000" not in text and "#111827" not in text and "#ffffff" not in text
    assert "prefers-color-scheme: dark" in text and "*{" not in text


def test_a_chart_is_the_same_text_again(tmp_path: Path) -> None:
    for name in ("one", "other"):
        save(line_chart("t", "x", "y", {"a": [(1, 10.0), (2, 11.0)]}), tmp_path / f"{name}.svg")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "other.svg").read_text()


@pytest.mark.parametrize("kernel", ["MacheteLinearKernel", "none"])
def test_what_the_peer_chose_is_in_the_record(kernel: str, benchmark_script: Load, tmp_path: Path, peer: Path) -> None:
    """A quantized run whose log names no kernel of quantized weights fails, and gives no figures."""
    script = benchmark_script("vs_vllm")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    log = PEER_LOG.replace("Using MacheteLinearKernel", f"Using {kernel}")
    program = FAKE_PEER + f"\nprint({log!r}, file=sys.stderr)"
    (peer / "vllm_anchor.py").write_text(program)
    flags = [*_flags(tmp_path, peer), "--runs", "FLASH_ATTN/FULL/16=mixed"]
    flags[flags.index("demo")] = str(model)
    script.main(flags)
    result = json.loads((tmp_path / "result.json").read_text())
    (run,) = result["runs"]
    backend = "Using FLASH_ATTN attention backend out of ['FLASH_ATTN']"
    graphs = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)"
    assert run["choices"][-4:] == [backend, "Using FlashAttention version 3", "quantization=gptq_marlin", graphs]
    if kernel == "none":
        assert not run["ok"] and "no kernel of quantized weights" in run["problem"]
        assert not result["rows"]
    else:
        assert run["choices"][0] == "Using MacheteLinearKernel for GPTQMarlinLinearMethod" and run["ok"]
        assert len(result["rows"]) == 2


def test_a_peers_weights_have_the_size_of_trained_ones(benchmark_script: Load, tmp_path: Path) -> None:
    """The change reaches the functions of a module that is imported later, in a process of its own."""
    script = benchmark_script("vs_vllm")
    settings = script.Settings("m", Path("peer"), tmp_path, tmp_path, "bfloat16", None, (), 1, adapt_peer=True)
    folder = tmp_path / "vllm" / "model_executor" / "model_loader"
    folder.mkdir(parents=True)
    (folder / "weight_utils.py").write_text(
        "def initialize_single_dummy_weight(param, low, high):\n    param.uniform_(low, high)\n\n"
        "def initialize_dummy_weights(params):\n"
        "    for param in params:\n        initialize_single_dummy_weight(param, -1e-3, 1e-3)\n"
    )
    program = (
        "import torch\nfrom vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights\n"
        "found = [torch.zeros(5), torch.zeros(50, 300), torch.zeros(64, 48).to(torch.float8_e4m3fn)]\n"
        "initialize_dummy_weights(found)\nprint(*[float(one.float().square().mean()) for one in found])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=settings.environment(script.Run.parse("FLASH_ATTN/FULL=decode")),
        capture_output=True,
        text=True,
        check=True,
    )
    ones, wide, narrow = (float(word) for word in done.stdout.split())
    assert ones == 1 and wide == pytest.approx(1 / 300, rel=0.05) and narrow == pytest.approx(1 / 48, rel=0.1)
