"""A GPU's parts of Whisper, in Triton's interpreter where there is no GPU, and on one next to transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from host_runtime import CallRuntime, HostRing
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from whisper_checkpoint import START, make_whisper

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

LENGTHS = [2, 33, 3, 17, 5]
NO_TIMES = 79
"""Token of prompts after which the model writes no timestamps, which are the tokens above."""
NEAR = 0.03
"""Half precision against float32: log-probabilities, and by how much a token may be behind the best."""


class HostPlatform(cuda_platform.CudaPlatform):
    """A GPU's parts, with tensors in host memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), make_runtime=lambda device, scratch: CallRuntime(), make_ring=HostRing)

    def compile(self, launch: object) -> None:
        """Launch nothing: the interpreter would take minutes for every kernel of every shape."""


def audio_prompts(seconds: int = 1) -> list[EncoderTokens]:
    rng = np.random.default_rng(0)
    return [
        EncoderTokens(
            [START, *rng.integers(4, NO_TIMES, length - 2).tolist(), NO_TIMES],
            rng.standard_normal((80, 100 * seconds)).astype(np.float32),
        )
        for length in LENGTHS
    ]


def make_timed(folder: Path, **changes: Any) -> Any:
    """Write a checkpoint whose vocabulary has timestamps."""
    model = make_whisper(folder, **changes)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "no_timestamps_token_id": NO_TIMES}))
    return model


def timed(prompt: EncoderTokens) -> EncoderTokens:
    return EncoderTokens(prompt[:-1], prompt.features)


def check(model: Any, prompt: EncoderTokens, output: Any, near: float) -> None:
    """Each token is that of transformers in float32 or a near tie, with its log-probability."""
    tokens = output.outputs[0].token_ids
    with torch.no_grad():
        states = model.model.encoder(torch.from_numpy(prompt.features)[None])
        logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    times = NO_TIMES + 1
    settings = GenerationConfig(eos_token_id=2, no_timestamps_token_id=NO_TIMES)
    processor = WhisperTimeStampLogitsProcessor(settings, begin_index=len(prompt))
    for place, (row, token, found) in enumerate(zip(wanted, tokens, output.outputs[0].logprobs, strict=True)):
        assert found[token].logprob == pytest.approx(float(row[token]), abs=near)
        if NO_TIMES not in prompt:
            before: Any = torch.tensor([[*prompt, *tokens[:place]]])
            margin = float(row[times:].logsumexp(0) - row[:times].max())
            ruled = processor(before, cast("Any", row[None]))[0]
            assert abs(margin) < near or float(ruled.max() - ruled[token]) < near
        else:
            assert float(row.max() - row[token]) < near


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, on which the next test runs")
def test_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder in batches of 2 and 1, chunks of prompts, mixed steps whose last layer leaves rows out, decodes."""
    monkeypatch.setattr("phonograph.models.layers.triton_parts._FEW_TOKENS", 8)
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    model = make_timed(tmp_path, encoder_layers=1, decoder_layers=2)
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        dtype="float16",
        max_num_seqs=3,
        max_num_batched_tokens=24,
        block_size=16,
        cudagraph_capture_sizes=[3, 24],
        num_kv_blocks=30,
    )
    device = replace(known_device("h200"), capability=(8, 0))
    plan = make_plan(config, read_model_spec(tmp_path), device)
    assert any("for up to 2 audios" in note for note in plan.notes)
    engine = build.build_engine(plan, platform=HostPlatform())
    report = verify(engine.make_subject(), num_replays=5, seed=0)
    assert report.ok, report.mismatches
    assert [str(key) for key in report.replays][-2:] == ["encoder[100 tokens, 2 slots]", "encoder[50 tokens, 1 slot]"]
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    prompts = audio_prompts()
    outputs = [session.add(prompt, params) for prompt in prompts]
    # The last one has a step at which all times together are likelier than the likeliest token, which is of text.
    prompts += [timed(prompt) for prompt in prompts[3:]]
    outputs += [session.add(prompt, params.with_checked(max_tokens=7)) for prompt in prompts[5:]]
    while session.has_unfinished:
        session.step()
    for prompt, output in zip(prompts, outputs, strict=True):
        check(model, prompt, output, NEAR)
    assert set(engine.core.runner.counts) == {"full mixed", "full decode"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("FULL", "float16"),
        ("FULL", "bfloat16"),
        ("FULL_AND_PIECEWISE", "float16"),
        ("FULL_DECODE_ONLY", "float16"),
        ("PIECEWISE", "float16"),
        ("NONE", "float16"),
    ],
)
def test_on_a_gpu(mode: str, dtype: str, tmp_path: Path) -> None:
    """Alone and in batches of 5, next to transformers; an encoder in graphs, also of 50 positions and 1,500."""
    seconds = 30 if mode == "FULL" else 1
    model = make_timed(tmp_path, max_source_positions=50 * seconds)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompts = audio_prompts(seconds)
    near = NEAR if dtype == "float16" else 0.25
    # Steps of more than 128 tokens leave rows out of the last layer, after its cross attention.
    settings: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 256, "num_kv_blocks": 160}
    with LLM(str(tmp_path), dtype=dtype, cudagraph_mode=mode, **settings) as llm:
        if mode != "NONE":
            report = llm.verify(num_replays=30)
            assert report.ok, report.mismatches
        llm.step_counts.clear()
        together = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            check(model, prompt, output, near)
        for alone in (prompts[1], timed(prompts[4])):
            check(model, alone, llm.generate(alone, params, use_tqdm=False)[0], near)
        long = [EncoderTokens([START, *[7 + index] * 43, NO_TIMES], prompts[index].features) for index in range(5)]
        for prompt, output in zip(long, llm.generate(long, params, use_tqdm=False), strict=True):
            check(model, prompt, output, near)
        if mode == "FULL":
            assert set(llm.step_counts) == {"full mixed", "full decode"}


@pytest.mark.gpu
def test_tokens_in_float32_on_a_gpu(tmp_path: Path) -> None:
    """Attention without a Triton kernel, the encoder in graphs."""
    model = make_whisper(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    prompts = audio_prompts()
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=5, num_kv_blocks=64) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
            check(model, prompt, output, 1e-3)
