"""A GPU's parts of BART, in Triton's interpreter where there is no GPU, and on one next to transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bart_checkpoint import START, VOCAB_SIZE, make_bart
from host_runtime import CallRuntime, HostRing

from phonograph import LLM, SamplingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.token_types import EncoderTokens
from phonograph.engine import build
from phonograph.engine.plan import make_plan
from phonograph.engine.session import Session
from phonograph.graphs.verification import verify
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.spec import read_model_spec
from phonograph.structured.compiler import GrammarCompiler

cuda_platform = pytest.importorskip("phonograph.engine.startup.cuda_platform")

PAGE = 16
POSITIONS = 2 * PAGE + 3
LENGTHS = 1, POSITIONS, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE
NEAR = 0.03
"""Half precision against float32: log-probabilities, and by how much a token may be behind the best."""


class HostPlatform(cuda_platform.CudaPlatform):
    """A GPU's parts, with tensors in host memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), make_runtime=lambda device, scratch: CallRuntime(), make_ring=HostRing)

    def compile(self, launch: object) -> None:
        """Launch nothing: the interpreter would take minutes for every kernel of every shape."""


def texts() -> list[EncoderTokens]:
    rng = np.random.default_rng(0)
    starts = [START], [START], [START, 7, 8], [START], [START, *[9] * 11], [START]
    return [
        EncoderTokens(start, rng.integers(4, VOCAB_SIZE, length)) for start, length in zip(starts, LENGTHS, strict=True)
    ]


def check(model: Any, text: EncoderTokens, output: Any, near: float) -> None:
    """Each token is that of transformers in float32 or a near tie, with its log-probability."""
    tokens = output.outputs[0].token_ids
    with torch.no_grad():
        ids = torch.tensor([[*text, *tokens]])
        logits = model(torch.from_numpy(text.features)[None], decoder_input_ids=ids).logits[0]
    wanted = logits.log_softmax(-1)[len(text) - 1 : -1]
    for row, token, found in zip(wanted, tokens, output.outputs[0].logprobs, strict=True):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=near)
        assert float(row.max() - row[token]) < near


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the next test runs")
def test_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of all lengths together: one token, around the ends of pages, and the longest."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    model = make_bart(tmp_path, encoder_layers=1, decoder_layers=2, max_position_embeddings=POSITIONS)
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        dtype="float16",
        max_num_seqs=3,
        max_num_batched_tokens=24,
        block_size=PAGE,
        cudagraph_capture_sizes=[3, 24],
        num_kv_blocks=30,
    )
    device = replace(known_device("h200"), capability=(8, 0))
    engine = build.build_engine(make_plan(config, read_model_spec(tmp_path), device), platform=HostPlatform())
    report = verify(engine.make_subject(), num_replays=3, seed=0)
    assert report.ok, report.mismatches
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    outputs = [session.add(text, params) for text in texts()]
    while session.has_unfinished:
        session.step()
    for text, output in zip(texts(), outputs, strict=True):
        check(model, text, output, NEAR)
    assert set(engine.core.runner.counts) == {"full mixed", "full decode"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "dtype"), [("FULL", "float16"), ("FULL", "bfloat16"), ("PIECEWISE", "float16"), ("NONE", "float16")]
)
def test_on_a_gpu(mode: str, dtype: str, tmp_path: Path) -> None:
    model = make_bart(tmp_path, max_position_embeddings=POSITIONS)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    near = NEAR if dtype == "float16" else 0.25
    settings: dict[str, Any] = {"max_num_seqs": 5, "num_kv_blocks": 64, "block_size": PAGE}
    with LLM(str(tmp_path), dtype=dtype, cudagraph_mode=mode, **settings) as llm:
        if mode != "NONE":
            report = llm.verify(num_replays=30)
            assert report.ok, report.mismatches
        for text, output in zip(texts(), llm.generate(texts(), params, use_tqdm=False), strict=True):
            check(model, text, output, near)
        check(model, texts()[4], llm.generate(texts()[4], params, use_tqdm=False)[0], near)
