"""Loading: every weight once and in its place, without a second copy; and what is said about files that are broken."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXPERT_FAMILIES, FAMILIES, load_model, make_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from phonograph.errors import ConfigError, WeightError
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights import loading as load_module

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(folder: Path, **settings: Any) -> Transformer:
    return load_model(read_model_spec(folder), folder, **{"dtype": torch.float32, "device": CPU, **settings})


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_destinations_cover_every_weight_once(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    decoder = Transformer(read_model_spec(tmp_path), torch.float32, CPU)
    destinations = decoder.destinations()
    assert destinations.keys() == decoder.spec.tensor_shapes().keys()
    for parameter in decoder.parameters:
        parameter.zero_()
    for view in destinations.values():
        view.add_(1)
    assert all((parameter == 1).all() for parameter in decoder.parameters)
    num_weights = sum(parameter.numel() for parameter in decoder.parameters)
    assert num_weights == sum(view.numel() for view in destinations.values())


@pytest.mark.parametrize("family", ["gemma3", "olmo2"])
def test_norms_in_float32_are_counted(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    spec = read_model_spec(tmp_path)
    model = Transformer(spec, torch.bfloat16, CPU)
    heads = 0 if family == "olmo2" else sum(weights.mixer.head_norms.nbytes for weights in model.weights)
    # Norms of each head are stored once a head.
    stored = sum(4 * 2 * spec.layers[0].attention.head_size for _ in spec.layers) if heads else 0
    assert model.final_norm.dtype is torch.float32
    taken = sum(parameter.nbytes for parameter in model.parameters) - heads + stored
    assert spec.weight_bytes("bfloat16") == taken


@pytest.mark.parametrize("max_shard_size", ["30KB", "5GB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_in_their_places(max_shard_size: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = make_checkpoint("qwen3", tmp_path, max_shard_size=max_shard_size, attention_bias=True)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (max_shard_size == "30KB")
    steps: list[tuple[int, int]] = []
    decoder = load(tmp_path, dtype=dtype, progress=lambda done, total: steps.append((done, total)))
    weights = dict(reference.named_parameters())
    for name, view in decoder.destinations().items():
        torch.testing.assert_close(view, weights[name].to(dtype).expand(view.shape), rtol=0, atol=0)
    assert steps == [(i + 1, len(weights)) for i in range(len(weights))]


def test_untied_weights_from_half_precision_files_with_harmless_extras(tmp_path: Path) -> None:
    reference = make_checkpoint("llama2", tmp_path)
    tensors = {name: weight.detach().bfloat16() for name, weight in reference.named_parameters()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    save_file(tensors, tmp_path / "model.safetensors")
    views = load(tmp_path).destinations()
    torch.testing.assert_close(views["lm_head.weight"], tensors["lm_head.weight"].float(), rtol=0, atol=0)
    assert not torch.equal(views["lm_head.weight"], views["model.embed_tokens.weight"])


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("head", ["equal", "alone", "different"])
def test_tied_embeddings_are_matched_with_the_files_as_in_transformers(head: str, files: int, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    lm_head = {"lm_head.weight": embedding + 1 if head == "different" else embedding.clone()}
    if head == "alone":
        del tensors["model.embed_tokens.weight"]
    if files == 1:
        save_file({**tensors, **lm_head}, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        (tmp_path / "model.safetensors").unlink()
        save_file(tensors, tmp_path / "model-1.safetensors", {"format": "pt"})
        save_file(lm_head, tmp_path / "model-2.safetensors", {"format": "pt"})
        places = {**dict.fromkeys(tensors, "model-1.safetensors"), "lm_head.weight": "model-2.safetensors"}
        (tmp_path / load_module.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    decoder = load(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(decoder.embedding_VE, reference.model.embed_tokens.weight)
    head_EV = decoder.lm_head.matrix
    assert torch.equal(head_EV.t(), reference.lm_head.weight)
    tied = decoder.embedding_VE.data_ptr() == head_EV.data_ptr()
    assert tied == (head != "different") == decoder.spec.tie_word_embeddings
    assert (head == "different") == any("tie_word_embeddings" in note for note in decoder.spec.notes)


def test_a_head_of_another_shape_than_tied_embeddings_is_refused(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"lm_head.weight in .*has shape \[3, 3\]"):
        load(tmp_path)


def test_one_tensor_of_the_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama3", tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched:
        """safe_open, but it sees whether the tensors it gave out before are gone."""

        def __init__(self, file: Path, **settings: Any) -> None:
            self._file = safe_open(file, **settings)

        def __enter__(self) -> Watched:
            self._file.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self._file.__exit__(*exception)

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = self._file.get_tensor(name)
            alive.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(load_module, "safe_open", Watched)
    load(tmp_path)
    assert len(alive) == len(read_model_spec(tmp_path).tensor_shapes())


# In a process of its own: in this one, what earlier tests freed may be taken again without being seen.
MEMORY_OF_LOADING = """
import sys
from pathlib import Path

