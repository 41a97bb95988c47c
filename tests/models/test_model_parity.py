"""The decoder against transformers: the same logits at every position, and the same greedy tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, LLAMA3_ROPE, VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from transformers import AutoModelForCausalLM, PreTrainedModel

from phonograph.models.spec import read_model_spec

TOLERANCE = 1e-4
UNSCALED_TOLERANCE = 3e-4
"""Tolerance of Gemma 4: its attention scores are not scaled down, so that their rounding counts for more."""
ORIGINAL = "original_max_position_embeddings"


def load_both(
    family: str, folder: Path, *, seed: int | None = None, **overrides: object
) -> tuple[PreTrainedModel, DenseSequences]:
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    print(f"seed {seed}")
    random.seed(seed)
    torch.manual_seed(seed)
    reference = make_checkpoint(family, folder, seed=seed, **overrides)
    spec = read_model_spec(folder)
    decoder = load_model(spec, folder, dtype=torch.float32, device=torch.device("cpu"))
    return reference, DenseSequences(decoder)


def random_tokens(count: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_ragged_chunked_run_with_a_cached_prefix(family: str, tmp_path: Path) -> None:
    reference, sequences = load_both(family, tmp_path, max_shard_size=random.choice(["40KB", "5GB"]))
    prompts = [random_tokens(length) for length in (61, 1, 40, 17)]
    for _ in prompts:
        sequences.add()
    got: list[list[torch.Tensor]] = [[] for _ in prompts]
    shared = 29
    while any(sequences.lengths[i] < len(prompt) for i, prompt in enumerate(prompts)):
        if len(prompts) == 4 and sequences.lengths[0] >= shared:
            sequences.add(prefix_of=0, prefix_len=shared)
            prompts.append(prompts[0][:shared] + random_tokens(22))
            got.append([])
        chunks: list[tuple[int, list[int]]] = []
        for i in random.sample(range(len(prompts)), len(prompts)):
            done = sequences.lengths[i]
            chunk = prompts[i][done : done + random.randint(0, 13)]
            if chunk:
                chunks.append((i, chunk))
        if chunks:
            for (i, _), logits in zip(chunks, sequences.step(chunks), strict=True):
                got[i].append(logits)
    assert len(prompts) == 5
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        actual = torch.cat(got[i])
        assert len(actual) == len(prompt) - (shared if i == 4 else 0)
        assert expected.std() > 0.5
        tolerance = UNSCALED_TOLERANCE if "gemma4" in family else TOLERANCE
        torch.testing.assert_close(actual, expected[-len(actual) :], rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_128_greedy_tokens(family: str, tmp_path: Path) -> None:
    # A seed of its own: among thousands of random tokens, now and then two are as likely to the last bit.
    reference, sequences = load_both(family, tmp_path, seed=1)
    prompts = [random_tokens(23), random_tokens(5)]
    chunks = [(sequences.add(), prompt) for prompt in prompts]
    tokens: list[list[int]] = [[], []]
    for _ in range(128):
        for i, logits in enumerate(sequences.step(chunks)):
            tokens[i].append(int(logits[-1].argmax()))
        chunks = [(i, [tokens[i][-1]]) for i in range(len(prompts))]
    for prompt, got in zip(prompts, tokens, strict=True):
        # Each token is the likeliest after those before it: transformers' greedy answer.
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + got])).logits[0]
        assert got == logits[len(prompt) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_other_rotary_scalings(rope: dict[str, object], tmp_path: Path) -> None:
    parameters = {**rope, "rope_theta": 1000.0, "original_max_position_embeddings": 32}
    reference, sequences = load_both("llama3", tmp_path, rope_parameters=parameters)
    prompt = random_tokens(90)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    (actual,) = sequences.step([(sequences.add(), prompt)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "olmo2", "gemma3"])
def test_half_precision_is_no_worse_than_that_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference, _ = load_both(family, tmp_path)
    prompt = random_tokens(50)
    decoder = load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=torch.device("cpu"))
    sequences = DenseSequences(decoder)
    (actual,) = sequences.step([(sequences.add(), prompt)])
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0]
        theirs = reference.to(dtype)(torch.tensor([prompt])).logits[0]
    assert actual.dtype == dtype
    error, their_error = (actual - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error < 1.2 * their_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_of_embeddings_is_rounded_first(dtype: torch.dtype, tmp_path: Path) -> None:
    """The root of 96 has more digits than 16 bits hold."""
    reference = make_checkpoint("gemma2", tmp_path, hidden_size=96)
    decoder = load_model(read_model_spec(tmp_path), tmp_path, dtype=dtype, device=torch.device("cpu"))
    ids = torch.arange(VOCAB_SIZE)
    with torch.inference_mode():
        expected = reference.to(dtype).get_input_embeddings()(ids)
        assert torch.equal(decoder.embedding(ids).hidden_TE, expected)


@pytest.mark.parametrize(
    ("length", "is_long", "given"), [(30, False, {}), (90, True, {}), (90, True, {"attention_factor": 1.7})]
)
def test_longrope_by_length(length: int, is_long: bool, given: dict[str, float], tmp_path: Path) -> None:
    """A table of more positions than the original length has the long factors at every position."""
    factors = {"short_factor": [1.0, 1.3, 1.1, 2.0], "long_factor": [1.5, 4.0, 3.0, 2.5]}
    parameters = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, **factors} | given
    settings = {"rope_parameters": parameters, ORIGINAL: 40, "max_position_embeddings": 160}
    reference = make_checkpoint("phi3", tmp_path, **settings)
    spec = read_model_spec(tmp_path)
    assert spec.context_length == 160 and "longrope: max_model_len of 40 or less" in spec.notes[0]
    decoder = load_model(
        spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"), max_positions=length if is_long else 40
    )
    sequences, prompt = DenseSequences(decoder), random_tokens(length)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    (actual,) = sequences.step([(sequences.add(), prompt)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key not in ("rope_theta", ORIGINAL)}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 16}),
        (
            "qwen2",
            {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5},
        ),
        ("llama2", {"rope_theta": 1000.0, "rope_scaling": YARN, ORIGINAL: 32}),
        ("qwen3", {"rope_theta": 1000.0, "rope_scaling": {**YARN, ORIGINAL: 64}, ORIGINAL: 32}),
        ("llama2", {"rope_theta": 1000.0, "rope_scaling": LLAMA3, ORIGINAL: 32}),
        ("qwen2", {"head_dim": 32}),
        # Older files of Phi-3, Gemma 3 and OLMo 3.
        (
            "phi3",
            {
                "partial_rotary_factor": 0.25,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
                ORIGINAL: 64,
            },
        ),
        (
            "gemma3",
            {
                "layer_types": None,
                "sliding_window_pattern": 2,
                "rope_theta": 3000.0,
                "rope_local_base_freq": 50.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        # The length outside is that of types that scale by it.
        (
            "ministral3",
            {
                "rope_scaling": {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.3, ORIGINAL: 16},
                ORIGINAL: 8,
            },
        ),
        ("olmo3", {"rope_theta": 500000.0, "rope_scaling": {**YARN, ORIGINAL: 32}}),
    ],
)
def test_config_files_build_the_model_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Compares with the model that transformers makes of a file changed after it was written."""
    shapes = {name: changes[name] for name in ("head_dim",) if name in changes}
    make_checkpoint(family, tmp_path, num_key_value_heads=2, **shapes)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, **changes}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    spec = read_model_spec(tmp_path)
    sequences = DenseSequences(load_model(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu")))
    prompt = random_tokens(90)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    (actual,) = sequences.step([(sequences.add(), prompt)])
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
