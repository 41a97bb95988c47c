"""Everything that runs on a GPU, from the scheduler to the kernels, in Triton's interpreter: graphs are calls there.

The GPU's own tests compare the same on a GPU, with graphs; here it is seen that the parts fit, wherever tests run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads
import fake_flashinfer
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from fake_memory_driver import FakeMemoryDriver
from gguf_files import write_gguf
from group_driver import GroupDriver
from host_runtime import CallRuntime, HostRing, tiles_of_small_models
from quantized_checkpoints import FORMATS, quantize_checkpoint
from triton.runtime.interpreter import GridExecutor

from phonograph.attention.triton.backend import TritonBackend
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import BeamStep, SamplingParams
from phonograph.engine import build, plan
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import make_plan
from phonograph.engine.session import Session
from phonograph.engine.startup import start as engine_start
from phonograph.errors import CaptureError
from phonograph.graphs.verification import verify
from phonograph.kernels.triton.attention import decode_plan
from phonograph.kernels.triton.gemm import bound_product, choose
from phonograph.kernels.triton.gemm.product_plan import GemmSmallMConfig, ProductPlan, ProductShape, WeightFormat
from phonograph.kernels.triton.step.step_layout import EARLY_ROW
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.quantization import mxfp4
from phonograph.models.spec import read_model_spec
from phonograph.runner import runner
from phonograph.runner.pools.kv_pool import allocate_kv_pool
from phonograph.scheduling import prompt_tails
from phonograph.structured.compiler import GrammarCompiler

cuda_platform = pytest.importorskip("phonograph.engine.startup.cuda_platform")
run_engine = pytest.importorskip("phonograph.engine.process.run_engine")
triton_parts = pytest.importorskip("phonograph.models.layers.triton_parts")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, on which tests/engine run all of this"
)
NEAR = 0.03
"""Half precision against float32: log-probabilities, and by how much a token may be behind the best."""


class HostPlatform(cuda_platform.CudaPlatform):
    """A GPU's parts, with tensors in host memory."""

    def __init__(self, make_runtime: Callable[[], CallRuntime] = lambda: CallRuntime(lazily=True)) -> None:
        device = torch.device("cpu")
        self.drivers: list[FakeMemoryDriver] = []
        super().__init__(
            device,
            make_runtime=lambda device, scratch: make_runtime(),
            make_ring=HostRing,
            make_memory_driver=self._make_driver,
        )

    def _make_driver(self) -> FakeMemoryDriver:
        self.drivers.append(FakeMemoryDriver(64 << 20))
        return self.drivers[-1]

    def compile(self, launch: object) -> None:
        """Launch nothing: the interpreter would take minutes for every kernel of every shape."""


@pytest.fixture(autouse=True)
def matrices(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Weights as they lie on a GPU, and tiles for the interpreter."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    with tiles_of_small_models():
        yield


def start_engine(
    folder: Path, sizes: Sequence[int] = (1, 3, 24), platform: HostPlatform | None = None, **settings: Any
) -> build.Engine:
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        max_num_seqs=3,
        num_kv_blocks=40,
        block_size=16,
        cudagraph_capture_sizes=list(sizes),
        **{
            "dtype": "float16",
            "max_model_len": 256,
            "max_num_batched_tokens": 40,
            "cascade_attention": "off",
            **settings,
        },
    )
    device = replace(known_device("h200"), capability=(8, 0))
    return build.build_engine(make_plan(config, read_model_spec(folder), device), platform=platform or HostPlatform())


def start(
    folder: Path, sizes: Sequence[int] = (1, 3, 24), platform: HostPlatform | None = None
) -> tuple[Session, Counter[str]]:
    engine = start_engine(folder, sizes, platform)
    model = engine.plan.model
    session = Session(engine.core, model, None, 0, GrammarCompiler(lambda: None, tuple(model.eos_token_ids)))
    return session, engine.core.runner.counts