import torch

from phonograph.models.weights.loading import begin_loading
from phonograph.models.spec import read_model_spec


def anonymous_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


folder = Path(sys.argv[1])
spec, seen = read_model_spec(folder), []
before = anonymous_memory()
watch = lambda done, total: seen.append(anonymous_memory())
with begin_loading(spec, folder, dtype=torch.float32, device=torch.device("cpu"), progress=watch) as loading:
    loading.finish()
print(max(seen) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux tells it")
def test_weights_are_held_once(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, hidden_size=512, intermediate_size=1024, vocab_size=12_000)
    spec = read_model_spec(tmp_path)
    command = [sys.executable, "-c", MEMORY_OF_LOADING, str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = spec.weight_bytes("float32")
    largest = 4 * spec.vocab_size * spec.hidden_size
    assert weights * 0.7 < grown < weights + 0.5 * largest


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def garble_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, garble_header, empty])
@pytest.mark.parametrize("max_shard_size", ["40KB", "5GB"])
def test_damaged_files(damage: Callable[[Path], None], max_shard_size: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, max_shard_size=max_shard_size)
    damaged = sorted(tmp_path.glob("*.safetensors"))[-1]
    damage(damaged)
    with pytest.raises(WeightError, match=f"{damaged.name} is truncated or corrupt"):
        load(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, max_shard_size="40KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(WeightError, match=rf"{gone.name} is missing.*model\."):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.safetensors"}}', "[]"],
)
def test_unusable_index(content: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    (tmp_path / load_module.INDEX_FILE).write_text(content)
    with pytest.raises(WeightError, match="not a usable index"):
        load(tmp_path)


def test_tensor_that_the_index_promises_is_missing(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, max_shard_size="40KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(WeightError, match=f"tensor {name} .*{file.name}"):
        load(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    first = tmp_path / "model.safetensors"
    shutil.copy(first, tmp_path / "model-00002.safetensors")
    first.rename(tmp_path / "model-00001.safetensors")
    with pytest.raises(WeightError, match=r"model-00001\.safetensors and .*model-00002\.safetensors"):
        load(tmp_path)


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, rf"tensor {DOWN} \[64, 88\].*missing"),
        (lambda tensor: tensor.t().contiguous(), rf"{DOWN} in .*model.safetensors has shape \[88, 64\].*\[64, 88\]"),
        (lambda tensor: tensor[:-1].clone(), rf"{DOWN} .*\[63, 88\].*\[64, 88\]"),
        (lambda tensor: tensor[None].clone(), rf"{DOWN} .*\[1, 64, 88\]"),
        (lambda tensor: tensor.to(torch.int8), rf"{DOWN} .*int8; expected float32"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), rf"{DOWN} .*float8_e4m3fn; expected float32"),
    ],
)
def test_wrong_tensors(change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop(DOWN))
    save_file(tensors if changed is None else {**tensors, DOWN: changed}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=message):
        load(tmp_path)


def test_norms_of_heads_are_not_broadcast_from_other_shapes(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"q_norm.weight .*\[1\].*\[16\]"):
        load(tmp_path)


def test_unexpected_tensor(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"q_proj.bias in .*model.safetensors is not part of this LlamaForCausalLM"):
        load(tmp_path)


def test_other_formats_and_no_files(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="no .*safetensors files.*dummy"):
        load(tmp_path)
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(b"\x00")
        with pytest.raises(WeightError, match=f"{name}.*convert them to safetensors"):
            load(tmp_path)
        (tmp_path / name).unlink()


