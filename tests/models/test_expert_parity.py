"""Families with experts against transformers: logits, greedy tokens of an engine, and steps with padding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXPERT_FAMILIES, load_model, make_checkpoint
from dense import DenseSequences
from kernel_sets import OwnQueries
from router_gaps import LEAST_GAP, router_gaps
from transformers import PreTrainedModel

from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.kernels.torch.expert_products import add_experts
from phonograph.models.layers import experts as experts_module
from phonograph.models.layers.part_weights import ExpertsWeights
from phonograph.models.spec import read_model_spec

VOCAB_SIZE = read_model_spec("demo").vocab_size
TOLERANCE, PROMPT, ANSWER = 1e-4, 30, 32


def checkpoint(family: str, folder: Path, **overrides: Any) -> tuple[PreTrainedModel, torch.Tensor]:
    """Write a checkpoint whose routers choose clearly, and return the model with a prompt and its greedy answer."""
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        reference = make_checkpoint(family, folder, seed=seed, vocab_size=VOCAB_SIZE, **overrides)
        prompt = torch.randint(VOCAB_SIZE, (1, PROMPT), generator=generator)
        with router_gaps(reference) as gap, torch.no_grad():
            greedy = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None}
            # The answer ends at the first choice that rounding may turn.
            tokens = reference.generate(prompt, stopping_criteria=[lambda *_: gap() <= LEAST_GAP], **greedy)
            reference(tokens)
        if LEAST_GAP < gap() < torch.inf:
            return reference, tokens[0]
    raise AssertionError


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_and_tokens(family: str, tmp_path: Path) -> None:
    """In one step, in chunks after a cached prefix, and from an engine with graphs, chunks and a prefix cache."""
    reference, tokens = checkpoint(family, tmp_path)
    spec = read_model_spec(tmp_path)
    model = load_model(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    # transformers counts no buffers, of which there are the bias of a choice and factors of layers.
    buffers = ("e_score_correction_bias", "layer_scalar")
    counted = sum(shape[0] for name, shape in spec.tensor_shapes().items() if name.endswith(buffers))
    assert reference.num_parameters() == spec.num_parameters - counted
    with torch.no_grad():
        expected = reference(tokens.unsqueeze(0)).logits[0]
    assert expected.std() > 0.5
    sequences, ids = DenseSequences(model), tokens.tolist()
    (whole,) = sequences.step([(sequences.add(), ids)])
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
    after = sequences.add(prefix_of=0, prefix_len=20)
    pieces = [sequences.step([(after, ids[first : first + 7])])[0] for first in range(20, len(ids), 7)]
    torch.testing.assert_close(torch.cat(pieces), expected[20:], rtol=0, atol=TOLERANCE)
    wanted = ids[PROMPT:]
    for mode in ("FULL", "NONE"):
        llm = LLM(
            str(tmp_path),
            tokenizer=str(MODEL_DIRECTORY),
            device="cpu",
            dtype="float32",
            cudagraph_mode=mode,
            max_num_seqs=3,
            max_num_batched_tokens=12,
            block_size=8,
        )
        greedy = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0)
        for _ in range(2):
            answers = llm.generate([ids[:PROMPT], ids[:11], ids[:PROMPT]], greedy)
            assert answers[0].outputs[0].token_ids == answers[2].outputs[0].token_ids == wanted


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@torch.inference_mode()
def test_padding_has_no_experts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after the last token change nothing, even if they are NaN, and only experts of tokens are read.

    The weights of the others become NaN.
    """
    make_checkpoint(family, tmp_path, seed=1)
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    chosen: list[set[int]] = []

    def see(x: torch.Tensor, experts: torch.Tensor, *rest: Any) -> None:
        chosen.append(set(experts.flatten().tolist()))
        add_experts(x, experts, *rest)

    monkeypatch.setattr(experts_module, "add_experts", see)
    positions, ids = torch.zeros(5, dtype=torch.int64), torch.tensor([3, 9, 27, 81, 11], dtype=torch.int32)
    wanted = model.forward(ids[:2], positions[:2], OwnQueries(model)).clone()
    sparse = [layer.feed_forward for layer in model.weights if isinstance(layer.feed_forward, ExpertsWeights)]
    for weights, seen in zip(sparse, [*chosen], strict=True):
        assert len(seen) < weights.spec.routing.num_experts
        for linear in (weights.gate_up, weights.down):
            by_expert = linear.matrix.unflatten(1, (weights.spec.routing.num_experts, -1))
            by_expert[:, [expert for expert in range(by_expert.shape[1]) if expert not in seen]] = torch.nan
    assert isinstance(model.embedding_VE, torch.Tensor)
    model.embedding_VE[ids[2:].long()] = torch.nan
    real = torch.tensor([2], dtype=torch.int32)
    found = model.forward(ids, positions, OwnQueries(model), num_rows=real)
    torch.testing.assert_close(found[:2], wanted)
    assert chosen[len(sparse) :] == chosen[: len(sparse)]


@torch.inference_mode()
def test_all_tokens_on_one_expert(tmp_path: Path) -> None:
    """Equal logits go to the lower id, and the other experts are not read."""
    make_checkpoint("mixtral", tmp_path)
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    weights = [layer.feed_forward for layer in model.weights]
    for one in weights:
        one.router.matrix.zero_()
    ids, positions = torch.arange(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    wanted = model.forward(ids, positions, OwnQueries(model)).clone()
    for one in weights:
        for linear in (one.gate_up, one.down):
            linear.matrix[:, linear.spec.expert_outputs :] = torch.nan
    assert wanted.isfinite().all() and torch.equal(model.forward(ids, positions, OwnQueries(model)), wanted)
