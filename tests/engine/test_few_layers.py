"""The layers that are run before a start to compile all kernels: each product in each format, beside each other."""

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


class Recorder:
    """A kernel set that notes the formats of weights that each operation sees, which kernels depend on."""

    def __init__(self, kernels: Any, formats: dict[int, Any]) -> None:
        self._kernels = kernels
        self._formats = formats
        self.seen: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._kernels, name)

        def noted(*arguments: Any, **keywords: Any) -> Any:
            operands = [getattr(one, "linear", one) for one in (*arguments, *keywords.values())]
            self.seen.add((name, *(self._formats.get(id(one)) for one in operands)))
            return operation(*arguments, **keywords)

        return noted


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


MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {
    # with the most layers that are run
    "GGUF": (gguf, 8),
    "a dense layer": (with_dense_layers("re:.*layers[.]4[.].*"), 6),
    "a dense down projection": (with_dense_layers("model.layers.3.mlp.down_proj"), 6),
    "dense layers at both ends": (with_dense_layers("re:.*layers[.][017][.].*"), 6),
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
    model, spec = runner._program.model, llm.plan.model
    formats: dict[int, Any] = {}
    for index, layer in enumerate(model.layers):
        for matrix, product in zip(
            spec.matrices(index), (layer.qkv.linear, layer.output, layer.gate_up.linear, layer.down), strict=True
        ):
            parts = tuple(spec.scheme_of(f"{matrix.prefix}.{part}") for part in matrix.parts)
            formats[id(product)] = tuple(matrix.parts), parts
    every = model._indices
    assert len(every) == 8 and len(set(formats.values())) >= 4
    model.bind(Recorder(model.kernels, formats))  # pyright: ignore[reportArgumentType]
    few = model.kernels
    with runner._program.few_layers():
        assert len(model._indices) <= most
    runner.launch_kernels()
    assert model._indices is every
    model.bind(Recorder(few._kernels, formats))  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    llm.generate([[5, 6, 7], [8] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
    served: Any = model.kernels
    assert {one for one in served.seen if any(one[1:])} <= few.seen, "a format that was not seen before serving"