def test_unknown_load_format(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match="load_format='gguf'.*dummy"):
        load(tmp_path, load_format="gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_need_a_config_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, hidden_size=96)
    (tmp_path / "model.safetensors").unlink()
    first, second, other = (load(tmp_path, load_format="dummy", seed=seed, dtype=dtype) for seed in (7, 7, 8))
    for name, view in first.destinations().items():
        assert torch.equal(view, second.destinations()[name])
        if name.endswith("norm.weight"):
            assert (view == 1).all()
        else:
            assert not torch.equal(view, other.destinations()[name])
            assert 0.017 < view.float().std() < 0.023
            assert view.float().mean().abs() < 0.003


def test_rotary_table_as_long_as_asked(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    decoder = load(tmp_path, max_positions=700)
    args = (torch.tensor([3]), torch.tensor([699]), lambda query, key, value, layer: query.contiguous())
    with torch.inference_mode():
        assert decoder.forward(*args).isfinite().all()
        with pytest.raises(IndexError):
            load(tmp_path).forward(*args)


def test_the_index_names_the_tensors_of_the_files(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, max_shard_size="40KB")
    weight_map = json.loads((tmp_path / load_module.INDEX_FILE).read_text())["weight_map"]
    files = load_module.weight_files(tmp_path)
    assert {name: file.name for file, names in files.items() for name in names} == weight_map


def with_scales(folder: Path, scales: Tensors) -> Path:
    make_checkpoint("llama3", folder)
    file = next(folder.glob("*.safetensors"))
    save_file({**load_file(file), **scales}, file)
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.kv_scale", None),
        ("self_attn.kv_cache_scaling_factor", None),
    ],
)
def test_scales_of_an_fp8_cache(key: str, value: str | None, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path / "plain")
    spec = read_model_spec(tmp_path / "plain")
    scales: Tensors = {}
    for layer in range(spec.num_layers):
        scales[f"model.layers.{layer}.{key}"] = torch.tensor(0.5 + layer)
        if value is not None:
            scales[f"model.layers.{layer}.{value}"] = torch.arange(1.0, 1 + spec.layers[0].attention.num_kv_heads)
    loaded = load(with_scales(tmp_path, scales)).kv_scales
    assert [loaded.keys[layer].tolist() for layer in range(spec.num_layers)] == [
        [0.5 + layer] * spec.layers[0].attention.num_kv_heads for layer in range(spec.num_layers)
    ]
    wanted = (
        loaded.keys[1].tolist()
        if value is None
        else [1.0 + head for head in range(spec.layers[0].attention.num_kv_heads)]
    )
    assert loaded.values[1].tolist() == wanted


@pytest.mark.parametrize(
    "name", ["self_attn.q_scale", "self_attn.attn.q_scale", "self_attn.q_proj.q_scale", "self_attn.q_proj.output_scale"]
)
def test_scales_of_queries(name: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path / "plain")
    spec = read_model_spec(tmp_path / "plain")
    heads, group = (
        spec.layers[0].attention.num_query_heads,
        spec.layers[0].attention.num_query_heads // spec.layers[0].attention.num_kv_heads,
    )
    assert group > 1
    scales = {f"model.layers.{layer}.{name}": torch.tensor(0.5) for layer in range(spec.num_layers)}
    scales[f"model.layers.0.{name}"] = torch.arange(1.0, 1 + heads).view(heads, 1, 1)
    loaded = load(with_scales(tmp_path, scales)).kv_scales
    assert loaded.queries[0].tolist() == [
        float(group * (1 + head)) for head in range(spec.layers[0].attention.num_kv_heads)
    ]
    assert loaded.queries[1].tolist() == [0.5] * spec.layers[0].attention.num_kv_heads
    assert not loaded.keys and not loaded.values
    del scales[f"model.layers.1.{name}"]
    with pytest.raises(WeightError, match="none for the queries of layer 1"):
        load(with_scales(tmp_path / "some", scales))


@pytest.mark.parametrize(
    ("name", "scale", "layers", "words"),
    [
        ("kv_scale", torch.tensor(0.0), None, "above 0"),
        ("kv_scale", torch.tensor(torch.nan), None, "above 0"),
        ("kv_scale", torch.ones(7), None, "one number, or one for each"),
        ("kv_scale", torch.ones(1), 1, "none for the keys of layer 1"),
        ("kv_scale", torch.ones(1), 99, "some for layer"),
        ("k_scale", torch.ones(1), None, "none for the values of layer 0"),
        ("k_scale", torch.ones(1), 1, "none for the keys of layer 1"),
        ("v_scale", torch.ones(1), None, "none for the keys of layer 0"),
    ],
)
def test_scales_that_do_not_work(
    name: str, scale: torch.Tensor, layers: int | None, words: str, tmp_path: Path
) -> None:
    make_checkpoint("llama3", tmp_path / "plain")
    count = layers if layers is not None else read_model_spec(tmp_path / "plain").num_layers
    names = [f"model.layers.{layer}.self_attn.{name}" for layer in range(count)]
    with pytest.raises(WeightError, match=words):
        load(with_scales(tmp_path, {name: scale.clone() for name in names}))


SPELLINGS = {
    "keys": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale", "kv_cache_scaling_factor"),
    "values": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale", "attn.kv_scale"),
    "queries": ("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale"),
}


