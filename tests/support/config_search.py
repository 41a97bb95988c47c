"""Random configurations of tiny models: transformers and this package read the same folder, and their logits agree.

A case is a checkpoint that transformers wrote, whose config.json is then changed: fields of transformers' classes and
others, values in and out of range, rotary parameters in their older and newer spellings. Prompts are longer than most
`max_position_embeddings`, as some rotary types behave by length. Weights of routers are drawn until each choice of
experts is clear, as a rounding would decide the others.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import EXPERT_FAMILIES, load_model, make_checkpoint
from dense import DenseSequences
from router_gaps import LEAST_GAP, router_gaps
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phonograph.errors import PhonographError
from phonograph.models.spec import read_model_spec

TOLERANCE = 1e-3
VOCAB_SIZE = 37
PROMPT_LEN = 80
FAMILIES = (
    *("llama2", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3", "olmo2", "olmo3", "ministral3"),
    *("gemma", "gemma2", "gemma3", "gemma4", "granite4"),
    *(family for family in EXPERT_FAMILIES if family != "gemma4_moe"),  # its fields are those of gemma4
)
BIASES = (
    *("llama2", "qwen3", "granite", "smollm3", "olmo2", "olmo3", "gemma", "gemma2", "gemma3", "gemma4", "granite4"),
    *("qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "granite4_moe", "glm4_moe"),
)
NO_HEAD_SIZE = (
    *("qwen2", "phi3", "granite", "olmo2", "granite4", "qwen2_moe", "mixtral", "olmoe"),
    *("granitemoe", "granitemoeshared", "granite4_moe"),
)
"""Families whose files have no size of heads."""
MOST_DRAWS = 40
TYPED_ROPES = ("olmo3", "gemma3", "gemma4")
ABSENT = object()
ORIGINAL = "original_max_position_embeddings"

Draw = Callable[[random.Random], Any]


def one_of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def layer_types(rng: random.Random) -> Any:
    kinds = ["full_attention", "sliding_attention"]
    odd = rng.random() < 0.2
    return [
        rng.choice([*kinds, "chunked_attention"] if odd else kinds) for _ in range(rng.choice([1, 2]) if odd else 2)
    ]


# Every field of transformers' classes that does not set a shape, and fields that files have beside them.
FIELDS: dict[str, Draw] = {
    "hidden_act": one_of("silu", "swish", "swish", "gelu", "relu", None),
    "rms_norm_eps": one_of(1e-6, 1e-5, 1e-2, 0.3, 1, -1e-3),
    "max_position_embeddings": one_of(16, 32, 64, 512, 0, 64.0),
    "tie_word_embeddings": one_of(True, False, None),
    "initializer_range": one_of(0.02, 0.5),
    "use_cache": one_of(True, False),
    "pad_token_id": one_of(None, 0, 5),
    "bos_token_id": one_of(None, 0, 5),
    "eos_token_id": one_of(None, 0, 5, [3, 4]),
    "pretraining_tp": one_of(1, 2),
    "attention_dropout": one_of(0.0, 0.5),
    "attention_bias": one_of(True, False),
    "mlp_bias": one_of(True, False),
    "head_dim": one_of(None, 0, 8, 16),
    "num_key_value_heads": one_of(None, 1, 2, 4),
    "num_attention_heads": one_of(1, 2, 4, 8),
    "sliding_window": one_of(None, 1, 5, 9, 4096, 0),
    "use_sliding_window": one_of(True, False, None),
    "max_window_layers": one_of(-1, 0, 1, 2, 28),
    "layer_types": layer_types,
    "output_hidden_states": one_of(True, False),
    "output_attentions": one_of(True, False),
    "return_dict": one_of(True, False),
    "dtype": one_of("float32", "bfloat16", "float16", None, "torch.float16", "float64"),
    "torch_dtype": one_of("float32", "bfloat16", "float16", None, "torch.float16"),
    "chunk_size_feed_forward": one_of(0, 2),
    "is_encoder_decoder": one_of(False, True),
    "is_decoder": one_of(False, True),
    "add_cross_attention": one_of(False, True),
    "is_causal": one_of(True, False, None),
    "id2label": one_of(None, {"0": "a", "1": "b"}),
    "label2id": one_of(None, {"a": 0, "b": 1}),
    "problem_type": one_of(None, "regression"),
    "num_labels": one_of(1, 2, 3),
    "transformers_version": one_of("4.31.0", "5.17.0"),
    "temperature": one_of(1.0, 0.3),
    "max_length": one_of(20, 30),
    "attn_implementation": one_of("eager", "sdpa"),
    "quantization_config": one_of(None),
    "auto_map": one_of({"AutoModelForCausalLM": "modeling.Model"}),
    "per_layer_config": one_of({}, None, {"0": {"rms_norm_eps": 0.5}}),
    "attention_chunk_size": one_of(None, 8),
    "num_kv_shared_layers": one_of(None, 0, 1),
    "partial_rotary_factor": one_of(None, 1.0, 0.5),
    "max_sequence_length": one_of(16, 2048),
    "rope_interleaved": one_of(False, True),
    "use_mrope": one_of(False, True),
    "embedding_multiplier": one_of(12.0),
    "logits_scaling": one_of(8.0, None),
    "model_type": one_of("llama", "mistral", "qwen2", "qwen3", "granite", "ministral", None),
    "architectures": one_of(None, [], ["LlamaForCausalLM"], ["MistralForCausalLM"]),
}
GRANITE: dict[str, Draw] = {
    "attention_multiplier": one_of(0.5, 1, 0.1),
    "embedding_multiplier": one_of(3.0, 12),
    "residual_multiplier": one_of(0.3, 2),
    "logits_scaling": one_of(8.0, 0.5, 0),
}
GRANITE4: dict[str, Draw] = {
    **GRANITE,
    "position_embedding_type": one_of("rope", "nope", None),
    "layer_types": one_of(["attention"] * 2, ["attention", "full_attention"], ["attention", "mamba"]),
    "normalization_function": one_of("rmsnorm", None),
    "mamba_conv_bias": one_of(True, False),
    "mamba_chunk_size": one_of(64),
}
EXPERTS: dict[str, Draw] = {
    "num_experts_per_tok": one_of(1, 2, 2, 3, 3, 3, 4, 20, 0),
    "router_aux_loss_coef": one_of(0.01, 0.5),
    "output_router_logits": one_of(True, False, False, False),
}
OWN_FIELDS: dict[str, dict[str, Draw]] = {
    "granite": GRANITE,
    "granite4": GRANITE4,
    "granitemoe": {**GRANITE, **EXPERTS},
    "granitemoeshared": {**GRANITE, **EXPERTS},
    "granite4_moe": {**GRANITE4, **EXPERTS},
    "qwen2_moe": {**EXPERTS, "norm_topk_prob": one_of(True, False), "qkv_bias": one_of(True, True, True, False)},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": one_of(True, False), "shared_expert_intermediate_size": one_of(8)},
    "mixtral": {**EXPERTS, "router_jitter_noise": one_of(0.0, 0.5)},
    "olmoe": {**EXPERTS, "norm_topk_prob": one_of(True, False), "clip_qkv": one_of(None, None, 0.5)},
    "glm4_moe": {
        **EXPERTS,
        "norm_topk_prob": one_of(True, False),
        "n_group": one_of(1, 2, 3, 4, 5),
        "topk_group": one_of(1, 2, 3),
        "routed_scaling_factor": one_of(1.0, 2.5, 0.5),
        "num_nextn_predict_layers": one_of(0, 1),
        "use_qk_norm": one_of(True, True, True, False),
    },
    "smollm3": {
        "no_rope_layers": one_of([1, 0], [0, 0], [1], [0, 1, 1], None),
        "no_rope_layer_interval": one_of(1, 2, 3, 0),
    },
    "phi3": {"partial_rotary_factor": one_of(0.5, 0.25, 1.0, 0), ORIGINAL: one_of(16, 4096)},
    "gemma": {"hidden_activation": one_of("gelu_pytorch_tanh", None)},
    "gemma2": {
        "query_pre_attn_scalar": one_of(4, 24),
        "attn_logit_softcapping": one_of(None, 3.0, 0.5),
        "final_logit_softcapping": one_of(None, 2.0),
        "hidden_activation": one_of("gelu_pytorch_tanh", "gelu"),
    },
    "gemma3": {
        "query_pre_attn_scalar": one_of(4, 24),
        "final_logit_softcapping": one_of(None, 2.0),
        "attn_logit_softcapping": one_of(None, 2.0),
        "sliding_window_pattern": one_of(1, 2, 6),
        "rope_local_base_freq": one_of(30.0, 1e4),
        "use_bidirectional_attention": one_of(False, None, True),
    },
    "gemma4": {
        "final_logit_softcapping": one_of(None, 2.0),
        "use_bidirectional_attention": one_of(None, None, "vision", "vision", "vision", "all"),
        "hidden_activation": one_of(*["gelu_pytorch_tanh"] * 4, "gelu"),
    },
}
"""Fields of single families."""
ROPE_KEYS: dict[str, dict[str, Draw]] = {
    "default": {},
    "linear": {"factor": one_of(1.0, 2.0, 4, 0.5)},
    "dynamic": {"factor": one_of(2.0)},
    "llama3": {
        "factor": one_of(2.0, 8.0),
        "low_freq_factor": one_of(1.0, 1),
        "high_freq_factor": one_of(4.0, 2),
        ORIGINAL: one_of(ABSENT, 8, 16, 32, 64),
    },
    "yarn": {
        "factor": one_of(1.0, 2.0, 4.0, 4, None),
        ORIGINAL: one_of(ABSENT, 8, 16, 32, 64),
        "attention_factor": one_of(ABSENT, ABSENT, None, 0.7, 1),
        "beta_fast": one_of(ABSENT, ABSENT, 16, 2.5, None),
        "beta_slow": one_of(ABSENT, ABSENT, 2, None),
        "mscale": one_of(ABSENT, ABSENT, 0.7, 1.0),
        "mscale_all_dim": one_of(ABSENT, ABSENT, 1.3),
        "truncate": one_of(ABSENT, ABSENT, False, True),
    },
    "longrope": {
        "short_factor": lambda rng: [1.0] * 64,
        "long_factor": lambda rng: [rng.uniform(1, 4) for _ in range(64)],
        ORIGINAL: one_of(16),
    },
}
ODD_ROPE: dict[str, Draw] = {
    "factor": one_of(0, -2.0, None, "4", True),
    "rope_type": one_of(None, "su", "proportional", 3),
    "partial_rotary_factor": one_of(0.5, 1.0, None),
    "finetuned": one_of(True),
    "mrope_section": one_of([1, 1, 2]),
    "low_freq_factor": one_of(0, 1.0),
    ORIGINAL: one_of(0, 16, None),
    "rope_theta": one_of(0, -1, 1, None, "10000"),
    "truncate": one_of(None, False),
    "full_attention": one_of({"rope_type": "default", "rope_theta": 500.0}),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint that transformers makes, and changes to it.

    changes: of config.json, where ABSENT takes a field out
    head:    None, or the head beside tied embeddings: "equal", "different", or "alone" without them
    """

    family: str
    shape: dict[str, Any]
    changes: dict[str, Any]
    head: str | None


