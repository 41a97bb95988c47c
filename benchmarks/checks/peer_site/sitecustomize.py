"""Changes of vLLM's process that make a comparison fair or possible: Python imports this file at its start.

- Dummy weights have the size of trained ones. vLLM draws all numbers from -0.001 to 0.001, norms and factors of layers
  too, so that the rows of a deep model become equal and choose the same experts: with 32 sequences of Gemma 4 26B-A4B a
  step took less time than the experts of rows that differ take to be read.
- A configuration in which layers differ may be asked for its common values, which vLLM 0.26 does and transformers 5.17
  refuses.

`vs_vllm.py --adapt-peer` puts this folder on the peer's path. It imports neither vLLM nor transformers by itself.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SEED = 1234
_COMMON_VALUES = "allow_global_per_layer_attribute_access"


def draw_weights(param: Any, *_: float, **__: float) -> None:
    """Fill a parameter: matrices by their inputs, so that products keep the size of rows, and vectors with ones."""
    import torch

    if param.device.type == "meta" or not torch.is_floating_point(param):
        return
    if param.dim() < 2:
        param.data.fill_(1)
        return
    bound = (3 / param.shape[-1]) ** 0.5
    generator = torch.Generator(device=param.device).manual_seed(SEED)
    if torch.finfo(param.dtype).bits < 16:
        drawn = torch.empty(param.shape, dtype=torch.bfloat16, device=param.device)
        param.data.copy_(drawn.uniform_(-bound, bound, generator=generator).to(param.dtype))
    else:
        param.data.uniform_(-bound, bound, generator=generator)


def _change_weights(module: ModuleType) -> None:
    vars(module)["initialize_single_dummy_weight"] = draw_weights
    print("dummy weights have the size of trained ones", file=sys.stderr)


def _change_configurations(module: ModuleType) -> None:
    setattr(module.HeterogeneousConfigMixin, _COMMON_VALUES, property(lambda self: True))


class _AfterImport(MetaPathFinder):
    """Changes modules as soon as they are imported."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if change is not None else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(
    0,
    _AfterImport(
        {
            "vllm.model_executor.model_loader.weight_utils": _change_weights,
            "transformers.integrations.heterogeneity.configuration_utils": _change_configurations,
        }
    ),
)
