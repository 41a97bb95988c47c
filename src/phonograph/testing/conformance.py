"""Conformance of a backend: its outputs on batches of difficult shapes, compared with the oracle's.

It ships with the package, so that authors of other backends can run it:

    results = check_backend(MyBackend, spec, torch.device("cuda"))
    assert all(result.passed for result in results), [str(result) for result in results]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Limits, MakeBackend
from phonograph.testing.conformance_batch import BatchShape, shapes_of
from phonograph.testing.inputs import Poison, RigInputs
from phonograph.testing.judge import LayerResult, judge_layers
from phonograph.testing.rig import Rig


def check_backend(
    make: MakeBackend,
    spec: AttentionSpec,
    device: torch.device,
    *,
    shapes: Sequence[BatchShape] = (),
    seed: int = 0,
) -> list[LayerResult]:
    """Run each batch shape, without a graph, through a layer of each window of `spec`.

    The backend must not refuse `spec`. The shapes are by default those of `shapes_of`.
    """
    shapes = shapes or shapes_of(spec)
    limits = Limits(
        max_num_seqs=max(len(shape.query_lens) + shape.padded_reqs for shape in shapes),
        max_num_batched_tokens=max(sum(shape.query_lens) + shape.padded_tokens for shape in shapes),
        max_model_len=max(max(shape.seq_lens, default=1) for shape in shapes),
    )
    inputs = RigInputs(spec, device, limits, seed, spec.windows)
    rig = Rig(make, inputs)
    results: list[LayerResult] = []
    for shape in shapes:
        batch = inputs.draw(shape, None)
        # Without a graph a builder may read the batch's tensors.
        outputs = rig.eager(None, batch, Poison(batch=False))
        judged = judge_layers(inputs, batch, outputs, len(batch.query))
        results += [replace(result, name=shape.name) for result in judged]
    return results
