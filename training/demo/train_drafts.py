"""Train what drafts for the demo model on a CPU, in some minutes: an EAGLE-3 head, or a smaller model.

    export PYTHONPATH=src:training OMP_NUM_THREADS=1
    python training/demo/train_drafts.py head --out HEAD --steps 700
    python training/demo/train_drafts.py model --out MODEL --steps 2000

The text is the problems of the demo model's training; a batch is a function of the seed and the step. The head learns
the distribution of the model as it ships, the smaller model the text itself. Matrices have Muon (Jordan et al. 2024),
embeddings and norms AdamW.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
import torch
import torch.nn.functional as F
from head import Head, losses
from model import Decoder, Shape
from safetensors.torch import load_file, save_file
from text import ANSWER_WEIGHT, ChatWriter, batch
from tokenizers import Tokenizer
from torch import Tensor, nn

from phonograph.demo import MODEL_DIRECTORY

ROWS, WIDTH = 8, 255
RATE, WEIGHT_DECAY, WARMUP, DECAY = 4e-3, 0.05, 0.03, 0.5
"""Learning rate, and the shares of the steps in which it rises and falls."""
DEPTH, FIRST_PART, DISCOUNT = 3, 0.5, 0.9
"""Steps of drafting in the loss of a head, the share of training with one, and the weight of each next to the last."""
TAPS = (2, 5, 7)
HEAD: dict[str, int] = {"intermediate_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL: dict[str, int] = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
LOG_EVERY = 20

Losses = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Cross-entropies, and shares of right most likely tokens, by tokens, answer tokens, and the share of steps done."""


def load_target() -> tuple[Decoder, dict[str, Any]]:
    """Return the demo model and its config.json."""
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    target = Decoder(Shape(**{name: config[name] for name in Shape.__dataclass_fields__}))
    target.load_state_dict(load_file(MODEL_DIRECTORY / "model.safetensors"))
    return target.bfloat16().eval().requires_grad_(False), config


def head_losses(head: Head, target: Decoder, tokens: Tensor, answers: Tensor, over: float) -> tuple[Tensor, Tensor]:
    return losses(head, target, tokens, answers, 1 if over < FIRST_PART else DEPTH)


def model_losses(model: Decoder, tokens: Tensor, answers: Tensor, over: float) -> tuple[Tensor, Tensor]:
    logits = model(tokens[:, :-1])[answers[:, 1:]].float()
    wanted = tokens[:, 1:][answers[:, 1:]]
    return F.cross_entropy(logits, wanted)[None], (logits.detach().argmax(-1) == wanted).float().mean()[None]


def train(model: nn.Module, losses_of: Losses, writer: ChatWriter, *, steps: int, seed: int, log: Path) -> None:
    """Run the steps, and write a line of the log in twenty."""
    named = dict(model.named_parameters())
    matrices = [one for name, one in named.items() if one.dim() == 2 and "embed_tokens" not in name]
    others = [one for name, one in named.items() if one.dim() != 2 or "embed_tokens" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0),
    ]
    began, means = time.process_time(), list[np.ndarray]()
    with log.open("w") as lines:
        for step in range(steps):
            over = step / steps
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = RATE * min(1.0, over / WARMUP + 0.01, (1 - over) / DECAY)
            token_array, weight_array = batch(writer, seed, step, "problems", ROWS, WIDTH)
            tokens, answers = torch.from_numpy(token_array.astype(np.int64)), weight_array == ANSWER_WEIGHT
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found, equal = losses_of(tokens, torch.from_numpy(answers), over)
            weights = torch.tensor([DISCOUNT**depth for depth in range(len(found))])
            (found @ weights / weights.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            means = [one for one in means if one.shape[1] == len(found)]
            means.append(np.stack([found.detach().numpy(), equal.numpy()]))
            if (step + 1) % LOG_EVERY == 0:
                loss, share = ([round(one, 4) for one in row] for row in np.mean(means, axis=0).astype(float).tolist())
                record = {"step": step + 1, "cpu_seconds": round(time.process_time() - began, 1)}
                print(json.dumps(record | {"loss": loss, "equal": share}), file=lines, flush=True)
                means.clear()


def export_head(directory: Path, head: Head, target_config: dict[str, Any]) -> None:
    """Write config.json and bfloat16 model.safetensors in the authors' format.

    The embedding and the matrix of logits are the target's and not in the file.
    """
    kept = {name: value for name, value in target_config.items() if name != "tie_word_embeddings"}
    config = kept | {
        "architectures": ["LlamaForCausalLMEagle3"],
        **HEAD,
        "num_hidden_layers": 1,
        "draft_vocab_size": head.shape.vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(head.taps)},
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in sorted(head.state_dict().items())}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("head", "model"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights, and of loss.jsonl")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    target, config = load_target()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model: Head | Decoder
    if arguments.kind == "head":
        model = Head(Shape(**vars(target.shape) | HEAD), TAPS)
        losses_of: Losses = partial(head_losses, model, target)
    else:
        model = Decoder(Shape(**vars(target.shape) | MODEL))
        losses_of = partial(model_losses, model)
    writer = ChatWriter(Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json")))
    log = arguments.out / "loss.jsonl"
    train(model, losses_of, writer, steps=arguments.steps, seed=arguments.seed, log=log)
    if isinstance(model, Head):
        export_head(arguments.out, model, config)
    else:
        checkpoint.export(arguments.out, dict(model.state_dict()), model.shape)


if __name__ == "__main__":
    main()
