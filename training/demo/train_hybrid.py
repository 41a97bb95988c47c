"""Train a small hybrid of gated delta nets and attention on the demo task, on one core, for the tests of states.

    export PYTHONPATH=src:training OMP_NUM_THREADS=1
    python training/demo/train_hybrid.py --out HYBRID --steps 3000

The model is transformers' Qwen3.5 with three gated delta nets and one layer of attention, and the demo model's
tokenizer. It learns the problems of the demo model's training, as `train_drafts.py` has them.
"""

from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from text import ChatWriter
from tokenizers import Tokenizer
from torch import Tensor
from train_drafts import train
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from phonograph.demo import MODEL_DIRECTORY

SIZES: dict[str, Any] = {
    **{"vocab_size": 2048, "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 4},
    **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16},
    "tie_word_embeddings": True,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def hybrid_losses(model: Qwen3_5ForCausalLM, tokens: Tensor, answers: Tensor, over: float) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and share of right most likely tokens, at answers."""
    states = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(states[answers[:, 1:]]).float()
    wanted = tokens[:, 1:][answers[:, 1:]]
    return F.cross_entropy(logits, wanted)[None], (logits.detach().argmax(-1) == wanted).float().mean()[None]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights, and of loss.jsonl")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES)).float()
    arguments.out.mkdir(parents=True, exist_ok=True)
    writer = ChatWriter(Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json")))
    log = arguments.out / "loss.jsonl"
    train(model, partial(hybrid_losses, model), writer, steps=arguments.steps, seed=arguments.seed, log=log)
    model.bfloat16().save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
