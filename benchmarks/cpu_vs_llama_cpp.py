"""One sequence of a GGUF model on this CPU, beside llama.cpp and transformers, in interleaved rounds.

    npm install --ignore-scripts @node-llama-cpp/linux-x64
    OMP_NUM_THREADS=1 python benchmarks/cpu_vs_llama_cpp.py MODEL.gguf --library FOLDER_OF_LIBLLAMA

Each system runs in a process of its own, and one of them at a time computes. A round has a prompt of 512 tokens, the
first token after a prompt of 64, and 64 decoded tokens, by all systems in turn; ratios are of one round. The peak of
resident memory and the time of the start are those of the process, the imports of Python included. llama.cpp is a
prebuilt library, called through its C functions; OMP_NUM_THREADS is the number of threads of all.

`--products` times products of one row instead: GPTQ of 4 bits in groups of 128, and FP8, on two shapes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PREFILL, PROMPT, DECODED, CONTEXT = 512, 64, 64, 1024
SYSTEMS = "phonograph", "llama.cpp", "transformers"
Answer = Callable[[list[int], int], list[int]]
"""Prompt and number of tokens -> that many greedy tokens."""


class _Struct(ctypes.Structure):
    """Parameters of llama.cpp: larger than theirs, because they are passed by value and differ between versions."""

    _fields_ = (("bytes", ctypes.c_byte * 1024),)


class _Batch(ctypes.Structure):
    _fields_ = (
        *(("n_tokens", ctypes.c_int32), ("token", ctypes.c_void_p), ("embd", ctypes.c_void_p)),
        *(("pos", ctypes.c_void_p), ("n_seq_id", ctypes.c_void_p), ("seq_id", ctypes.c_void_p)),
        ("logits", ctypes.c_void_p),
    )


_NO_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def llama_cpp(model: Path, library: Path, threads: int) -> Answer:
    """Load a model by llama.cpp's C functions."""
    found = {name: next(library.glob(f"{name}*.so*")) for name in ("libggml-base", "libggml.", "libllama.")}
    _, ggml, llama = (ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in found.values())
    llama.llama_log_set(_NO_LOG, None)
    ggml.ggml_backend_load_all_from_path(str(library).encode())
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
        ("llama_model_default_params", _Struct),
        ("llama_context_default_params", _Struct),
        ("llama_model_load_from_file", pointer, ctypes.c_char_p, _Struct),
        ("llama_init_from_model", pointer, pointer, _Struct),
        ("llama_model_get_vocab", pointer, pointer),
        ("llama_vocab_n_tokens", ctypes.c_int32, pointer),
        ("llama_batch_get_one", _Batch, pointer, ctypes.c_int32),
        ("llama_decode", ctypes.c_int32, pointer, _Batch),
        ("llama_set_n_threads", None, pointer, ctypes.c_int32, ctypes.c_int32),
        ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), pointer, ctypes.c_int32),
        ("llama_get_memory", pointer, pointer),
        ("llama_memory_clear", None, pointer, ctypes.c_bool),
    ):
        getattr(llama, name).restype, getattr(llama, name).argtypes = result, arguments
    loaded = llama.llama_model_load_from_file(str(model).encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    ctypes.cast(ctypes.byref(settings), ctypes.POINTER(ctypes.c_uint32))[0] = CONTEXT  # n_ctx is the first field
    context = llama.llama_init_from_model(loaded, settings)
    llama.llama_set_n_threads(context, threads, threads)
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))

    def next_token(tokens: list[int]) -> int:
        ids = np.array(tokens, np.int32)
        assert llama.llama_decode(context, llama.llama_batch_get_one(ids.ctypes.data, len(ids))) == 0
        return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (vocab_size,)).argmax())

    def answer(prompt: list[int], count: int) -> list[int]:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        tokens = [next_token(prompt)]
        while len(tokens) < count:
            tokens.append(next_token(tokens[-1:]))
        return tokens

    return answer