def finish(session: Session, *outputs: RequestOutput) -> None:
    while session.has_unfinished:
        session.step()
    assert all(output.finished and output.error is None for output in outputs)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reference: Any, output: RequestOutput) -> None:
    """Each token is the best, or as good, after those before it; and so are the log-probabilities."""
    with torch.inference_mode():
        for completion in output.outputs:
            whole = torch.tensor([output.prompt_token_ids + completion.token_ids])
            scores_TV = reference(whole).logits[0].double().log_softmax(-1)
            rows_TV = scores_TV[len(output.prompt_token_ids) - 1 : -1]
            chosen = rows_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (rows_TV.amax(1) - chosen).max() <= NEAR
            pairs = [*zip(completion.logprobs or (), rows_TV, strict=completion.logprobs is not None)]
            pairs += zip((output.prompt_logprobs or [None])[1:], scores_TV, strict=False)
            for row, wanted_V in pairs:
                assert row is not None
                got = torch.tensor(row.logprobs, dtype=torch.float64)
                assert (got - wanted_V[torch.tensor(row.token_ids)]).abs().max() <= NEAR


class FailingRuntime(CallRuntime):
    """Graphs as calls, where a library has something left to load: the first capture is refused."""

    refused = False

    def capture(self, function: Any) -> Any:
        if not self.refused:
            self.refused = True
            raise CaptureError("operation not permitted when stream is capturing")
        return super().capture(function)


def log_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each kernel that is launched from now on."""
    launches, launch = list[str](), GridExecutor.__call__

    def logged(self: Any, *args: Any, **keywords: Any) -> Any:
        launches.append(self.fn.__name__)
        return launch(self, *args, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", logged)
    return launches


def reads_of(engine: build.Engine) -> Counter[str]:
    """Return how often results were read: "early", as the step sent them before the passes, or "read" behind it."""
    sampling: Any = engine.core.runner._sampling
    return Counter(line.split()[0] for line in sampling._ring.log)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2_moe", "glm4_moe"])
def test_a_whole_engine(family: str, tmp_path: Path) -> None:
    """Chunks, mixed batches, prefixes found again, more requests than slots, samples, scored prompts."""
    reference = make_checkpoint(family, tmp_path, **HEADS)
    session, counts = start(tmp_path, platform=HostPlatform(CallRuntime) if family == "qwen3" else None)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    shared = prompt(0, 33)
    first = session.add(shared + prompt(1, 20), greedy)
    session.step()
    more = [
        session.add(prompt(2, 2), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)),
        session.add(prompt(3, 11), SamplingParams(temperature=0.0, max_tokens=3, logprobs=4, ignore_eos=True)),
        session.add(prompt(4, 50), SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)),
    ]
    finish(session, first, *more)
    again = session.add(shared + prompt(5, 9), greedy)
    finish(session, again)
    for output in (first, *more, again):
        check(reference, output)
    assert again.num_cached_tokens == 32 and {"full decode", "full mixed", "eager"} <= set(counts)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "lfm2", "falcon_h1", "nemotron_h"])
def test_state_layers(family: str, tmp_path: Path) -> None:
    """In float32: prompts in chunks, in batches with decodes, and from a checkpoint; graphs equal eager steps."""
    sizes: dict[str, Any] = {"head_dim": 64, "num_key_value_heads": 2}
    if family == "nemotron_h":
        # The shared expert has the size of the others, and is one of them.
        sizes |= {"moe_shared_expert_intermediate_size": 24}
        sizes |= {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]}
    if family == "falcon_h1":
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if family.startswith("qwen"):
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    if family == "qwen3_next":
        sizes |= {"shared_expert_intermediate_size": 24}
    reference = make_checkpoint(family, tmp_path, **sizes)
    engine = start_engine(tmp_path, dtype="float32")
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    shared = prompt(0, 36)
    outputs = [session.add(one, greedy) for one in (shared + prompt(1, 25), prompt(2, 1), prompt(3, 17), prompt(4, 2))]
    finish(session, *outputs)
    again = [session.add(shared + prompt(seed, 9), greedy) for seed in (5, 6)]
    finish(session, *again)
    for output in (*outputs, *again):
        check(reference, output)
    assert [output.num_cached_tokens for output in again] == [0, 32]
    report = verify(engine.make_subject(), num_replays=3, seed=0)
    assert report.ok, report.mismatches


def deferring(shape: ProductShape, weights: WeightFormat, rows: int, *args: Any, **keywords: Any) -> ProductPlan:
    """Return the plan of a product, which defers norms as in bfloat16: the interpreter multiplies that wrongly."""
    chosen = choose.choose(shape, weights, rows, *args, **keywords)
    return chosen._replace(defers_norms=isinstance(chosen.kernel, GemmSmallMConfig))


@pytest.mark.parametrize(
    ("family", "norms", "barrier"),
    [
        *(("qwen3_next", (5, 2), barrier) for barrier in (True, False)),
        *((family, (2, 2), True) for family in ("lfm2", "nemotron_h", "bamba")),
        ("falcon_h1", (4, 4), True),
    ],
)
def test_decodes_of_state_layers(
    family: str, norms: tuple[int, int], barrier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of decodes has one launch of a convolution, or none of its own, and padding rows write nothing.

    A gated delta net has none if the schedule of attention is a barrier.

    `norms` are launches of norms in steps of three rows and of one: the first, the last, those before experts of three
    rows, and those before attention and a mixer that read the same rows.
    """
    sizes: dict[str, Any] = {"head_dim": 64, "num_key_value_heads": 2}
    if family == "qwen3_next":
        sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 24}
    if family == "nemotron_h":
        sizes |= {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]}
    if family == "falcon_h1":
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1}
    reference = make_checkpoint(family, tmp_path, **sizes)
    # Users cannot have float16, and graphs of decodes are in 16 bits. Of these only bfloat16 has deferred norms.
    monkeypatch.setattr(plan, "check_states", lambda *args: None)
    monkeypatch.setattr(bound_product, "choose", deferring)
    launches = log_launches(monkeypatch)
    monkeypatch.setattr(TritonBackend, "schedule_is_barrier", barrier)
    engine = start_engine(tmp_path, (1, 3))
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
    outputs = [session.add(prompt(1, 9), greedy), session.add(prompt(2, 2), replace(greedy, max_tokens=3))]
    finish(session, *outputs)
    for output in outputs:
        check(reference, output)
    steps = [step.split() for step in " ".join(launches).split("_prepare_kernel")[-4:]]
    assert engine.core.runner.counts["full decode"] == 4 and "_history_kernel" in launches
    for step in steps:
        kernel, other = ("delta_decode_kernel", "_conv_kernel")[:: 1 if family == "qwen3_next" and barrier else -1]
        assert step.count(kernel) == len(engine.plan.model.states) and other not in step
        assert "_history_kernel" not in step
    assert [step.count("_norm_kernel") for step in steps] == [norms[0]] * 2 + [norms[1]] * 2


