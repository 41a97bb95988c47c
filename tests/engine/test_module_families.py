"""Models that modules of transformers run, with our attention: logits, tokens, modes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from module_families import MODULE_FAMILIES, make_module_checkpoint
from transformers.models.olmo.modeling_olmo import OlmoMLP

from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.plan import make_plan
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import CaptureError, ConfigError, ModelError, UnsupportedModelError, WeightError
from phonograph.graphs.modes import GraphMode
from phonograph.models.modules import module_experts
from phonograph.models.spec import read_model_spec

LIMITS: dict[str, Any] = {
    **{"max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 8, "num_kv_blocks": 96},
    "cudagraph_capture_sizes": [1, 3, 24],
}
OUTPUT_TOKENS = 8


def prompts() -> list[list[int]]:
    """Return prompts of which the longest are cut into chunks, and two share a prefix."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, VOCAB_SIZE, (17,), generator=generator).tolist()
    tails = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 9, 31)]
    return [shared + tails[0], tails[1], shared + tails[2]]


def check(llm: LLM, reference: torch.nn.Module, limit: float = 1e-4) -> None:
    """Compare tokens and all log-probabilities with those of transformers' own attention."""
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=VOCAB_SIZE)
    for prompt, output in zip(prompts(), llm.generate(prompts(), greedy), strict=True):
        completion = output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0].double()[len(prompt) - 1 : -1]
        assert completion.token_ids == logits.argmax(-1).tolist()
        assert completion.logprobs is not None
        for row, expected_V in zip(completion.logprobs, logits.log_softmax(-1), strict=True):
            got_V = torch.full((VOCAB_SIZE,), torch.nan, dtype=torch.float64)
            got_V[row.token_ids] = torch.tensor(row.logprobs, dtype=torch.float64)
            assert (got_V - expected_V).abs().max() <= limit


@pytest.mark.parametrize("family", MODULE_FAMILIES)
def test_families_in_full_graphs(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_module_checkpoint(family, tmp_path)
    # Without transformers' products of experts only ours are left.
    monkeypatch.setattr(module_experts, "grouped_mm_experts_forward", None)
    llm = LLM(model=str(tmp_path), **LIMITS)
    assert "the slower module of transformers" in caplog.text
    check(llm, reference)
    assert llm.plan.resolution.mode is GraphMode.FULL
    assert {"full decode", "full mixed"} == set(llm.step_counts)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("cohere2", {"cudagraph_mode": "PIECEWISE"}),
        ("deepseek_v2", {"cudagraph_mode": "FULL_AND_PIECEWISE"}),
        ("exaone4", {"enforce_eager": True}),
        ("glm4_moe_lite", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    ],
)
def test_other_modes_and_drafts(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    reference = make_module_checkpoint(family, tmp_path)
    check(LLM(model=str(tmp_path), **LIMITS, **settings), reference)


@pytest.mark.parametrize("family", ["llama3", "gemma2", "gpt_oss"])
def test_our_families_by_their_modules(family: str, tmp_path: Path) -> None:
    """Windows, softcaps, sinks and experts are as in the files of these families."""
    reference = make_checkpoint(family, tmp_path)
    by_module = LLM(model=str(tmp_path), model_impl="transformers", **LIMITS)
    check(by_module, reference)
    ours = LLM(model=str(tmp_path), **LIMITS)
    for index, layer in ours.plan.model.attentions.items():
        other = by_module.plan.model.attentions[index]
        for name in ("num_query_heads", "num_kv_heads", "head_size", "window", "scale", "softcap", "sinks"):
            assert getattr(layer, name) == getattr(other, name), name
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    tokens = [[one.outputs[0].token_ids for one in llm.generate(prompts(), greedy)] for llm in (ours, by_module)]
    assert tokens[0] == tokens[1]


def _positive_rows(x_TE: torch.Tensor) -> torch.Tensor:
    """Do what a graph cannot hold, without an effect, at planning too: the shape depends on data."""
    return x_TE.index_put((x_TE.sum(-1) > 0).nonzero(as_tuple=True), torch.zeros(()), accumulate=True)


def _host_read(x_TE: torch.Tensor) -> torch.Tensor:
    """Read a number on the host, which the planner's step without weights does not show."""
    return x_TE if x_TE.device.type == "meta" else x_TE * (1.0 if x_TE.sum().item() == 0.5 else 1)


@pytest.mark.parametrize(
    ("operation", "reasons"),
    [
        (
            _positive_rows,
            ["FULL_AND_PIECEWISE -> NONE: support is NEVER .*aten.nonzero_numpy.default depends on tensor"],
        ),
        (_host_read, ["FULL -> PIECEWISE: OlmoForCausalLM of.*item", "PIECEWISE -> NONE: OlmoForCausalLM of.*item"]),
    ],
)
def test_a_module_that_a_graph_cannot_hold_runs_eagerly(
    operation: Callable[[torch.Tensor], torch.Tensor],
    reasons: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = make_module_checkpoint("olmo", tmp_path)
    plain = OlmoMLP.forward

    def forward(self: OlmoMLP, x: torch.Tensor) -> torch.Tensor:
        return plain(self, operation(x))

    monkeypatch.setattr(OlmoMLP, "forward", forward)
    llm = LLM(model=str(tmp_path), **LIMITS)
    check(llm, reference)
    assert set(llm.step_counts) == {"eager"}
    for got, expected in zip(llm.plan.resolution.reasons[1:], reasons, strict=True):
        assert re.match(expected, str(got))
    with pytest.raises((ConfigError, CaptureError), match="nonzero|item"):
        LLM(model=str(tmp_path), cudagraph_mode="PIECEWISE", **LIMITS)


def test_a_module_whose_attention_a_graph_cannot_hold_runs_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_module_checkpoint("olmo", tmp_path)
    plain = ReferenceBackend.forward

    def forward(self: ReferenceBackend, q_THD: torch.Tensor, call: Any, out_THD: torch.Tensor) -> None:
        plain(self, _host_read(q_THD), call, out_THD)

    monkeypatch.setattr(ReferenceBackend, "forward", forward)
    llm = LLM(model=str(tmp_path), **LIMITS)
    check(llm, reference)
    assert {"piecewise"} == set(llm.step_counts)
    (_, reason) = llm.plan.resolution.reasons
    assert "FULL -> PIECEWISE" in str(reason) and f"graphs {reason}" in llm.plan.notes
    assert llm.verify(num_replays=1).ok


def test_prompt_logits_and_verify(tmp_path: Path) -> None:
    reference = make_module_checkpoint("cohere", tmp_path)
    llm = LLM(model=str(tmp_path), **LIMITS)
    (prompt, *_) = prompts()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE))
    expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for row, expected_V in zip(output.prompt_logprobs[1:], expected, strict=False):
        assert (torch.tensor(row.logprobs) - expected_V[row.token_ids]).abs().max() <= 1e-4
    assert llm.verify(num_replays=1).ok


