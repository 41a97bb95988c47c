"""Random configurations of tiny encoders: transformers and this package read the same folder, and their rows agree.

As `config_search.py`, which has what both share.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from config_search import ABSENT, TOLERANCE, Draw, one_of, refused_field
from encoder_checkpoints import POSITIONS, make_encoder, random_prompts
from transformers import AutoModel

from phonograph import LLM
from phonograph.errors import ModelError, WeightError

ENCODER_FAMILIES = ("bert", "roberta", "xlm_roberta", "distilbert", "modernbert", "nomic", "embedding_gemma")
_FIELDS: dict[str, Draw] = {
    "hidden_dropout_prob": one_of(0.0, 0.5),
    "attention_probs_dropout_prob": one_of(0.0, 0.5),
    "classifier_dropout": one_of(None, 0.5),
    "initializer_range": one_of(0.02, 0.5),
    "max_position_embeddings": one_of(POSITIONS, 40, 0),
    "vocab_size": one_of(101, 99),
    "num_hidden_layers": one_of(1, 2, 0),
    "num_attention_heads": one_of(1, 2, 4, 6, 5),
    "num_key_value_heads": one_of(None, 1),
    "pad_token_id": one_of(None, 0, 1, 5),
    "tie_word_embeddings": one_of(True, False, None),
    "position_embedding_type": one_of("absolute", "absolute", "relative_key", "relative_key_query"),
    "is_decoder": one_of(False, True),
    "add_cross_attention": one_of(False, True),
    "is_encoder_decoder": one_of(False, True),
    "is_causal": one_of(True, False),
    "use_cache": one_of(True, False),
    "chunk_size_feed_forward": one_of(0, 2),
    "id2label": one_of(None, {"0": "a", "1": "b"}),
    "problem_type": one_of(None, "regression"),
    "dtype": one_of("float32", "bfloat16", None, "float64"),
    "transformers_version": one_of("4.8.2", "5.17.0"),
    "gradient_checkpointing": one_of(False),
    "architectures": one_of(None, [], ["MPNetModel"]),
    "model_type": one_of("bert", "roberta", "mpnet", None),
    "quantization_config": one_of(None),
    "rope_theta": one_of(500.0, None),
}
_ACTIVATIONS = one_of("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "gelu_fast", None)
_EPS = one_of(1e-12, 1e-5, 0.3, 1, -1e-3)
_BERT: dict[str, Draw] = {"hidden_act": _ACTIVATIONS, "layer_norm_eps": _EPS, "type_vocab_size": one_of(1, 2, 3)}
_OWN_FIELDS: dict[str, dict[str, Draw]] = {
    **dict.fromkeys(("bert", "roberta", "xlm_roberta"), _BERT),
    "distilbert": {"activation": _ACTIVATIONS, "sinusoidal_pos_embds": one_of(True, False), "n_heads": one_of(2, 6)},
    "modernbert": {
        "hidden_activation": _ACTIVATIONS,
        "norm_eps": _EPS,
        "norm_bias": one_of(False, False, True),
        "attention_bias": one_of(False, False, True),
        "mlp_bias": one_of(False, False, True),
        "local_attention": one_of(2, 5, 10, 12, 128),
        "global_attn_every_n_layers": one_of(1, 2, 3, 4),
        "layer_types": one_of(
            ["full_attention", "sliding_attention"] * 2, ["sliding_attention"] * 4, ["full_attention"]
        ),
        "global_rope_theta": one_of(500.0, 160000.0),
        "local_rope_theta": one_of(None, 300.0),
        "rope_parameters": one_of(
            ABSENT,
            {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in (("full_attention", 700.0), ("sliding_attention", 90.0))
            },
        ),
        "classifier_pooling": one_of("cls", "mean", "max"),
        "reference_compile": one_of(None, True),
    },
    "nomic": {
        **_BERT,
        "rope_parameters": one_of({"rope_type": "default", "rope_theta": 90.0}, {"rope_type": "linear", "factor": 2.0}),
        "head_dim": one_of(None, 16, 8),
        "qkv_proj_bias": one_of(False, True),
    },
    "embedding_gemma": {
        "hidden_activation": one_of("gelu_pytorch_tanh", "gelu"),
        "rms_norm_eps": one_of(1e-6, 0.3, 1),
        "use_bidirectional_attention": one_of(True),
        "sliding_window": one_of(2, 5, 10, 200),
        "query_pre_attn_scalar": one_of(4, 24),
        "num_key_value_heads": one_of(None, 1, 3),
        "attn_logit_softcapping": one_of(None, 2.0),
    },
}
"""Fields of single families."""


def run_encoder_case(seed: int) -> str:
    """Draw an encoder, and compare both readers; see `check_case` for the results.

    Raises:
        AssertionError: rows differ, or a refusal names no field that was changed.
    """
    rng = random.Random(seed)
    family = rng.choice(ENCODER_FAMILIES)
    changes: dict[str, Any] = {}
    for fields, count in ((_FIELDS, rng.choice([0, 0, 1, 2])), (_OWN_FIELDS[family], rng.choice([0, 1, 1, 2, 3]))):
        for name in rng.sample(sorted(fields), min(count, len(fields))):
            changes[name] = fields[name](rng)
    with tempfile.TemporaryDirectory() as name:
        try:
            return _check(family, changes, Path(name), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {family} with {changes}: {error!r}") from error


def _check(family: str, changes: dict[str, Any], folder: Path, seed: int) -> str:
    make_encoder(family, folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ABSENT}))
    prompts = random_prompts(33, 2, seed=seed)
    expected = [_transformers_rows(folder, prompt) for prompt in prompts]
    try:
        with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=80, enforce_eager=True, dtype="float32") as llm:
            outputs = llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
    except (ModelError, WeightError) as error:
        # Messages about the activation have its name in most families.
        named = changes | ({"hidden_act": None} if {"activation", "hidden_activation"} & changes.keys() else {})
        return "unusable" if expected[0] is None else f"refused {refused_field(error, path, named)}"
    for output, rows_TE in zip(outputs, expected, strict=True):
        if rows_TE is None:
            return "alone"
        unit_TE = torch.nn.functional.normalize(rows_TE, dim=-1)
        found_TE = torch.from_numpy(output.outputs.data)
        assert found_TE.shape == unit_TE.shape, "the rows have another shape"
        difference = min(float((found_TE - one_TE).abs().max()) for one_TE in (rows_TE, unit_TE))
        assert difference <= TOLERANCE, f"rows differ by {difference:.3g}"
    return "equal"


def _transformers_rows(folder: Path, prompt: list[int]) -> torch.Tensor | None:
    """Return the rows [T, E] of the model that transformers makes of a folder, None where it fails."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        # Other implementations leave the cap of scores out.
        model, report = AutoModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        if any(report.values()):
            return None
        with torch.inference_mode():
            rows_TE = model.eval()(torch.tensor([prompt])).last_hidden_state[0]
        return rows_TE if rows_TE.isfinite().all() else None
    except Exception:
        return None