def test_samples_share_their_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes attend it once, as records of the steps say, and its end is copied."""
    # Prefixes worth sharing would take minutes here.
    monkeypatch.setattr(decode_plan, "MIN_SHARED", decode_plan.tl.constexpr(64))
    monkeypatch.setattr(decode_plan, "_SHARING_COST", decode_plan.tl.constexpr(0))
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    reference = make_checkpoint("qwen3", tmp_path, **HEADS | {"num_hidden_layers": 1})
    engine = start_engine(tmp_path, (3,), cascade_attention="auto", max_num_batched_tokens=200)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    records: list[StepRecord] = []
    engine.core.on_step = records.append
    params = SamplingParams(n=3, max_tokens=2, temperature=0.0, logprobs=1, ignore_eos=True)
    output = session.add(prompt(7, 200), params)
    finish(session, output)
    check(reference, output)
    assert [record.prefill_lens for record in records] == [[200], [1, 1], []]
    # A tile of 6 rows in each of two KV heads, and one for each sequence. For the last two it does not pay.
    assert [(record.shared_units, record.own_units) for record in records] == [(0, 0), (2, 6), (0, 4)]


def test_graphs_for_shared_prefixes_run_once_these_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps after the first one that shares, as that one's counts come with its tokens."""
    monkeypatch.setattr(decode_plan, "MIN_SHARED", decode_plan.tl.constexpr(64))
    monkeypatch.setattr(decode_plan, "_SHARING_COST", decode_plan.tl.constexpr(0))
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    monkeypatch.setattr(runner, "PREFIX_TILES_FROM", 3)
    monkeypatch.setattr(runner, "PREFIX_TILES_WORK", 2)
    monkeypatch.setattr(TritonCapabilities, "sharing_graphs", lambda *_: 3)
    reference = make_checkpoint("qwen3", tmp_path, **HEADS | {"num_hidden_layers": 1})
    engine = start_engine(tmp_path, (3,), cascade_attention="auto", max_num_batched_tokens=200)
    assert [str(key) for key in engine.plan.captures.sharing] == ["decode[3 tokens, 3 slots, shared prefixes]"]
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    records: list[StepRecord] = []
    engine.core.on_step = records.append
    output = session.add(
        prompt(7, 200), SamplingParams(n=3, max_tokens=6, temperature=0.0, logprobs=1, ignore_eos=True)
    )
    finish(session, output)
    check(reference, output)
    shares = [record.shared_units > 0 for record in records]
    first = shares.index(True)
    graphs = ["share prefixes" in record.cause for record in records]
    # At the end one sequence has all of its tokens.
    assert graphs == [index >= first + 2 and record.num_decodes == 3 for index, record in enumerate(records)], records
    assert sum(graphs) == 3