@pytest.mark.parametrize("part", SPELLINGS)
@pytest.mark.parametrize("in_two_files", [False, True])
def test_a_scale_is_given_once(part: str, in_two_files: bool, tmp_path: Path) -> None:
    """A second spelling in the same file, or the same name in another shard, is refused with the names of both."""
    make_checkpoint("llama3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    whole = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(2) if part != "queries"}
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    rng = random.Random(part)
    for _ in range(3):
        first, second = (rng.choice(SPELLINGS[part]), None) if in_two_files else rng.sample(SPELLINGS[part], 2)
        names = [f"model.layers.1.self_attn.{name}" for name in (first, second or first)]
        scales = {names[0]: torch.tensor(0.5), names[1]: torch.tensor(7.0)}
        rest = {} if any("kv_" in name for name in names) else {k: v for k, v in whole.items() if ".0." in k}
        save_file({**weights, **rest, **scales}, tmp_path / "a.safetensors")
        if in_two_files:
            save_file({names[0]: torch.tensor(7.0)}, tmp_path / "b.safetensors")
        with pytest.raises(WeightError) as raised:
            load(tmp_path)
        said = str(raised.value)
        assert f"both scale the {part} of layer 1" in said or "both scale the keys of layer 1" in said
        assert all(name in said for name in names) and ("b.safetensors" in said) == in_two_files


@pytest.mark.parametrize("name", ["attn.prob_scale", "prob_scale", "prob_output_scale"])
def test_scales_of_probabilities_have_no_use_here(name: str, tmp_path: Path) -> None:
    scale = {f"model.layers.{layer}.self_attn.{name}": torch.tensor(0.3) for layer in range(2)}
    spec = read_model_spec(with_scales(tmp_path, scale))
    with load_module.begin_loading(spec, tmp_path, dtype=torch.float32, device=CPU) as loading:
        loading.finish()
    (note,) = loading.notes
    assert f"does not use: model.layers.0.self_attn.{name}" in note
    assert not loading.model.kv_scales.sources


def test_tensors_of_a_shard_that_the_index_leaves_out_are_not_used(tmp_path: Path) -> None:
    """As in transformers, which is asked for the logits' weights; a tensor that the index names is still refused."""
    make_checkpoint("llama3", tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64), "model.visual.patch.weight": torch.ones(3)}
    save_file({**load_file(shard), **extra}, shard, metadata={"format": "pt"})
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    spec = read_model_spec(tmp_path)
    with load_module.begin_loading(spec, tmp_path, dtype=torch.float32, device=CPU) as loading:
        loading.finish()
    for name, view in loading.model.destinations().items():
        assert torch.equal(view, theirs[name].expand(view.shape))
    (note,) = loading.notes
    assert "model.layers.0.self_attn.q_proj.bias" in note and "model.visual.patch.weight" in note
    index = json.loads((tmp_path / load_module.INDEX_FILE).read_text())
    index["weight_map"]["model.visual.patch.weight"] = shard.name
    (tmp_path / load_module.INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(WeightError, match="model.visual.patch.weight in .* is not part of this LlamaForCausalLM"):
        load(tmp_path)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_weights_beyond_float16_are_named(source: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: tensor.to(source) for name, tensor in load_file(file).items()}
    name = random.choice(sorted(weights))
    changed = weights[name].clone()
    changed.view(-1)[random.randrange(changed.numel())] = -7e4
    save_file({**weights, name: changed}, file)
    with pytest.raises(WeightError, match=rf"tensor {name} has numbers up to (70000|70144), and the largest float16"):
        load(tmp_path, dtype=torch.float16)
    for dtype in (torch.bfloat16, torch.float32):
        load(tmp_path, dtype=dtype)
    save_file({**weights, name: changed.clamp(-65000)}, file)
    assert load(tmp_path, dtype=torch.float16).destinations()[name].isfinite().all()


@pytest.mark.parametrize(
    ("largest", "dtype", "words"),
    [
        (1e39, torch.float32, "largest float32 is 3.40282e.38; no type here has them"),
        (1e39, torch.bfloat16, "largest bfloat16 is 3.38953e.38; no type here has them"),
        (3.4e38, torch.bfloat16, "largest bfloat16 is 3.38953e.38; dtype float32 works"),
        (1e38, torch.float16, "largest float16 is 65504; dtype bfloat16 or float32 works"),
    ],
)
def test_weights_beyond_any_type_are_named(largest: float, dtype: torch.dtype, words: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name: tensor.double() for name, tensor in load_file(file).items()}
    name = random.choice(sorted(weights))
    weights[name].view(-1)[random.randrange(weights[name].numel())] = -largest
    save_file(weights, file)
    with pytest.raises(WeightError, match=rf"tensor {name} has numbers up to .*{words}"):
        load(tmp_path, dtype=dtype)
