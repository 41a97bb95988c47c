"""Quality of each weight format: the quantized demo model beside a float64 simulation of the same format.

    python benchmarks/quantized_quality.py --problems 40 --formats gptq awq
    OMP_NUM_THREADS=1 python benchmarks/quantized_quality.py --output benchmarks/results/quantized_quality.json

The demo model is rounded to nearest in each format, by numpy and after the published layouts. The engine answers
held-out problems with these files in float32. The simulation answers the same problems by transformers' model in
float64, whose weights are the dequantized ones in float64. The scores may differ by two paired standard errors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.result_files import output_file, write_result
from phonograph import LLM
from phonograph.bench.records.record import provenance
from phonograph.demo import MODEL_DIRECTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from quantized_checkpoints import quantized_demo

from demo_evaluation.compare import compare
from demo_evaluation.evaluate import Item, evaluate_demo
from demo_tasks import tasks

STANDARD_ERRORS = 2
AT_LOAD = "fp8 at load"
NAMES = (
    *("gptq", "gptq zeros", "gptq 8 bits", "awq", "packed", "packed zeros", "packed 8 bits channel", "int8 channel"),
    *("fp8", "fp8 blocks", "float channel", AT_LOAD),
)
_BATCH = 128
_PAD, _END = 0, 2


def measure(name: str, num_problems: int) -> dict[str, Any]:
    """Return the scores of the engine and of the simulation in a format, and their paired difference."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        # FP8 that is made at load has the scales of this format.
        meant = quantized_demo(folder, "float channel" if name == AT_LOAD else name)
        model, quantization = (str(MODEL_DIRECTORY), "fp8") if name == AT_LOAD else (str(folder), None)
        # Graphs give the same answers (tests/engine/test_quantized_engine.py).
        llm = LLM(
            model=model,
            quantization=quantization,
            device="cpu",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=32,
            cudagraph_mode="NONE",
        )
        (ours,) = evaluate_demo(llm, num_problems=num_problems, num_recalls=0)
    simulated = list(simulate(llm, meant, ours.items))
    (task,) = compare(simulated, ours.items)
    return {
        "format": name,
        "problems": num_problems,
        "score": task.second_score,
        "simulated_score": task.first_score,
        "difference": task.difference,
        "standard_error": task.standard_error,
        "answers_that_differ": len(task.divergences),
        "ok": abs(task.difference) <= STANDARD_ERRORS * task.standard_error,
    }


@torch.inference_mode()
def simulate(llm: LLM, meant: dict[str, torch.Tensor], answered: Sequence[Item]) -> Iterator[Item]:
    """Yield the answers of a float64 model with the given weights to the problems of other answers."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float64).eval()
    assert model.load_state_dict(meant, strict=False).missing_keys in ([], ["lm_head.weight"])
    assert llm.tokenizer is not None
    problems = list(tasks.problems(tasks.EVALUATION_SEED, len(answered)))
    prompts = [llm.encode_chat([{"role": "user", "content": one.question}]) for one in problems]
    for first in range(0, len(prompts), _BATCH):
        batch = prompts[first : first + _BATCH]
        width = max(map(len, batch))
        input_ids = torch.tensor([[_PAD] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=tasks.PROBLEM_TOKENS,
            do_sample=False,
            pad_token_id=_PAD,
            eos_token_id=_END,
        )
        for index, row in enumerate(output[:, width:].tolist(), start=first):
            token_ids = row[: row.index(_END) + 1] if _END in row else row
            text = llm.tokenizer.decode([token for token in token_ids if token != _END])
            yield Item(
                task="problems",
                index=index,
                correct=tasks.score_problem(problems[index], text),
                expected=str(problems[index].answer),
                text=text,
                num_prompt_tokens=len(prompts[index]),
                token_ids=token_ids,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=300, help="held-out problems for each format")
    parser.add_argument("--formats", nargs="+", default=list(NAMES), choices=NAMES, metavar="NAME")
    parser.add_argument("--output", type=output_file, help="file for the record")
    arguments = parser.parse_args()
    origin, results = provenance(), []
    for name in arguments.formats:
        result = measure(name, arguments.problems)
        results.append(result)
        print(
            f"{name:22} {result['score']:.4f} simulated {result['simulated_score']:.4f} difference "
            f"{result['difference']:+.4f} ± {result['standard_error']:.4f}, {result['answers_that_differ']} answers "
            f"differ: {'ok' if result['ok'] else 'FAILED'}",
            flush=True,
        )
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": "demo", "dtype": "float32", "formats": results})
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