def test_dummy_weights_and_weights_of_16_bits(tmp_path: Path) -> None:
    make_module_checkpoint("helium", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    outputs = [
        LLM(model=str(tmp_path), load_format="dummy", dtype="bfloat16", seed=seed, **LIMITS).generate([[5]], greedy)
        for seed in (1, 1, 2)
    ]
    first, again, other = (output[0].outputs[0].token_ids for output in outputs)
    assert first == again and first != other


@pytest.mark.parametrize(
    ("settings", "works"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "fp8"}, "quantization"),
        ({"quantize_lm_head": "fp8"}, "quantize_lm_head"),
        ({"convert": "embed"}, "convert"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"expert_load_metrics": True}, "expert_load_metrics"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"speculative_config": {"method": "draft_model", "model": "demo", "num_speculative_tokens": 2}}, "spec"),
    ],
)
def test_refused_settings(settings: dict[str, Any], works: str, tmp_path: Path) -> None:
    make_module_checkpoint("olmo", tmp_path)
    config = EngineConfig(model=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match=f"{works}.*module runs OlmoForCausalLM"):
        make_plan(config, read_configured_model(config, config_only=False), known_device("h200"))


def test_a_module_is_no_draft_model(tmp_path: Path) -> None:
    """Its weights may have names and sizes of a family that runs here."""
    target = read_model_spec("demo")
    make_module_checkpoint("olmo", tmp_path, vocab_size=target.vocab_size)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    config = EngineConfig(model="demo", max_model_len=128, speculative_config=speculation)
    with pytest.raises(ConfigError, match="speculative_config.*is of OlmoForCausalLM; .* needs no module"):
        make_plan(config, target, known_device("h200"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unknown", "auto_map": {"AutoConfig": "x.Y"}}, "code of a checkpoint does not run here"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM keeps a state"),
        ({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}, "FalconH1ForCausalLM keeps a state"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "BloomModel takes no positions"),
        ({"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}, "GPTJForCausalLM cannot be built"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "cannot run.*item"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "transformers has OlmoForCausalLM for model_type='olmo'"),
    ],
)
def test_refused_models(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_module_checkpoint("olmo", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_spec(tmp_path, model_impl="transformers")


def test_a_setting_that_forbids_modules_and_unusable_fields(tmp_path: Path) -> None:
    make_module_checkpoint("olmo", tmp_path)
    with pytest.raises(UnsupportedModelError, match="'OlmoForCausalLM' is not supported; supported are"):
        read_model_spec(tmp_path, model_impl="phonograph")
    with pytest.raises(ConfigError, match="config.json has no field of that name; did you mean num_hidden_layers"):
        read_model_spec(tmp_path, hf_overrides={"num_hiden_layers": 1})
    assert read_model_spec(tmp_path, hf_overrides={"num_hidden_layers": 1}).num_layers == 1
    with pytest.raises(ModelError, match="transformers refuses the configuration"):
        read_model_spec(tmp_path, hf_overrides={"hidden_size": "many"})


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    make_module_checkpoint("olmo", tmp_path)
    for layers, message in ((3, "is in none of the files"), (1, "is not part of this OlmoForCausalLM")):
        with pytest.raises(WeightError, match=message):
            LLM(model=str(tmp_path), hf_overrides={"num_hidden_layers": layers}, **LIMITS)
