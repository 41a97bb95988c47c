"""Parts of draft heads: ours in Triton next to torch, over poisoned memory for more rows than are used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import FIRST, HEAD, TARGET
from product_problem import gemm_device

from phonograph.models.heads.eagle import read_eagle
from phonograph.models.heads.shared_weights import share
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.layers.triton_parts import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_TOKENS, MAX_ROWS, LIMIT = 23, 5, 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_bias": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"use_aux_hidden_state": False},
        FIRST,
    ],
    ids=["plain", "normed stream", "one norm", "norms of states", "last state", "first version"],
)
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_both_kernel_sets_agree(changes: dict[str, Any], rows: int, tmp_path: Path) -> None:
    torch.manual_seed(rows)
    method = "eagle" if changes is FIRST else "eagle3"
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    target = Transformer(read_model_spec(tmp_path), torch.float32, DEVICE)
    config = changes if changes is FIRST else HEAD | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    own_tensors = set[str]() if changes is FIRST else {"embed_tokens.weight", "lm_head.weight"}
    spec = read_eagle(tmp_path, target.spec, method=method, tensors=own_tensors).model
    model = Transformer(spec, torch.float32, DEVICE)
    for parameter in (*target.parameters, *model.parameters):
        parameter.normal_(std=0.2).add_(1 if parameter.dim() == 1 else 0)
    share(model, target)
    gpu = gemm_device()._replace(capability=(8, 0))
    workspace = Workspace.make(spec, MAX_TOKENS, MAX_ROWS, torch.float32, DEVICE, gemm_device=gpu)
    tables = rotary_tables(spec, 64, torch.float32, DEVICE)
    assert spec.features is not None
    ids = torch.randint(0, 300, (rows,), device=DEVICE, dtype=torch.int32)
    states, own = (torch.randn(rows, size, device=DEVICE) for size in (spec.features.state_size, spec.hidden_size))
    few = torch.randperm(rows, device=DEVICE)[:MAX_ROWS]
    found: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for kernels in (
            TorchKernels(tables, spec.rms_norm_eps),
            TritonKernels(workspace, tables, spec.rms_norm_eps, device=gpu),
        ):
            for memory in workspace.tensors():
                memory.fill_(torch.nan)
            model.bind(kernels)
            part = model.feature_part
            assert part is not None
            results = [part.join(states.clone()).clone()]
            for features in (results[0], own):
                stream = part(ids, features)
                read = stream.hidden_TE if stream.normed is None else stream.normed
                assert isinstance(read, torch.Tensor)
                results += [stream.hidden_TE.clone(), read.clone()]
            for chosen in (None, few):
                said = torch.full((rows if chosen is None else len(few), spec.hidden_size), torch.nan, device=DEVICE)
                part.next_features(own, chosen, said)
                results.append(said)
            results += [model.logits(own[:MAX_ROWS], None).clone(), model.logits(own, few).clone()]
            found.append(results)
    memory = [value for value in vars(part).values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    planned = spec.features.memory_size(spec.hidden_size) - spec.features.state_size
    assert sum(one.numel() for one in memory) <= MAX_TOKENS * planned
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert ours.shape == wanted.shape and (ours - wanted).norm() < LIMIT * wanted.norm()