def test_the_whole_vocabulary_and_a_step_of_a_beam_search(tmp_path: Path) -> None:
    """Next to a request that asks for few log-probabilities: those of all tokens, and of the likeliest allowed ones."""
    reference = make_checkpoint("qwen3", tmp_path, **HEADS, num_hidden_layers=1)
    engine = start_engine(tmp_path, (3,))
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    base = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=-1)
    allowed = sorted({*range(5, VOCAB_SIZE, 7)})
    steps = replace(base, allowed_token_ids=allowed, beam_step=BeamStep(1, 3))
    whole, beam, few = (
        session.add([*prompt(8, 11), allowed[2]], one) for one in (base, steps, replace(base, logprobs=2))
    )
    finish(session, whole, beam, few)
    check(reference, whole)
    check(reference, few)
    (position,), (kept,), (two,) = (one.outputs[0].logprobs or () for one in (whole, beam, few))
    assert len(position) == VOCAB_SIZE and sum(math.exp(one.logprob) for one in position.values()) == pytest.approx(1)
    assert all(position[token_id] == one for token_id, one in two.items())
    likeliest = sorted(allowed, key=lambda token_id: -position[token_id].logprob)[:3]
    assert [*kept] == likeliest and beam.outputs[0].token_ids == likeliest[:1]
    assert [kept[one].logprob for one in likeliest] == pytest.approx([position[one].logprob for one in likeliest])


