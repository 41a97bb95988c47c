"""Train the demo model, or go on training it, for some minutes.

    python training/demo/train.py --checkpoint .ckpt/demo --minutes 8
    python training/demo/train.py --checkpoint .ckpt/demo --minutes 0 --export

The first call starts from the recipe's seed; every later one resumes from the checkpoint. The schedule (learning rate,
lengths, data) is a function of the step alone, so pieces of any length add up to the same run.
"""

import json
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
import torch
from model import Decoder, Shape, losses
from text import ANSWER_WEIGHT, ChatWriter, batch
from tokenizers import Tokenizer

from phonograph.demo import MODEL_DIRECTORY

Recipe = dict[str, Any]
MicroBatch = tuple[np.ndarray, np.ndarray]
HERE = Path(__file__).parent
KINDS = ("problems", "recalls")
_writer: ChatWriter | None = None


def start_worker(tokenizer_file: str) -> None:
    """Give a data process its own tokenizer."""
    global _writer  # a process pool has no other place for what its tasks share
    torch.set_num_threads(1)
    _writer = ChatWriter(Tokenizer.from_file(tokenizer_file))


def make(task: tuple[int, int, str, int, int]) -> MicroBatch:
    """One micro-batch, in a data process."""
    assert _writer is not None
    return batch(_writer, *task)


def micro_batches(recipe: Recipe, step: int) -> Iterator[tuple[int, int, str, int, int]]:
    """Return (seed, step, kind, rows, width) of each micro-batch of this step."""
    widths = next(phase["recall_widths"] for phase in recipe["phases"] if step < phase["until"])
    width = widths[step % len(widths)]
    yield recipe["seed"], step, "problems", recipe["problems"]["rows"], recipe["problems"]["width"]
    yield recipe["seed"], step, "recalls", max(1, recipe["recall_tokens"] // width), width


def data(recipe: Recipe, tokenizer: Path, first_step: int, workers: int) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Yield steps with their micro-batches in order, made ahead by processes, without end."""
    with get_context("fork").Pool(workers, start_worker, (str(tokenizer),)) as pool:
        ahead: deque[tuple[int, list[Any]]] = deque()
        step = first_step
        while True:
            while len(ahead) < 2 * workers:
                ahead.append((step, [pool.apply_async(make, (task,)) for task in micro_batches(recipe, step)]))
                step += 1
            current, results = ahead.popleft()
            yield current, [result.get() for result in results]


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm-up, a plateau, then a straight line to zero at the last step (warm-up, stable, decay)."""
    up = (step + 1) / recipe["warmup_steps"]
    down = (recipe["steps"] - step) / recipe["decay_steps"]
    return recipe["learning_rate"] * max(0.0, min(1.0, up, down))


def build(recipe: Recipe, device: str) -> tuple[Decoder, torch.optim.AdamW]:
    torch.manual_seed(recipe["seed"])
    model = Decoder(Shape(**recipe["model"])).to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe["weight_decay"]}, {"params": gains, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=recipe["learning_rate"], betas=recipe["betas"], fused=device == "cuda")


def train(
    recipe: Recipe, tokenizer: Path, directory: Path, *, minutes: float, device: str, workers: int, log_every: int
) -> None:
    """Run steps until the minutes or the recipe's steps are over, then save."""
    started = time.monotonic()
    first_step = resume_step(directory)
    stream = data(recipe, tokenizer, first_step, workers)
    ready = next(stream)  # the processes fork here, before CUDA starts
    model, optimizer = build(recipe, device)
    state = checkpoint.load(directory, model, optimizer) if first_step else {"step": 0, "tokens": 0, "seconds": 0.0}
    seconds_before, tokens_before, tokens = state["seconds"], state["tokens"], state["tokens"]
    loss_of = torch.compile(losses, dynamic=False) if device == "cuda" else losses
    directory.mkdir(parents=True, exist_ok=True)
    curve = directory / "loss.jsonl"
    keep_curve(curve, first_step)
    step, saved = first_step, started
    with curve.open("a") as log:
        while step < recipe["steps"] and time.monotonic() - started < 60 * minutes:
            step, arrays = ready
            rate = learning_rate(recipe, step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            answer_losses: list[torch.Tensor] = []
            for token_array, weight_array in arrays:
                token_ids = torch.from_numpy(token_array.astype(np.int64)).to(device, non_blocking=True)
                weights = torch.from_numpy(weight_array).to(device, non_blocking=True).float() / ANSWER_WEIGHT
                with torch.autocast(device, dtype=torch.bfloat16):
                    loss, answer_loss = loss_of(model, token_ids, weights)
                (loss / len(arrays)).backward()
                answer_losses.append(answer_loss)
                tokens += token_ids.numel()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % log_every == 0 or step == recipe["steps"]:
                now = time.monotonic()
                record = {
                    "step": step,
                    "tokens": tokens,
                    "seconds": round(seconds_before + now - started, 1),
                    "rate": round(rate, 6),
                    "width": arrays[1][0].shape[1] - 1,
                    **{f"{kind}_loss": round(loss.item(), 5) for kind, loss in zip(KINDS, answer_losses, strict=True)},
                    "gradient": round(norm.item(), 3),
                    "tokens_per_second": round((tokens - tokens_before) / (now - started)),
                }
                print(json.dumps(record), file=log, flush=True)
                if step % (10 * log_every) == 0:
                    print(json.dumps(record), flush=True)
            state = {"step": step, "tokens": tokens, "seconds": seconds_before + time.monotonic() - started}
            if time.monotonic() - saved > 120:
                checkpoint.save(directory, model, optimizer, state)
                saved = time.monotonic()
            ready = next(stream)
    checkpoint.save(directory, model, optimizer, state)
    print(json.dumps({"saved": state}), flush=True)


def resume_step(directory: Path) -> int:
    """Return the step of a checkpoint; 0 without one."""
    state = directory / "state.json"
    return json.loads(state.read_text())["step"] if state.exists() else 0


def keep_curve(curve: Path, step: int) -> None:
    """Drop the loss curve's lines that belong to steps after the checkpoint."""
    lines = curve.read_text().splitlines() if curve.exists() else []
    curve.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step))


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=HERE / "recipe.json")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--model", type=Path, default=MODEL_DIRECTORY, help="where the tokenizer is, and the export goes"
    )
    parser.add_argument("--export", action="store_true", help="write bfloat16 weights and config.json in the end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--log-every", type=int, default=20)
    arguments = parser.parse_args()
    recipe = json.loads(arguments.recipe.read_text())
    torch.set_float32_matmul_precision("high")
    if arguments.minutes > 0:
        train(
            recipe,
            arguments.model / "tokenizer.json",
            arguments.checkpoint,
            minutes=arguments.minutes,
            device=arguments.device,
            workers=arguments.workers,
            log_every=arguments.log_every,
        )
    if arguments.export:
        checkpoint.export(arguments.model, checkpoint.load_weights(arguments.checkpoint), Shape(**recipe["model"]))


if __name__ == "__main__":
    main()
