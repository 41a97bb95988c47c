"""The scripts of benchmarks/ still run, and the host stays within its bound."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from phonograph import LLM
from phonograph.graphs.modes import GraphSet

Load = Callable[[str], ModuleType]
WHISPER_PARTS = (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))


def test_host_cost_of_256_decodes(benchmark_script: Load) -> None:
    """The bound is 1 ms; 2 leave room for a slow, shared core. The figure printed (`pytest -s`) is what to watch."""
    parts = benchmark_script("host_cost").measure(num_seqs=256, context_len=1024, num_steps=120)
    total = parts["before the model"]
    print(f"schedule, dispatch and fill for 256 decodes: median {total['median_us']} us, P99 {total['p99_us']} us")
    assert {"schedule", "load", "apply", "decide", "rows", "write", "append", "update"} < parts.keys()
    assert total["mean_us"] == pytest.approx(
        sum(parts[name]["mean_us"] for name in ("schedule", "load", "apply", "decide", "rows", "write")), abs=1
    )
    assert total["median_us"] < 2000


def test_host_cost_is_measured_on_full_batches(benchmark_script: Load) -> None:
    host = benchmark_script("host_cost").Host(5, 40, 30)
    batches = [host.step({}) for _ in range(8)]
    # One prefill of all, then decodes only; what is filled in is what the scheduler asked for.
    assert [batch.num_decodes for batch in batches] == [0] + [5] * 7
    last = batches[-1]
    assert host.inputs.positions[:5].tolist() == last.context_lens
    assert host.inputs.input_ids[:5].tolist() == [7 + slot for slot in last.slots]
    assert host.inputs.slot_mappings[0][:5].min() >= 0


def test_tape_overhead(benchmark_script: Load, demo_llm: LLM) -> None:
    keys = {(key.graphs, key.num_tokens): key for key in demo_llm.plan.captures.largest_first()}
    script = benchmark_script("tape_overhead")
    for wanted in ((GraphSet.DECODE, 4), (GraphSet.MIXED, 16)):
        result = script.measure(demo_llm, keys[wanted], num_batches=2, num_turns=10, clock=time.perf_counter)
        print(result)
        assert result["ratio"] == pytest.approx(result["replay_us"] / result["eager_us"], rel=0.5)
        # The bound is 1.1; a busy machine gets some more.
        assert result["ratio"] < 1.3
    demo_llm.engine.core.scheduler.reset_prefix_cache()


def test_first_tokens_of_two_engines(benchmark_script: Load, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are new each time, and requests have ended when the next one begins."""
    script = benchmark_script("first_tokens")
    monkeypatch.setattr(script, "RUNS", 2)
    prompts: list[list[int]] = []
    add = demo_llm.session.add
    monkeypatch.setattr(
        demo_llm.session, "add", lambda prompt, params: (prompts.append(prompt), add(prompt, params))[1]
    )
    row = script.measure({"without": demo_llm, "with": demo_llm}, 40)
    assert row["tokens"] == 40 and row["ratio"] == row["with_ms"] / row["without_ms"] > 0
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 6
    assert not demo_llm.session.has_unfinished