def test_speculation(tmp_path: Path) -> None:
    """Prompts that repeat are looked up on the device, and graphs with drafts equal eager steps."""
    reference = make_checkpoint("qwen3", tmp_path, **HEADS, num_hidden_layers=1)
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = start_engine(tmp_path, (3, 9), speculative_config=speculation)
    report = verify(engine.make_subject(), num_replays=8, seed=0)
    assert report.ok, report.mismatches
    assert {key.query_len for key in report.replays} >= {1, 3}
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    outputs = [
        session.add(prompt(0, 3) * 3, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)),
        session.add(prompt(1, 2) * 4, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)),
        session.add(prompt(2, 5), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)),
        session.add(prompt(3, 1) * 30, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)),
    ]
    finish(session, *outputs)
    for output in outputs:
        check(reference, output)
    assert engine.core.scheduler.stats.drafts.verified > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_on_flashinfer(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step after drafts is sent when these are known, so that plans of the host have exact lengths."""
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr("phonograph.attention.flashinfer.backend._NO_GPU", ((8, 0), fake_flashinfer.NUM_SMS))
    monkeypatch.setattr("phonograph.attention.flashinfer.capabilities.find_spec", lambda name: name)
    reference = make_checkpoint("qwen3", tmp_path, **HEADS | {"head_dim": 64, "num_hidden_layers": 1})
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 2, "adaptive_depth": False}
    speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    engine = start_engine(tmp_path, (3, 9), attention_backend="flashinfer", speculative_config=speculation)
    assert any("each step waits for the tokens of the one before" in note for note in engine.plan.notes)
    report = verify(engine.make_subject(), num_replays=3, seed=0)
    assert report.ok, report.mismatches
    assert {key.query_len for key in report.replays} >= {1, 3}
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = [session.add(prompt(seed, 3) * 3, params) for seed in range(2)]
    outputs.append(session.add(prompt(5, 4), replace(params, max_tokens=16, speculate=False)))
    overlapped = 0
    while session.has_unfinished:
        session.step()
        overlapped += engine.core.in_flight
    assert overlapped > 2
    for output in outputs:
        check(reference, output)
    counts = engine.core.scheduler.stats.drafts
    assert 0 < counts.accepted < counts.verified
    assert engine.core.runner.counts["full decode"] > 4


def test_a_draft_model_that_is_the_model_is_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the draft model are those of the sequences, and its samples have the noise of the draws.

    Drafts cross the borders of blocks, at which the passes write keys behind the blocks of their step. Requests with a
    grammar, which allows all tokens but one, are sampled behind the step, and have passes of their own. Of a prompt the
    last layer computes only the row whose sample is a draft. Steps without masked rows are read early.
    """
    monkeypatch.setattr(triton_parts, "_FEW_TOKENS", 8)
    make_checkpoint("qwen3", tmp_path, **HEADS, num_hidden_layers=1)
    speculation = {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 2,
        "adaptive_depth": False,
    }
    found: list[list[list[int]]] = []
    launches = log_launches(monkeypatch)
    for settings in ({}, {"speculative_config": speculation}):
        engine = start_engine(tmp_path, (3,), **settings)
        session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
        outputs: list[RequestOutput] = []
        for temperature, free in ((0.0, 13), (0.8, 43)):
            params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=3)
            ruled = replace(params, allowed_token_ids=[*range(1, VOCAB_SIZE)])
            several = [session.add(prompt(n, n), params if n == free else ruled) for n in (13, 43, 2)]
            finish(session, *several)
            outputs += several
        found.append([one.outputs[0].token_ids for one in outputs])
    reads = reads_of(engine)
    assert reads["early"] > 0 and reads["read"] > 3
    sent = [launches[number : number + 3] for number, name in enumerate(launches) if name == "_accept_kernel"]
    in_steps = [names for names in sent if "_send_kernel" in names]
    assert in_steps == [["_accept_kernel", "_send_kernel", "_first_rows_kernel"]] * launches.count("_first_rows_kernel")
    counts = engine.core.scheduler.stats.drafts
    report = verify(engine.make_subject(), num_replays=2, seed=0)
    assert report.ok, report.mismatches
    inputs: Any = engine.core.runner._inputs
    assert inputs.staging[EARLY_ROW : EARLY_ROW + 2].tolist() == [0, 0], "a synthetic batch is sent"
    assert found[0] == found[1]
    assert counts.verified > 24 and counts.accepted >= 0.95 * counts.verified


def test_first_passes_without_a_graph_keep_as_many_rows_as_there_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run kernels that the start has launched, whatever the number of sequences is."""
    monkeypatch.setattr(triton_parts, "_FEW_TOKENS", 8)
    make_checkpoint("qwen3", tmp_path, **HEADS, num_hidden_layers=1)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 1}
    engine = start_engine(tmp_path, (2,), speculative_config=speculation | {"adaptive_depth": False})
    passes: Any = engine.core.runner._program.passes
    forward, kept = passes.model.forward, list[int | None]()

    def logged(ids: Any, positions: Any, attention: Any, rows: Any = None, **keywords: Any) -> Any:
        kept.append(None if rows is None else len(rows))
        return forward(ids, positions, attention, rows, **keywords)

    monkeypatch.setattr(passes.model, "forward", logged)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    finish(session, *(session.add(prompt(count, 16), params) for count in range(2)))
    assert kept[0] == 3, "two prompts without a graph, in an engine of three slots"


def test_samples_copy_the_keys_of_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of their prompt behind two blocks. The draft model is the model, so that its drafts are right."""
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    reference = make_checkpoint("qwen3", tmp_path, **HEADS, num_hidden_layers=1)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    speculation |= {"adaptive_depth": False}
    engine = start_engine(tmp_path, (3,), speculative_config=speculation)
    runner: Any = engine.core.runner
    for cache in runner._program.passes._attentions[0]._kv_caches:
        cache.normal_(std=8)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    records: list[StepRecord] = []
    engine.core.on_step = records.append
    output = session.add(prompt(9, 40), SamplingParams(n=3, temperature=0.0, max_tokens=9, ignore_eos=True))
    finish(session, output)
    check(reference, output)
    assert [record.prefill_lens for record in records if record.prefill_lens] == [[40], [1, 1]]
    counts = engine.core.scheduler.stats.drafts
    assert counts.accepted == counts.verified > 12


