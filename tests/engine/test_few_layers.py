"""The layers that are run before a start to compile all kernels: each product in each format, next to each other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from quantized_checkpoints import FORMATS

from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeedForwardWeights

Format = tuple[Any, ...]


class RecordedPart:
    """A part that notes its formats of weights and those of the part after it, which kernels depend on."""

    def __init__(self, part: Any, linears: list[Linear], seen: set[tuple[str, Format, Format]]) -> None:
        self._part, self._seen, self._then = part, seen, None
        self.format = tuple(one.scheme for linear in linears for one in linear.spec.parts)

    @property
    def then(self) -> RecordedPart | None:
        return self._then

    @then.setter
    def then(self, part: RecordedPart | None) -> None:
        self._then = part
        self._part.then = None if part is None else part._part

    def __call__(self, *arguments: Any) -> Any:
        following = () if self._then is None else self._then.format
        self._seen.add((type(self._part).__name__, self.format, following))
        return self._part(*arguments)


class Recorder:
    """A kernel set whose parts are recorded."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.seen: set[tuple[str, Format, Format]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def attention(self, weights: AttentionWeights) -> RecordedPart:
        return RecordedPart(self._kernels.attention(weights), [weights.qkv, weights.output], self.seen)

    def feed_forward(self, weights: FeedForwardWeights) -> RecordedPart:
        return RecordedPart(self._kernels.feed_forward(weights), [weights.gate_up, weights.down], self.seen)

    def experts(self, weights: ExpertsWeights, load_X: object = None) -> RecordedPart:
        return RecordedPart(self._kernels.experts(weights), [*weights.linears], self.seen)


def gguf(folder: Path) -> Path:
    """Write a file like those of type Q4_K_M: the first, the last and every third layer have other types."""

    def kind_of(name: str) -> str:
        layer = re.search(r"layers\.(\d+)\.", name)
        more = layer is not None and int(layer[1]) in (0, 3, 6, 7)
        return "Q8_0" if more and ("v_proj" in name or "down_proj" in name) else "Q4_0"

    write_gguf(folder / "model.gguf", MODEL_DIRECTORY, kind_of)
    return folder / "model.gguf"


def with_dense_layers(*patterns: str) -> Callable[[Path], Path]:
    """Return a writer of a checkpoint with single layers that are not quantized."""

    def write(folder: Path) -> Path:
        shutil.copytree(MODEL_DIRECTORY, folder / "model")
        path = folder / "model" / "config.json"
        name = next(name for name, kind in FORMATS.items() if kind.config.get("format") == "pack-quantized")
        settings = FORMATS[name].config | {"ignore": ["lm_head", *patterns]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
        return folder / "model"

    return write


def uniform(folder: Path) -> Path:
    return MODEL_DIRECTORY


def with_experts(folder: Path) -> Path:
    """Write a configuration whose layers 0 and 4 are dense."""
    shutil.copytree(MODEL_DIRECTORY, folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    kept = {name: config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "eos_token_id")}
    sizes = {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16}
    path.write_text(json.dumps({**kept, **sizes, **names, "mlp_only_layers": [0, 4]}))
    return folder / "model"


MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {
    # with the most layers that are run
    "GGUF": (gguf, 8),
    "a dense layer": (with_dense_layers("re:.*layers[.]4[.].*"), 6),
    "a dense down projection": (with_dense_layers("model.layers.3.mlp.down_proj"), 6),
    "dense layers at both ends": (with_dense_layers("re:.*layers[.][017][.].*"), 6),
    "experts": (with_experts, 6),
    "one format": (uniform, 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_few_layers_see_all_formats_of_weights(name: str, tmp_path: Path) -> None:
    write, most = MODELS[name]
    llm = LLM(
        str(write(tmp_path)),
        device="cpu",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        num_kv_blocks=16,
    )
    runner = llm.engine.core.runner
    model: Any = runner._program.model
    assert len(model._running) == 8
    kernels = model.kernels
    few, served = Recorder(kernels), Recorder(kernels)
    model.bind(few)
    assert len({part.format for layer in model.layers for part in layer[:2]}) >= 2
    with runner._program.few_layers():
        assert len(model._running) <= most
    runner.launch_kernels()
    assert model._running is model.layers
    model.bind(served)
    llm.generate([[5, 6, 7], [8] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
    assert served.seen <= few.seen, "a format that was not seen before serving"
    assert len(served.seen) >= 3