def draw_case(seed: int) -> Case:
    """Draw a case; about half of all cases are ones that both can run."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    heads = rng.choice([2, 4])
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": rng.choice([16, 24]),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "max_position_embeddings": rng.choice([16, 32, 64, 512]),
        "tie_word_embeddings": rng.random() < 0.3,
        "pad_token_id": None,
    }
    if family not in NO_HEAD_SIZE or rng.random() < 0.2:
        shape["head_dim"] = rng.choice([8, 16])
    if family in BIASES:
        shape["attention_bias"] = rng.random() < 0.3
    if family in ("llama2", "granite", "smollm3"):
        shape["mlp_bias"] = rng.random() < 0.3
    if family in ("mistral", "phi3", "ministral3", "mixtral"):
        shape["sliding_window"] = rng.choice([None, 7])
    if family in ("olmo3", "gemma2", "gemma3"):
        shape |= {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    if family == "gemma4":
        shape |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        shape |= {"sliding_window": 7, "num_kv_shared_layers": rng.choice([0, 0, 1, 2])}
        shape |= {"num_global_key_value_heads": rng.choice([None, 1]), "use_double_wide_mlp": rng.random() < 0.5}
        shape |= {"global_head_dim": rng.choice([8, 16]), "hidden_size_per_layer_input": rng.choice([0, 6])}
        shape |= {"attention_k_eq_v": rng.random() < 0.5, "vocab_size_per_layer_input": VOCAB_SIZE}
    if family == "gemma2":
        shape |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    if family == "smollm3" and rng.random() < 0.5:
        shape |= {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [0, 1]}
    if family == "qwen2_moe":
        shape |= {"decoder_sparse_step": rng.choice([1, 2]), "mlp_only_layers": rng.choice([[], [0]])}
    if family in ("qwen2", "qwen3") and rng.random() < 0.5:
        shape |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": rng.choice([0, 1, 2])}
    changes = _draw_rope(rng, shape.get("head_dim", 32 // heads) // 2, family)
    if shape.get("sliding_window") and family not in ("phi3", "ministral3", "mixtral", "gemma4") and rng.random() < 0.5:
        own = family in ("olmo3", "gemma2", "gemma3", "smollm3") and rng.random() < 0.5
        changes["layer_types"] = ABSENT if own else rng.sample(["full_attention", "sliding_attention"], 2)
    for name in rng.sample(sorted(FIELDS), rng.choice([0, 0, 0, 1, 1, 2, 4])):
        changes[name] = FIELDS[name](rng)
    fields = OWN_FIELDS.get(family, {})
    for name in rng.sample(sorted(fields), rng.randrange(len(fields) + 1)):
        changes[name] = fields[name](rng)
    head = rng.choice([None, "equal", "different", "alone"]) if shape["tie_word_embeddings"] else None
    return Case(family, shape, changes, head)


def _draw_gemma4_ropes(rng: random.Random) -> dict[str, Any]:
    """Draw the ropes of both types of layers; now and then one is missing, or of a type without parameters."""
    full: dict[str, Any] = {"rope_type": rng.choice(["proportional", "proportional", "default"])}
    if full["rope_type"] == "proportional":
        keys = {"partial_rotary_factor": one_of(ABSENT, 0.25, 0.5, 1.0, 0.01), "factor": one_of(ABSENT, ABSENT, 2.0)}
        full |= {name: draw(rng) for name, draw in keys.items()}
    full["rope_theta"] = rng.choice([500.0, 1e6, 1e6, ABSENT])
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    if rng.random() < 0.1:
        del ropes[rng.choice(sorted(ropes))]
    found = {kind: {name: value for name, value in rope.items() if value is not ABSENT} for kind, rope in ropes.items()}
    return {} if rng.random() < 0.2 else {"rope_parameters": found}


def _draw_rope(rng: random.Random, num_pairs: int, family: str) -> dict[str, Any]:
    if family == "gemma4":
        return _draw_gemma4_ropes(rng)
    kinds = ["default", "longrope"] if family == "phi3" else ["default", "linear", "llama3", "yarn", "yarn"]
    kind = rng.choice([*kinds, *ROPE_KEYS] if rng.random() < 0.8 else kinds)
    rope = {"rope_type": kind, **{name: draw(rng) for name, draw in ROPE_KEYS[kind].items()}}
    rope = {name: value[:num_pairs] if isinstance(value, list) else value for name, value in rope.items()}
    if rng.random() < 0.3:
        rope["type"] = rope.pop("rope_type")
    changes: dict[str, Any] = {"rope_theta": rng.choice([ABSENT, 500, 10000.0, 1e6])}
    if rng.random() < 0.1:
        name = rng.choice(sorted(ODD_ROPE))
        rope[name] = ODD_ROPE[name](rng)
    if rng.random() < 0.4:
        rope.setdefault("rope_theta", rng.choice([100.0, 5e5]))
    if rng.random() < 0.05:
        changes["rope_theta"] = rng.choice([0, -1, 1, None, "10000"])
    if rng.random() < 0.3:
        changes[ORIGINAL] = rng.choice([8, 16, 24])
    if family == "ministral3":
        rope |= {"llama_4_scaling_beta": rng.choice([0.2, 0.2, 0, ABSENT]), ORIGINAL: rng.choice([8, 16, 16, ABSENT])}
    rope = {name: value for name, value in rope.items() if value is not ABSENT}
    spelling = rng.choice(["rope_scaling", "rope_scaling", "rope_parameters", "both", "none"])
    if spelling in ("rope_scaling", "both"):
        changes["rope_scaling"] = rope
    changes["rope_parameters"] = {"rope_parameters": rope, "both": {"rope_theta": 777.0}}.get(spelling, ABSENT)
    if family in TYPED_ROPES and spelling in ("rope_parameters", "none") and rng.random() < 0.8:
        changes["rope_parameters"] = {"full_attention": rope, "sliding_attention": rng.choice([None, {}, rope])}
    if family == "olmo3" and rng.random() < 0.8:
        changes["rope_theta"] = ABSENT
    return changes


def check_case(case: Case, folder: Path, seed: int) -> str:
    """Compare both readers of a case.

    Returns "equal", "refused FIELD" with the field that the message names, "unusable" where transformers fails or gives
    no finite logits and so do we, or "alone" where only transformers fails.

    Raises:
        AssertionError: the logits differ, a refusal names no field of the case, or transformers' logits are not finite
            and the case is not refused.
    """
    path = folder / "config.json"
    prompt = torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=torch.Generator().manual_seed(seed)).tolist()
    for draw in range(MOST_DRAWS):
        make_checkpoint(case.family, folder, seed=seed + 10_000 * draw, **case.shape)
        config = {**json.loads(path.read_text()), **case.changes}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not ABSENT}))
        if case.head is not None:
            _write_head(folder / "model.safetensors", case.head)
        expected, gap = _transformers_logits(folder, prompt, case.family)
        if expected is None or gap > LEAST_GAP or not expected.isfinite().all():
            break
    else:
        raise AssertionError(f"no weights of {MOST_DRAWS} draws have routers that choose clearly")
    try:
        spec = read_model_spec(folder)
        decoder = load_model(
            spec, folder, dtype=torch.float32, device=torch.device("cpu"), max_positions=max(PROMPT_LEN, 128)
        )
    except PhonographError as error:
        if expected is None:
            return "unusable"
        return f"refused {refused_field(error, path, case.changes)}"
    sequences = DenseSequences(decoder)
    (actual,) = sequences.step([(sequences.add(), prompt)])
    if expected is None:
        return "alone"
    assert expected.isfinite().all(), "transformers' logits are not finite, and the case was not refused"
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE, f"logits differ by {difference:.3g}"
    return "equal"


def refused_field(error: PhonographError, path: Path, changes: dict[str, Any]) -> str:
    """Return the changed field that a refusal of config.json names.

    Raises:
        AssertionError: it names none.
    """
    text = str(error).removeprefix(f"{path}: ")
    # Rotary keys may be named alone: "factor=0 in rope_scaling ...".
    rope = changes.get("rope_scaling") or changes.get("rope_parameters")
    ropes = [rope, *rope.values()] if isinstance(rope, dict) else []
    names = [*changes, *(key for one in ropes if isinstance(one, dict) for key in one)]
    named = [name for name in names if re.search(rf"\b{name}=|^{name.removesuffix('s')} ", text)]
    assert named, f"refused without the name of a changed field: {error}"
    return named[0]


def run_case(seed: int) -> str:
    """Draw a case, and check it in a folder of its own."""
    case = draw_case(seed)
    with tempfile.TemporaryDirectory() as name:
        try:
            return check_case(case, Path(name), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}: {error!r}") from error


def _write_head(file: Path, head: str) -> None:
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0).contiguous() if head == "different" else embedding.clone()
    if head == "alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})


def _transformers_logits(folder: Path, prompt: list[int], family: str) -> tuple[torch.Tensor | None, float]:
    """Return logits [tokens, V] of the model that transformers makes of a folder, None where it fails, and the least
    gap of its routers.
    """
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    # Other implementations leave the cap of scores out.
    settings = {"attn_implementation": "eager"} if family == "gemma2" else {}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **settings
        )
        if any(report.values()):
            return None, torch.inf
        with torch.no_grad(), router_gaps(model) as gap:
            output = model(torch.tensor([prompt]))
        return (output.logits if hasattr(output, "logits") else output[0])[0], gap()
    except Exception:
        return None, torch.inf