def test_drafts_behind_the_end_read_nothing_but_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in flight accepts drafts, so that those of the next one reach behind the last block of a sequence."""

    def allocate(*args: Any, **settings: Any) -> dict[int, torch.Tensor]:
        caches = allocate_kv_pool(*args, **settings)
        for cache in caches.values():
            cache.fill_(float("nan"))
        return caches

    monkeypatch.setattr(build, "allocate_kv_pool", allocate)
    reference = make_checkpoint("qwen3", tmp_path, **HEADS)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = start_engine(tmp_path, (4,), speculative_config=speculation, max_model_len=32)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    output = session.add(prompt(3, 1) * 20, params)
    finish(session, output)
    assert len(output.outputs[0].token_ids) == 12
    check(reference, output)


def test_several_kv_groups(tmp_path: Path) -> None:
    """Freed blocks are NaN: no kernel multiplies a weight of 0 by what is behind a window."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    reference = make_checkpoint("qwen2_window", tmp_path, layer_types=types, sliding_window=20, **HEADS)
    engine = start_engine(tmp_path)
    assert [group.window for group in engine.plan.kv.groups] == [20, 20, None]
    driver = GroupDriver(engine, chunk=24)
    long = driver.add(prompt(0, 59))
    while long.computed < long.prompt_len:
        driver.step(long)
    short = driver.add(prompt(1, 23))
    for _ in range(8):
        driver.step(long, short)
    for hand in (long, short):
        completion = SimpleNamespace(token_ids=hand.tokens[hand.prompt_len :], logprobs=None)
        output: Any = SimpleNamespace(
            prompt_token_ids=hand.tokens[: hand.prompt_len], outputs=[completion], prompt_logprobs=None
        )
        check(reference, output)
    assert long.first_live == [3, 3, 0] and {"full decode", "full mixed"} <= set(driver.runner.counts)


