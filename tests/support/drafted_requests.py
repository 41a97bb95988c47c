"""Requests whose tokens must be the same with and without drafts."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from phonograph.demo import HEAD_DIRECTORY, MODEL_DIRECTORY
from phonograph.engine.llm import LLM
from phonograph.engine.outputs import RequestOutput
from phonograph.models.spec import read_model_spec

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 128}
PROMPTS = ["12+7=", "99-3=", "1 2 3 1 2 3 1 2", "7*8=", "44+44=44+44="]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 1.3, "top_p": 0.8, "top_k": 40, "seed": 5},
    "samples": {"temperature": 1.0, "seed": 9, "n": 3},
    "penalized": {"temperature": 1.0, "seed": 1, "repetition_penalty": 1.3},
    "scored": {"temperature": 0.0, "logprobs": 2},
    "least": {"temperature": 1.0, "seed": 2, "min_tokens": 9},
    "biased": {"temperature": 0.0, "logit_bias": {5: 2.0}},
    "counted": {"temperature": 0.8, "seed": 8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logprobs": 3},
    "allowed": {"temperature": 1.0, "seed": 2, "allowed_token_ids": [*range(40, 1040)], "logprobs": 0},
    "ruled": {
        "temperature": 1.0,
        "seed": 6,
        "ignore_eos": False,
        "structured_outputs": {"regex": "([0-9]{1,3}[+=-]){12}"},
    },
    "one": {"temperature": 0.0, "max_tokens": 1},
    "prompt scored": {"temperature": 0.0, "prompt_logprobs": 1},
    "switched off": {"temperature": 1.0, "seed": 3, "speculate": False},
}
UNFINISHED = {"max_tokens": 20, "ignore_eos": True}
NUM_LAYERS = 3
"""An EAGLE-3 head needs the states of three."""


def _copy_with(source: Path, **changed: Any) -> Path:
    """Return a copy of a model's folder for all tests of a process, with other fields in its configuration."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


@cache
def shallow_demo() -> Path:
    """Return a folder with the demo model's first layers."""
    folder = _copy_with(MODEL_DIRECTORY, num_hidden_layers=NUM_LAYERS)
    others = tuple(f"model.layers.{index}." for index in range(NUM_LAYERS, read_model_spec(MODEL_DIRECTORY).num_layers))
    tensors = load_file(MODEL_DIRECTORY / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}
    save_file(kept, folder / "model.safetensors")
    return folder


@cache
def shallow_head() -> Path:
    """Return a folder with the demo model's head, which reads the states of the shallow one."""
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [*range(1, NUM_LAYERS + 1)]}
    return _copy_with(HEAD_DIRECTORY, eagle_config=layers)


def make_llm(**settings: Any) -> LLM:
    """Return an engine of the shallow demo model."""
    given: dict[str, Any] = {"model": str(shallow_demo()), **SETTINGS, **settings}
    return LLM(**given)


class PlainDecoding:
    """Decoding without drafts. What it generates is kept: most tests ask for the same."""

    def __init__(self) -> None:
        self._llm = make_llm()
        self._known: dict[str, list[RequestOutput]] = {}

    def generate(self, prompts: Sequence[Any], params: Any) -> list[RequestOutput]:
        key = repr((prompts, params))
        if key not in self._known:
            self._known[key] = self._llm.generate(prompts, params)
        return self._known[key]


@cache
def plain_decoding() -> PlainDecoding:
    """Return the one of all tests of a process."""
    return PlainDecoding()


def scores(outputs: list[RequestOutput]) -> list[float]:
    """Return all log-probabilities of the outputs."""
    several = [one for output in outputs for one in output.outputs]
    return [entry.logprob for one in several for row in one.logprobs or () for entry in row.values()]


def texts(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            one.logprobs and [list(row) for row in one.logprobs],
        )
        for output in outputs
        for one in output.outputs
    ]