def test_encoders_are_timed(
    benchmark_script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a configuration becomes one that all sides read; rows have a rate for each case."""
    transformers = pytest.importorskip("transformers")
    script = benchmark_script("encoders_beside_peers")
    for name, numbers in (("TEXTS", (1, 3)), ("RECORDINGS", (2,)), ("TOKENS", 4), ("SECONDS", 1), ("WARM_UPS", 0)):
        monkeypatch.setattr(script, name, numbers)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    transformers.BertConfig(**sizes, vocab_size=400, architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    parts = {f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in WHISPER_PARTS}
    whisper = transformers.WhisperConfig(
        **parts, d_model=64, vocab_size=700, decoder_start_token_id=600, pad_token_id=599, bos_token_id=599,
        eos_token_id=599, suppress_tokens=[], begin_suppress_tokens=[],
        architectures=["WhisperForConditionalGeneration"],
    )  # fmt: skip
    whisper.save_pretrained(tmp_path / "whisper")
    for name in ("bert", "whisper"):
        folder = script.make_folder(tmp_path / name, tmp_path / "made" / name)
        assert script.child("ours", folder, tmp_path / "rows", {"dtype": "float32", "device": "cpu"}) == 0
    processor = transformers.WhisperProcessor.from_pretrained(tmp_path / "made" / "whisper")
    assert processor.tokenizer(script.PROMPT, add_special_tokens=False).input_ids == [600, 601]
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["1 texts", "3 texts", "steps", "2 recordings", "steps"]
    assert all(row["rate"] > 0 for row in rows if row["case"] != "steps")
    script.show([*rows, {"model": "bert", "side": "vllm", "case": "3 texts", "rate": rows[1]["rate"] / 2}])
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines() if "bert, 3 texts" in line] == ["2.00"]


def test_sets_of_products_are_read_and_chosen(benchmark_script: Load) -> None:
    pytest.importorskip("triton")
    from phonograph.kernels.triton.gemm.bound_product import BoundProduct
    from phonograph.kernels.triton.gemm.product_plan import GemmSmallMConfig, ProductShape, WeightFormat
    from phonograph.kernels.triton.gemm.run_product import GemmScratch

    script, sweep = benchmark_script("products_in_engines"), benchmark_script("sweep_products")
    dense = sweep.Weights(WeightFormat("bfloat16"), sweep.this_gpu())
    wide = GemmSmallMConfig(8, 16, 256, 3, 1, 8, 1, 2, True)
    named = {"product 4096 1024": f"GemmSmallMConfig{tuple(wide)}", "silu 3072 1024": "None"}

    def chosen() -> list[object]:
        return [dense.chosen(ProductShape(4096, 1024), 8), dense.chosen(ProductShape(3072, 1024, gated=True), 8)]

    before = chosen()
    products, settings = script.read_set("wide", named | {"setting enable_prefix_caching": "False"})
    assert settings == {"enable_prefix_caching": False}
    shape, matrix, scratch = ProductShape(4096, 1024), torch.empty(4096, 1024), GemmScratch.make(torch.device("cpu"))
    bound = BoundProduct(matrix, None, shape, dense.format, device=dense.device, scratch=scratch)
    kept = bound.plan(8)
    with script.applied(products, 8, dense):
        assert chosen() == [wide, None] and bound.plan(8).kernel == wide != kept.kernel
    assert chosen() == before != [wide, None] and bound.plan(8) == kept
    for what, text in (
        ("product 4096", "None"),
        ("product 1 2", "FewRows(1)"),
        ("silu 1 2", "GemmRingConfig(1, x)"),
        ("setting a", "x"),
    ):
        with pytest.raises(SystemExit, match="set odd: "):
            script.read_set("odd", {what: text})


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
@pytest.mark.parametrize("kind", ["dense", "int4", "fp8", "fp8 blocks"])
def test_swept_products_can_be_chosen(kind: str, rows: int, benchmark_script: Load) -> None:
    """A sweep tries the kernel that is chosen now, and each of the others is chosen while it is tried."""
    pytest.importorskip("triton")
    from phonograph.kernels.triton.gemm.product_plan import GemmDevice, GemvConfig, ProductShape, WeightFormat

    script = benchmark_script("sweep_products")
    formats = {
        "dense": WeightFormat("bfloat16"),
        "int4": WeightFormat("bfloat16", bits=4, group=128, interleaved=True),
        "fp8": WeightFormat("bfloat16", bits=8, group=1 << 20, is_fp8=True),
        "fp8 blocks": WeightFormat("bfloat16", bits=8, group=128, is_fp8=True),
    }
    weights = script.Weights(formats[kind], GemmDevice((9, 0), 227 << 10, has_gluon=True))
    for shape in (ProductShape(4608, 3584), ProductShape(18944, 3584, gated=True)):
        now, configs = weights.chosen(shape, rows), []
        if kind != "dense":
            configs = script.in_groups(rows, shape, weights, most=3)
        elif rows > 16:
            configs = script.through_shared_memory(rows, shape, weights.device)
        elif rows == 1:
            configs = script.of_one_row(shape)
        else:
            configs = script.through_registers(rows, shape, now, most=3)
        assert len(configs) > 3
        if kind != "dense":
            assert configs[0] == now
        for config in configs:
            with script.applied({shape: config}, rows, weights):
                assert weights.chosen(shape, rows) == config
        assert weights.chosen(shape, rows) == now
        assert isinstance(now, GemvConfig) == (kind == "dense" and rows == 1)


def test_cpu_comparison_is_of_the_same_work(benchmark_script: Load, demo_llm: LLM) -> None:
    script = benchmark_script("cpu_vs_transformers")
    others = script.Transformers(2)
    systems = {"ours": script.ours(demo_llm), "generate": others.generate, "batching": others.continuous_batching}
    # Three at once in batches of two: as many tokens for all, then each to its own end.
    prompts = iter([[40, 41, 42, 43, 44, 45], [50, 51], [60, 61, 62, 63]] * 3)
    result = script.compare(systems, lambda: [next(prompts) for _ in range(3)], num_tokens=9, num_rounds=2)
    assert result["answers_equal_to_ours"] == dict.fromkeys(systems, "9 of 9")
    assert all(len(speeds) == 2 and min(speeds) > 0 for speeds in result["rounds"].values())
    assert result["speedup_over"]["ours"] == 1.0
    questions = ("Tom has 12 apples and buys 7 more. How many apples does Tom have?", "Hello!", "What can you do?")
    chats = [demo_llm.encode_chat([{"role": "user", "content": question}]) for question in questions]
    result = script.compare(systems, lambda: chats, num_tokens=None, num_rounds=1)
    assert result["answers_equal_to_ours"] == dict.fromkeys(systems, "6 of 6")


def test_prompt_lookup(benchmark_script: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    script = benchmark_script("prompt_lookup")
    monkeypatch.setattr(script, "workloads", lambda length: {"edit": ["7*8=56, 7*8=", "Repeat: 1 2 3 1 2 3"]})
    monkeypatch.setattr(script, "BOUNDS", ((2, 3),))
    shape = {"num_tokens": 30, "rounds": 2, "length": 0, "temperature": 0.0}
    alone, together = script.measure("demo", drafts=3, bounds=(2, 3), **shape)
    assert (alone["requests"], together["requests"]) == (1, 2)
    for result in (alone, together):
        assert list(result["engines"]) == ["without", "all drafts", "adaptive"]
        without, fixed, adaptive = result["engines"].values()
        assert without["drafts"] == 0 and without["ratios"] == without["by_the_clock"] == [1.0, 1.0]
        assert fixed["drafts"] >= adaptive["drafts"] and fixed["accepted"] == sum(fixed["accepted_by_position"]) > 0
        assert fixed["answers_as_without"] == 2
    # Replayed from the tokens alone: those of 2 rounds of 2 requests, without the first of each.
    (lookup,) = alone["lookups"]
    fixed = alone["engines"]["all drafts"]
    assert lookup["tokens_a_step_earliest"] == pytest.approx(4 * 29 / (4 * 29 - fixed["accepted"]), rel=0.05)


def test_replayed_lookups(benchmark_script: Load) -> None:
    """The earliest of equal matches is followed by 7, the latest by 8."""
    replay = benchmark_script("prompt_lookup").replay
    sequence = [1, 2, 7, 1, 2, 8, 1, 2, 8, 9]
    assert replay([(sequence, 7)], 2, (2, 2), latest=True) == 2.0
    assert replay([(sequence, 7)], 2, (2, 2), latest=False) == 1.0
    assert replay([([5] * 12, 3)], 4, (1, 3), latest=False) == 8 / 3
    assert replay([([*range(9)], 3)], 4, (1, 3), latest=False) == 1.0


def test_quality_of_quantized_formats(benchmark_script: Load) -> None:
    result = benchmark_script("quantized_quality").measure("int8 channel", num_problems=4)
    assert result["ok"] and result["simulated_score"] > 0.5 and result["answers_that_differ"] == 0


def test_quantized_products_are_compared_with_their_numbers(benchmark_script: Load) -> None:
    """A right operator has a run; one that is wrong, or fails, has the reason, and the others stay."""
    pytest.importorskip("triton")
    import torch

    script = benchmark_script("products_beside_vllm")
    generator = torch.Generator().manual_seed(0)
    # Triton's interpreter multiplies float16 only.
    int4 = script.int4_weight(32, 256, generator)
    int4 = int4._replace(scales_OG=int4.scales_OG.half())
    for bits, weight in ((4, int4), (8, script.fp8_weight(32, 256, generator))):
        x_MK = torch.randn(3, 256, generator=generator).half()
        expected_MN = script.reference(x_MK, weight, step=24)
        assert expected_MN.shape == (3, 32) and expected_MN.dtype == torch.float64

        def broken(x_MK: torch.Tensor) -> Callable[[int], torch.Tensor]:
            raise RuntimeError(f"no room for {len(x_MK)} rows\nand more")

        operators = {
            script.OURS: script.ours(weight, copies=2),
            "not a number": lambda x_MK: lambda _: x_MK @ torch.full((256, 32), torch.nan, dtype=x_MK.dtype),
            "broken": broken,
        }
        cell = script.Cell(bits, x_MK, expected_MN)
        runs = cell.runs(operators)
        assert runs.keys() == {script.OURS} and cell.failed.keys() == {"not a number", "broken"}
        assert cell.failed["broken"] == "RuntimeError: no room for 3 rows"
        assert "wrong result" in cell.failed["not a number"] and cell.errors["not a number"] is None
        assert 1e-4 < cell.errors[script.OURS] < 5e-3
        first = runs[script.OURS](0).clone()
        assert torch.equal(runs[script.OURS](1), first), "both copies have the same weights"


def test_quantized_products_as_table_and_chart(benchmark_script: Load) -> None:
    pytest.importorskip("triton")
    row = {"model": "m, FP8", "product": "qkv", "outputs": 32, "inputs": 64, "floor_us": 2.0}
    rows = [
        row | {"rows": 1, "us": {"a": 3.0, "b": 2.5}, "failed": {}},
        row | {"rows": 2, "us": {"a": 4.0}, "failed": {"b": "ArithmeticError: wrong result: 1", "c": "KeyError: d"}},
    ]
    lines = benchmark_script("products_beside_vllm").table({"rows": rows}).splitlines()
    assert lines[0] == "| m, FP8, us |  | 1 | 2 |"
    assert lines[2:] == [
        "| qkv 32x64 | a | 3.0 | 4.0 |",
        "| qkv 32x64 | b | 2.5 | wrong |",
        "| qkv 32x64 | c |  | failed |",
    ]
    script = benchmark_script("plot_results")
    chart = script.products_chart({"rows": rows})
    assert chart.get_title(loc="left") == "m, qkv 32x64"
    values = {tuple(line.get_ydata()) for line in chart.lines[1:]}
    assert values == {(1.5, 2.0), (1.25,)}, "multiples of the floor"
    assert script.products_chart({"rows": []}) is None