@pytest.mark.parametrize("name", ["gptq order", "packed zeros"])
def test_quantized_weights(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96, **HEADS)
    reference.load_state_dict(quantize_checkpoint(tmp_path, FORMATS[name]))
    session, _ = start(tmp_path, sizes=(2, 16))
    outputs = [
        session.add(prompt(length, length), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        for length in (1, 13)
    ]
    finish(session, *outputs)
    for output in outputs:
        check(reference, output)


@pytest.mark.parametrize("up", ["MXFP4", "Q8_0"])
def test_experts_in_mxfp4_of_a_gguf_file(up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4 bits, and in 8 bits if one of two parts of a matrix has another type."""
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: True)
    reference = make_checkpoint("gpt_oss", tmp_path, **HEADS, intermediate_size=64, num_hidden_layers=2)
    path = tmp_path / "model.gguf"
    kinds = {"up_proj": up, "gate_proj": "MXFP4", "down_proj": "MXFP4"}
    reference.load_state_dict(write_gguf(path, tmp_path, lambda name: kinds.get(name.split(".")[-2], "Q8_0")))
    session, _ = start(path, sizes=(2, 16))
    outputs = [
        session.add(prompt(length, length), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2))
        for length in (1, 13)
    ]
    finish(session, *outputs)
    for output in outputs:
        check(reference, output)


def test_a_second_capture_is_logged_and_an_error_where_graphs_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    platform = HostPlatform(FailingRuntime)
    build_engine = partial(build.build_engine, platform=platform)
    monkeypatch.setattr(engine_start, "build_engine", build_engine)
    monkeypatch.setattr(engine_start, "this_device", lambda kind: known_device("h200"))
    make_checkpoint("llama_bias", tmp_path, **HEADS)
    settings = {
        "model": str(tmp_path),
        "dtype": "float16",
        "max_model_len": 64,
        "max_num_seqs": 1,
        "num_kv_blocks": 8,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1],
    }
    told = "captured at the second try.*: operation not permitted when stream is capturing"
    engine = engine_start.start_engine(EngineConfig(**settings))
    (retry,) = engine.captured.retries
    assert retry.key.num_tokens == 1 and re.search(told, caplog.text)
    facts = run_engine._facts(engine, 1.0)
    assert facts.capture_retries == (retry,) and str(retry) in facts.notes
    monkeypatch.setattr(engine_start, "build_engine", lambda *_: engine)
    with pytest.raises(CaptureError, match=f"verify_graphs: .*{told}"):
        engine_start.start_engine(EngineConfig(**settings, verify_graphs=True))


@pytest.mark.parametrize("name", [None, "gptq order"])
def test_sleep(name: str | None, tmp_path: Path) -> None:
    """Memory is useless while the engine sleeps; weights are read again into the addresses of the first ones."""
    reference = make_checkpoint("qwen2", tmp_path, intermediate_size=96, **HEADS)
    if name is not None:
        reference.load_state_dict(quantize_checkpoint(tmp_path, FORMATS[name]))
    platform = HostPlatform()
    engine = start_engine(tmp_path, (2, 16), platform, enable_sleep_mode=True)
    weights, kv_cache = platform.drivers
    num_chunks = len(weights.mapped), len(kv_cache.mapped)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    assert engine.sleeper is not None and all(num_chunks)
    for level in (2, 1):
        engine.sleeper.sleep(level)
        assert not weights.mapped and not kv_cache.mapped
        engine.sleeper.wake_up()
        assert (len(weights.mapped), len(kv_cache.mapped)) == num_chunks
        output = session.add(prompt(level, 13), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        finish(session, output)
        check(reference, output)


@pytest.mark.parametrize(
    ("method", "changes", "more"),
    [
        ("eagle3", {}, {}),
        ("eagle3", {"norm_before_fc": True, "norm_output": True}, {"allowed_token_ids": [*range(1, VOCAB_SIZE)]}),
        ("eagle", {}, {}),
        ("eagle", {}, {"allowed_token_ids": [*range(1, VOCAB_SIZE)]}),
    ],
    ids=["states", "norms, masked", "first version", "first version, masked"],
)
def test_drafts_of_a_head_are_those_of_a_plain_one(
    method: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt in chunks, and behind decodes: states of the target's layers, tokens shifted by one, d2t.

    Rows with a grammar are sampled behind the step, and have passes of their own. A second sequence copies the end of
    the prompt, with the keys of the head.
    """
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    monkeypatch.setattr(triton_parts, "_FEW_TOKENS", 8)
    torch.manual_seed(3)
    length, said = (57, 9) if method == "eagle3" and not changes else (43, 3)
    target = tmp_path / "target"
    sizes = HEADS | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": VOCAB_SIZE}
    reference = make_checkpoint("llama_bias", target, **sizes)
    sizes |= {"num_hidden_layers": 1, "head_dim": 16, "num_key_value_heads": 4}
    sizes |= {"rms_norm_eps": reference.config.rms_norm_eps}
    head = tmp_path / "head"
    config, tensors = eagle_heads.make_head(head, method, sizes, changes)
    speculation = {"method": method, "model": str(head), "num_speculative_tokens": 2, "adaptive_depth": False}
    engine = start_engine(target, (3,), speculative_config=speculation)
    session = Session(engine.core, engine.plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    params = SamplingParams(temperature=0.0, max_tokens=said + 9, ignore_eos=True, **more)
    output, other = (session.add(prompt(1, length), params) for _ in range(2))
    inputs: Any = engine.core.runner._inputs

    def check_drafts() -> None:
        for slot, one in enumerate((output, other)):
            known = inputs.history[slot, : int(inputs.state.num_computed[slot]) + 1].tolist()
            if len(known) <= length:
                continue  # its prompt is not computed
            text = one.prompt_token_ids + one.outputs[0].token_ids
            assert known[: len(text)] == text
            drafts = inputs.state.drafts[slot].tolist()
            chain = eagle_heads.plain_chain(reference, config, tensors, known, drafts)
            for draft, scores in zip(drafts, chain.logits, strict=True):
                # Half precision may change places of two that are almost equal.
                assert scores[draft] >= scores.max() - NEAR
            last = engine.core.runner._program.passes._features_RE[slot].float()
            assert (last - chain.feature).norm() < NEAR * chain.feature.norm()

    # A step behind the last token of a request would write no keys.
    while len(output.outputs[0].token_ids) < said:
        session.step()
        check_drafts()
    assert (output.num_cached_tokens, other.num_cached_tokens) == (0, length - 1)
    reads = reads_of(engine)
    # The first chunk of the prompt samples no row, and so masks none.
    assert (reads["early"] <= 1 and reads["read"] > 3) if more else (reads["early"] > 3 and not reads["read"])
    for one in (output, other):
        check(reference, one)
