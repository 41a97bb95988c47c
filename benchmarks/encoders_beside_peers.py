"""Embeddings and speech on random weights, beside vLLM and sentence-transformers on the same device.

    python benchmarks/encoders_beside_peers.py all-minilm-l6-v2 bge-m3 whisper-large-v3 \\
        --peer-python VENV/bin/python --output benchmarks/results/encoders_beside_peers.json

Each folder has a config.json; the script gives it a tokenizer. Embeddings: 1, 32 and 1,024 texts of 1 to 256 words,
most of them short, from text to vectors. Whisper: 1, 8 and 32 recordings of 30 seconds of noise, with 200 tokens each.
A side is a process of its own, ours and vLLM's by the same calls. A time is the median of five runs after two.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS, RECORDINGS = (1, 32, 1024), (1, 8, 32)
TOKENS, SECONDS, RATE = 200, 30, 16000
WARM_UPS, RUNS = 2, 5
ST_BATCH = 32
CHILD = "--side"
SIDES = {"ours": "phonograph", "vllm": "vllm", "sentence-transformers": "sentence_transformers"}
PROMPT = "<|startoftranscript|><|notimestamps|>"

Row = dict[str, Any]


def make_texts(folder: Path, count: int) -> list[str]:
    """Return texts of random words of the folder's tokenizer, one token each."""
    vocab: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word[1:] for word in vocab if word[0] == "\u0120" and len(word) > 1)
    rng = random.Random(count)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 40))) for _ in range(count)]
    return ["".join(f" {word}" for word in rng.choices(words, k=length)) for length in lengths]


def make_recordings(count: int) -> list[Row]:
    """Return prompts of vLLM's form, each with its own noise."""
    noise = np.random.default_rng(count).standard_normal((count, SECONDS * RATE), np.float32) * 0.1
    return [{"prompt": PROMPT, "multi_modal_data": {"audio": (samples, RATE)}} for samples in noise]


def is_speech(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] == "whisper"


def time_runs(run: Callable[[], object]) -> float:
    """Return the median of the runs in seconds."""
    times: list[float] = []
    for _ in range(WARM_UPS + RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UPS:])


def engine_rows(library: Any, folder: Path, settings: Row) -> Iterator[Row]:
    """Time an engine with the calls of vLLM."""
    llm = library.LLM(str(folder), load_format="dummy", seed=0, **settings)
    if is_speech(folder):
        params = library.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for count in RECORDINGS:
            prompts = make_recordings(count)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [TOKENS] * count
            seconds = time_runs(lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False))
            yield {"case": f"{count} recordings", "seconds": seconds, "rate": count * TOKENS / seconds}
    else:
        for count in TEXTS:
            texts = make_texts(folder, count)
            seconds = time_runs(lambda texts=texts: llm.embed(texts, use_tqdm=False))
            yield {"case": f"{count} texts", "seconds": seconds, "rate": count / seconds}
    if hasattr(llm, "step_counts"):
        yield {"case": "steps", "steps": dict(llm.step_counts)}


def library_rows(library: Any, folder: Path, settings: Row) -> Iterator[Row]:
    """Time sentence-transformers, on random weights of transformers."""
    import torch
    from transformers import AutoConfig, AutoModel

    with tempfile.TemporaryDirectory() as name:
        weights = Path(name)
        dtype = getattr(torch, settings["dtype"])
        config = AutoConfig.from_pretrained(folder)
        AutoModel.from_config(config).to(dtype).save_pretrained(weights)
        for file in folder.glob("tokenizer*"):
            (weights / file.name).write_bytes(file.read_bytes())
        parts: Any = importlib.import_module("sentence_transformers.models")
        transformer = parts.Transformer(str(weights), model_args={"dtype": dtype})
        pooling = parts.Pooling(config.hidden_size)
        model = library.SentenceTransformer(modules=[transformer, pooling], device=settings.get("device", "cuda"))
        for count in TEXTS:
            texts = make_texts(folder, count)
            seconds = time_runs(lambda texts=texts: model.encode(texts, batch_size=ST_BATCH, show_progress_bar=False))
            yield {"case": f"{count} texts", "seconds": seconds, "rate": count / seconds}


