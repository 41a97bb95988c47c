"""A module of transformers as the model of a step: loaded by transformers, with our attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from phonograph.errors import WeightError, shortened
from phonograph.files.model_files import model_path
from phonograph.models.layers.kernel_set import Attend, StepStates
from phonograph.models.modules.module_attention import IMPLEMENTATION, ModuleAttention, set_attention
from phonograph.models.modules.module_experts import set_experts
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.modules.read_module import build_module, cut_module, quiet
from phonograph.models.modules.step_model import StepModel
from phonograph.models.weights.kv_scales import KVScales
from phonograph.models.weights.loading import LoadFormat, Loading, Progress


class ModuleModel(StepModel):
    """A loaded module.

    Args:
        spec: the model.
        module: of the kind that `ModuleSpec.build` makes, with weights.
    """

    def __init__(self, spec: ModuleSpec, module: Any) -> None:
        self.spec = spec
        parameters = dict(module.named_parameters())
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.kv_scales = KVScales()
        self.expert_load = {}
        self._sinks = {
            layer: parameters[call.sinks].detach().float()
            for layer, call in enumerate(spec.calls)
            if call.sinks is not None
        }
        self._attentions = [ModuleAttention(layer, self.dtype) for layer in range(len(spec.calls))]
        for call, attention in zip(spec.calls, self._attentions, strict=True):
            set_attention(module.get_submodule(call.module), attention)
        self._module = cut_module(module)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        rows_P: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        num_kept: torch.Tensor | None = None,
        features_TE: torch.Tensor | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        for attention in self._attentions:
            attention.attend = attend
        return self._module.run(input_ids_T, positions_T)

    def logits(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        logits_NV = self.prompt_logits(hidden_TE if rows_N is None else hidden_TE.index_select(0, rows_N))
        if self.logits_NV is None:
            return logits_NV
        kept_NV = self.logits_NV[: len(logits_NV)]
        return kept_NV.copy_(logits_NV)

    def prompt_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self._module.logits(hidden_NE).to(self.dtype)

    def pooled(self, hidden_TE: torch.Tensor, query_start_loc: torch.Tensor) -> NoReturn:
        raise NotImplementedError("a module of transformers has logits")

    def token_rows(self, hidden_TE: torch.Tensor) -> NoReturn:
        raise NotImplementedError("a module of transformers has logits")

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        return False

    def only_layers(self, indices: Sequence[int]) -> nullcontext[None]:
        """Return a context that changes nothing: all layers run."""
        return nullcontext()

    def sinks(self, layer: int) -> torch.Tensor | None:
        return self._sinks.get(layer)


@contextmanager
def begin_loading_module(
    spec: ModuleSpec,
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
    revision: str | None,
    download_dir: str | None,
    progress: Progress | None = None,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
) -> Generator[Loading[ModuleModel]]:
    """Yield a model that transformers' own loader has loaded; see `begin_loading`. `make_empty` is not used.

    Raises:
        WeightError: the files lack a tensor, or have one that the module does not know.
        ModelError: there is no such model.
    """
    built = build_module(spec.architecture, json.loads(spec.config))
    with quiet(), torch.inference_mode():
        if load_format == "dummy":
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                module = type(built)._from_config(built.config, attn_implementation=IMPLEMENTATION, dtype=dtype)  # pyright: ignore
        else:
            folder = model_path(path, weights=True, revision=revision, download_dir=download_dir)
            module = _read(type(built), folder, built.config, dtype)
        module.to(device)  # pyright: ignore
        set_experts(module)
        model = ModuleModel(spec, module.eval().requires_grad_(False))
    if progress is not None:
        progress(1, 1)
    yield Loading(model, (), lambda: None)


def _read(kind: Any, folder: Path, config: Any, dtype: torch.dtype) -> Any:
    try:
        module, said = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # its loader raises errors of many types
        raise WeightError(f"{folder}: transformers cannot load it ({shortened(str(error))})") from error
    for name, problem in (
        ("missing_keys", "is in none of the files"),
        ("unexpected_keys", f"is not part of this {kind.__name__}"),
        ("mismatched_keys", "has another shape than the configuration asks for"),
    ):
        if said.get(name):
            first = sorted(map(str, said[name]))[0]
            raise WeightError(f"{folder}: tensor {first} {problem}; do config.json and weights belong together?")
    return module
