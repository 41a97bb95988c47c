"""A GPU's parts of a model that generates nothing, in Triton's interpreter where there is no GPU, and on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_checkpoints import expected_rows, make_encoder, random_prompts
from host_runtime import CallRuntime, HostRing

from phonograph import LLM, PoolingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine import build
from phonograph.engine.plan import make_plan
from phonograph.engine.session import Session
from phonograph.graphs.verification import verify
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.spec import read_model_spec
from phonograph.structured.compiler import GrammarCompiler

cuda_platform = pytest.importorskip("phonograph.engine.startup.cuda_platform")

NEAR = 0.02
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2}
RAW = PoolingParams(use_activation=False)


class HostPlatform(cuda_platform.CudaPlatform):
    """A GPU's parts, with tensors in host memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), make_runtime=lambda device, scratch: CallRuntime(), make_ring=HostRing)

    def compile(self, launch: object) -> None:
        """Launch nothing: the interpreter would take minutes for every kernel of every shape."""


def wanted_row(model: Any, prompt: list[int], name: str) -> np.ndarray:
    rows = expected_rows(model, prompt).float()
    return (rows if "classes" in name else rows.mean(0)).numpy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the next test runs")
@pytest.mark.parametrize("name", ["bert_classes", "modernbert"])
def test_a_whole_engine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    model = make_encoder(name, tmp_path, **SIZES)
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        dtype="float16",
        max_num_seqs=3,
        max_num_batched_tokens=70,
        block_size=16,
        cudagraph_capture_sizes=[24, 40],
    )
    device = replace(known_device("h200"), capability=(8, 0))
    engine = build.build_engine(make_plan(config, read_model_spec(tmp_path), device), platform=HostPlatform())
    report = verify(engine.make_subject(), num_replays=2, seed=0)
    assert report.ok, report.mismatches
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    prompts = random_prompts(1, 17, 16, 50, 5)
    outputs = [session.add(prompt, RAW) for prompt in prompts]
    while session.has_unfinished:
        session.step()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None and output.pooled is not None
        assert np.abs(output.pooled - wanted_row(model, prompt, name)).max() < NEAR, len(prompt)
    assert set(engine.core.runner.counts) == {"full mixed", "eager"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "bert_classes", "roberta", "modernbert", "nomic", "embedding_gemma"])
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Full graphs of all steps, with the results of transformers."""
    model = make_encoder(name, tmp_path, **SIZES)
    prompts = random_prompts(1, 17, 16, 50, 5, 64, 2, 33)
    with LLM(str(tmp_path), dtype="float16", max_num_seqs=4, max_num_batched_tokens=128) as llm:
        assert llm.verify(num_replays=20).ok
        llm.step_counts.clear()
        outputs = llm.encode(prompts, RAW, use_tqdm=False)
        assert set(llm.step_counts) == {"full mixed"}
        assert llm.plan.resolution.mode.mixed_full
    for prompt, output in zip(prompts, outputs, strict=True):
        assert np.abs(output.outputs.data - wanted_row(model, prompt, name)).max() < NEAR, len(prompt)