def child(side: str, folder: Path, rows: Path, settings: Row) -> int:
    """Time one side in this process, and append its rows."""
    library = importlib.import_module(SIDES[side])
    run = library_rows if side == "sentence-transformers" else engine_rows
    for row in run(library, folder, settings):
        with rows.open("a") as file:
            file.write(json.dumps({"model": folder.name, "side": side, **row}) + "\n")
        print(side, folder.name, json.dumps(row), flush=True)
    return 0


def make_folder(config: Path, folder: Path) -> Path:
    """Write the configuration, a tokenizer, and for Whisper what reads recordings."""
    from checks.serving.generated import make_model_folder, make_tokenizer

    make_model_folder(config, folder)
    if is_speech(folder):
        from transformers import WhisperFeatureExtractor, WhisperTokenizer

        settings = json.loads((folder / "config.json").read_text())
        first = settings["decoder_start_token_id"]
        special = {first - 1: "<|endoftext|>", first: "<|startoftranscript|>", first + 1: "<|notimestamps|>"}
        special |= {index: f"<|{index}|>" for index in range(first + 2, settings["vocab_size"])}
        model = json.loads(make_tokenizer(settings["vocab_size"], special).to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        tokenizer = WhisperTokenizer(model["vocab"], merges, extra_special_tokens=list(special.values()))
        tokenizer.save_pretrained(folder)
        WhisperFeatureExtractor(feature_size=settings["num_mel_bins"]).save_pretrained(folder)
    return folder


def show(rows: Sequence[Row]) -> None:
    """Print the rate of each side, and ours over the best other one."""
    from rich.console import Console
    from rich.table import Table

    timed = [row for row in rows if "rate" in row]
    table = Table("texts or tokens a second", *SIDES, "ours over the best other")
    for model, case in dict.fromkeys((row["model"], row["case"]) for row in timed):
        found = {row["side"]: row["rate"] for row in timed if (row["model"], row["case"]) == (model, case)}
        others = [rate for side, rate in found.items() if side != "ours"]
        ratio = f"{found['ours'] / max(others):.2f}" if others and "ours" in found else ""
        cells = [f"{found[side]:,.0f}" if side in found else "" for side in SIDES]
        table.add_row(f"{model}, {case}", *cells, ratio)
    Console(width=110).print(table)


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        side, folder, rows, settings = sys.argv[2:]
        return child(side, Path(folder), Path(rows), json.loads(settings))
    from bench.result_files import output_file, read_records, write_result
    from phonograph.bench.records.record import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="folders with a config.json")
    parser.add_argument("--output", type=output_file, required=True, help="JSON file; rows lie beside it")
    parser.add_argument("--peer-python", help="Python that has vLLM; without it, vLLM is left out")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a side")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="of ours and of sentence-transformers")
    arguments = parser.parse_args()
    origin, rows = provenance(), arguments.output.with_suffix(".jsonl")
    rows.unlink(missing_ok=True)
    device = {} if arguments.device is None else {"device": arguments.device}
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for config in arguments.models:
            folder = make_folder(config, Path(name) / config.name)
            sides = {"ours": (sys.executable, device)}
            if arguments.peer_python is not None:
                sides["vllm"] = (arguments.peer_python, {"gpu_memory_utilization": 0.5})
            if importlib.util.find_spec("sentence_transformers") is not None and not is_speech(folder):
                sides["sentence-transformers"] = (sys.executable, device)
            for side, (python, more) in sides.items():
                settings = json.dumps({"dtype": arguments.dtype, **more})
                command = [python, __file__, CHILD, side, str(folder), str(rows), settings]
                try:
                    subprocess.run(command, env=environment, check=True, timeout=arguments.timeout)
                except (subprocess.SubprocessError, OSError) as error:
                    failed.append(f"{side}, {folder.name}: {error}"[:200])
    found = read_records([rows])
    show(found)
    write_result(arguments.output, origin, {"rows": found, "failed": failed})
    for problem in failed:
        print(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
