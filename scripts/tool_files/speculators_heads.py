"""EAGLE-3 heads of random weights as the package speculators writes them, with logits of its own forward pass.

The package runs a head as in training: in each further step every entry reads what it said itself in the step before
and the next token of the text. That is what drafting does behind that entry.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

TOKENS, VOCAB_SIZE, NUM_LAYERS, STEPS = 11, 64, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 256,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig(**SIZES), {"draft_vocab_size": 40, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}),
    "llama-norms": (
        LlamaConfig(**SIZES, attention_bias=True, rms_norm_eps=1e-5, rope_parameters=ROPE),
        {
            **{"draft_vocab_size": VOCAB_SIZE, "norm_before_residual": True, "norm_before_fc": True},
            "eagle_aux_hidden_state_layer_ids": [0, 2, 5, 8],
        },
    ),
    "qwen3": (
        Qwen3Config(**SIZES | {"num_hidden_layers": 2}, head_dim=16),
        {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True},
    ),
}


def make_head(layer: Any, fields: dict[str, Any]) -> Eagle3DraftModel:
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
        **fields,
    )
    head = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.5)
    if head.use_draft_vocab:
        chosen = torch.randperm(VOCAB_SIZE)[: head.draft_vocab_size].sort().values
        head.load_vocab_mappings(
            torch.isin(torch.arange(VOCAB_SIZE), chosen), chosen - torch.arange(head.draft_vocab_size)
        )
    return head


def main(out: Path) -> None:
    torch.manual_seed(7)
    for case, (layer, fields) in CASES.items():
        head = make_head(layer, fields)
        head.save_pretrained(out / case)
        (out / case / "config.py").unlink(missing_ok=True)  # code of the package
        tokens = torch.randint(0, VOCAB_SIZE, (1, TOKENS))
        states = torch.randn(1, TOKENS, head.fc.in_features)
        logits: list[torch.Tensor] = []
        head.lm_head.register_forward_hook(lambda _module, _rows, result, logits=logits: logits.append(result[0]))
        with torch.inference_mode():
            head(states, tokens, torch.zeros(1, TOKENS, dtype=torch.long), ttt_steps=STEPS)
        expected = {"tokens": tokens[0], "states": states[0]} | {f"logits_{i}": one for i, one in enumerate(logits)}
        save_file({name: one.contiguous() for name, one in expected.items()}, out / case / "expected.safetensors")
    versions = {name: version(name) for name in ("speculators", "transformers", "torch")}
    (out / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