def phonograph(model: Path, cpu_products: str) -> Answer:
    from phonograph import LLM, SamplingParams

    llm = LLM(
        str(model),
        device="cpu",
        max_model_len=CONTEXT,
        max_num_seqs=1,
        enable_prefix_caching=False,
        cudagraph_capture_sizes=[1],
        cpu_products=cpu_products,
    )
    print(*(note for note in llm.plan.notes if note.startswith("cpu_products")), file=sys.stderr)

    def answer(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return answer


def transformers(model: Path) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    loaded.generation_config.eos_token_id = None

    @torch.inference_mode()
    def answer(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        output = loaded.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return output[0, len(prompt) :].tolist()

    return answer


def serve(system: str, arguments: argparse.Namespace) -> None:
    """Answer requests, one JSON line each, with tokens and seconds."""
    start, threads = time.perf_counter(), int(os.environ["OMP_NUM_THREADS"])
    if system == "llama.cpp":
        answer = llama_cpp(arguments.model, arguments.library, threads)
    else:
        answer = transformers(arguments.model) if system == "transformers" else phonograph(arguments.model, "auto")
    print(json.dumps({"start": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = answer(request["prompt"], request["count"])
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"tokens": tokens, "seconds": seconds, "peak": peak / 1024}), flush=True)


class System:
    """A system in a process of its own."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", name]
        start = time.perf_counter()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()
        self.start = time.perf_counter() - start
        self.peak = 0.0

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def run(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        assert self._process.stdin is not None
        print(json.dumps({"prompt": prompt, "count": count}), file=self._process.stdin, flush=True)
        found = self._read()
        self.peak = found["peak"]
        return found["seconds"], found["tokens"]

    def round(self, draw: Callable[[int], list[int]]) -> dict[str, float]:
        """Return tokens/s of a prefill and of decoding, and the seconds to the first token."""
        prefill, _ = self.run(draw(PREFILL), 1)
        prompt = draw(PROMPT)
        first, _ = self.run(prompt, 1)
        whole, _ = self.run(prompt, DECODED + 1)
        return {"prefill": PREFILL / prefill, "first": first, "decode": DECODED / (whole - first)}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(names: list[str], rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    systems = {name: System(name) for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        seed = int(rng.integers(1 << 30))
        for name in names[number % len(names) :] + names[: number % len(names)]:
            draws = np.random.default_rng(seed)
            one = systems[name].round(lambda count, draws=draws: draws.integers(100, 40_000, count).tolist())
            if number:  # the first round warms up
                found[name].append(one)
    for system in systems.values():
        system.close()
    results: dict[str, Any] = {}
    for name in names:
        measured = {key: [one[key] for one in found[name]] for key in found[name][0]}
        ratios = {
            key: [one / other[key] for one, other in zip(values, found["llama.cpp"], strict=True)]
            for key, values in measured.items()
        }
        results[name] = {
            **{key: round(statistics.median(values), 3) for key, values in measured.items()},
            "start_s": round(systems[name].start, 2),
            "peak_mib": round(systems[name].peak),
            "beside_llama_cpp": {key: [round(f(values), 3) for f in SPREAD] for key, values in ratios.items()},
        }
        one = results[name]
        print(
            f"{name:13} prefill {one['prefill']:7.1f} tok/s, first token {1e3 * one['first']:6.0f} ms, decode "
            f"{one['decode']:6.1f} tok/s, start {one['start_s']:5.2f} s, peak {one['peak_mib']} MiB; beside llama.cpp "
            + ", ".join(f"{key} {low}-{mid}-{high}" for key, (low, mid, high) in one["beside_llama_cpp"].items())
        )
    return results


SPREAD = (min, statistics.median, max)


def products() -> list[dict[str, Any]]:
    """Time one row by each form of weights, which take turns with copies of 64 MB."""
    import torch

    from phonograph.engine.startup.cpu_products import measure
    from phonograph.kernels.torch.grouped import Grouped
    from phonograph.models.quantization.cpu_weights import CpuProducts
    from phonograph.models.quantization.grouped_weight import GroupedWeight

    measured, rows = measure(), []
    settings: dict[str, Any] = {
        "operator_rows": measured.operator_rows,
        "tile_dtype": measured.tile_dtype,
        "reason": "",
    }
    forms = {
        "packed or dequantized": CpuProducts(int4=True, dequantize=True, **settings),
        "float32": CpuProducts(int4=False, dequantize=True, reason=""),
        "groups": CpuProducts(int4=False, dequantize=False, reason=""),
    }
    for inputs, outputs in ((576, 1536), (2048, 8192)):
        groups = -(-inputs // 128)
        scales = torch.ones(outputs, groups)
        words = torch.randint(-(2**31), 2**31, (outputs, groups * 16), dtype=torch.int32)
        zeros = torch.full((outputs, groups), 7, dtype=torch.uint8)
        floats = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        for name, values in (
            ("GPTQ, 4 bits, groups of 128", Grouped(words, scales, zeros, 4, 128)),
            ("FP8, blocks of 128", Grouped(floats, scales, None, 8, 128)),
        ):
            weight, x = GroupedWeight(values, inputs), torch.randn(1, inputs)
            copies = max(1, (64 << 20) // (4 * inputs * outputs))
            held = {
                form: [one.convert(weight, False, torch.float32) for _ in range(copies)] for form, one in forms.items()
            }
            taken: dict[str, list[float]] = {form: [] for form in forms}
            for _ in range(8):
                for form, weights in held.items():
                    start = time.perf_counter()
                    for one in weights:
                        one.product(x, None)
                    taken[form].append(1e6 * (time.perf_counter() - start) / copies)
            row = {form: round(min(values), 1) for form, values in taken.items()}
            rows.append({"format": name, "inputs": inputs, "outputs": outputs, "microseconds": row})
            print(f"{name}, {inputs} x {outputs}: {row} us")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--library", type=Path, help="folder of libllama and libggml")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS[:2]))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.serve:
        serve(arguments.serve, arguments)
        return
    from bench.result_files import write_result
    from phonograph.bench.records.record import provenance

    origin = provenance()
    if arguments.products:
        facts: dict[str, Any] = {"products": products()}
    else:
        results = compare(arguments.systems, arguments.rounds)
        facts = {"threads": int(os.environ["OMP_NUM_THREADS"]), "rounds": arguments.rounds, "results": results}
    if arguments.output is not None:
        write_result(arguments.output, origin, facts)


if __name__ == "__main__":
    main()
