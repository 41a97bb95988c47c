"""Sessions over engines of the demo model's first layers on several ranks (threads), and requests that compare them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from drafted_requests import shallow_demo
from thread_ranks import engine_on_threads

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.build import build_engine
from phonograph.engine.core import EngineCore
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.engine.session import Session, grammar_compiler
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.text.tokenizer import load_tokenizer

SETTINGS: dict[str, Any] = {
    **{"model": str(shallow_demo()), "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8},
    **{"num_kv_blocks": 128, "max_cudagraph_capture_size": 8, "max_model_len": 512, "seed": 0},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def plan_of(size: int, **settings: Any) -> EnginePlan:
    config = EngineConfig(**{**SETTINGS, "tensor_parallel_size": size, **settings})
    return make_plan(config, read_configured_model(config, config_only=False), known_device("cpu"))


@contextmanager
def session_of(size: int, **settings: Any) -> Generator[Session]:
    """Yield a session over an engine of some ranks."""
    plan = plan_of(size, **settings)
    if size == 1:
        yield make_session(plan, build_engine(plan).core)
    else:
        with engine_on_threads(plan) as engine:
            yield make_session(plan, engine.core)


def make_session(plan: EnginePlan, core: EngineCore) -> Session:
    tokenizer = load_tokenizer(plan.config)
    return Session(core, plan.model, tokenizer, 0, grammar_compiler(lambda: tokenizer, plan.model, plan.config))


def finish(session: Session) -> None:
    while session.has_unfinished:
        session.step()


def generate(session: Session, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    outputs = [session.add(*pair) for pair in zip(prompts, params, strict=True)]
    finish(session)
    assert all(output.error is None for output in outputs)
    return outputs


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 2048, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts(2, 1, 9, 40, 75, 3, 18)
PARAMS = [SamplingParams(temperature=0.8, seed=index, max_tokens=16, ignore_eos=True) for index in range(6)]
PARAMS[2] = PARAMS[5] = GREEDY
