"""Matrices whose sizes are not a multiple of the integers in a word: refused by name, or rounded up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model, make_checkpoint
from quantized_checkpoints import FORMATS, Format, quantize_checkpoint

from phonograph.errors import PhonographError, UnsupportedModelError
from phonograph.kernels.torch.grouped import dequantize
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.quantization_config import read_quantization
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.file_format import match_format


def scheme_of(name: str, **changes: Any) -> Scheme:
    scheme = read_quantization(FORMATS[name].config | changes).scheme
    assert not isinstance(scheme, dict)
    return scheme  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("scheme", "packed", "whole", "odd"),
    [
        (scheme_of("gptq", bits=4), 8, (24, 40), [(25, 40), (28, 40), (24, 36)]),
        (scheme_of("gptq", bits=8), 4, (12, 20), [(14, 20), (12, 22)]),
        (scheme_of("awq"), 8, (24, 40), [(28, 40), (23, 40)]),
        (scheme_of("packed zeros"), 8, (24, 41), [(28, 40), (23, 40)]),
    ],
    ids=["GPTQ", "GPTQ of 8 bits", "AWQ", "zeros of compressed-tensors"],
)
def test_refused_sizes_are_named(
    scheme: Scheme, packed: int, whole: tuple[int, int], odd: list[tuple[int, int]]
) -> None:
    for stored in scheme.stored(*whole).values():
        assert 0 not in stored.shape
    for outputs, inputs in odd:
        with pytest.raises(UnsupportedModelError, match=f"{outputs if outputs % packed else inputs}.*multiple"):
            scheme.stored(outputs, inputs)


@pytest.mark.parametrize("name", ["packed", "packed channel", "packed 8 bits"])
@pytest.mark.parametrize("inputs", [104, 105, 107])
def test_the_last_word_of_an_output_may_be_partly_used(name: str, inputs: int, tmp_path: Path) -> None:
    reference = make_checkpoint("llama3", tmp_path, intermediate_size=inputs)
    meant = quantize_checkpoint(tmp_path, FORMATS[name])
    model = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    reference.load_state_dict(meant)
    weights: list[Any] = model.quantized
    assert weights[-1].values.columns() == -(-dequantize(weights[-1].values).shape[1] // 8) * 8
    wanted = reference.model.layers[-1].mlp.down_proj.weight
    torch.testing.assert_close(dequantize(weights[-1].values)[:, :inputs], wanted, rtol=1e-5, atol=1e-6)


def test_groups_of_one_input_are_the_smallest() -> None:
    def scheme(size: int) -> Scheme:
        return read_quantization(Format(method="compressed-tensors", group=size).config).scheme  # pyright: ignore

    assert "groups of 1," in scheme(1).name
    config = Format(method="compressed-tensors", group=1).config
    config["config_groups"]["group_0"]["weights"]["group_size"] = 0
    with pytest.raises(PhonographError, match="group_size"):
        read_quantization(config)


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("gptq order", "GPTQ, 4 bits, groups of 32, symmetric, inputs reordered"),
        ("awq one group", "AWQ, 4 bits, one group, with zeros"),
        ("packed channel", "compressed-tensors, 4 bits, one group, symmetric"),
        ("int8 tensor", "compressed-tensors int8, 8 bits, one group, symmetric, one scale a matrix"),
        ("int8 zeros", "compressed-tensors int8, 8 bits, groups of 32, with zeros"),
    ],
)
def test_names_for_people(name: str, description: str) -> None:
    assert scheme_of(name).name == description


def test_each_module_counts_once_in_the_progress_of_loading(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, intermediate_size=104)
    quantize_checkpoint(tmp_path, FORMATS["packed"])
    steps: list[tuple[int, int]] = []
    spec = read_model_spec(tmp_path)
    load_model(
        spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"), progress=lambda *step: steps.append(step)
    )
    total = len(spec.tensor_shapes()) + 7 * spec.num_layers
    assert steps[-1] == (total, total) and {of for _, of in steps} == {total}


@pytest.mark.parametrize(
    ("name", "stated", "notes"),
    [
        ("gptq", {}, []),
        ("gptq order", {}, []),
        ("gptq order", {"desc_act": False}, ["desc_act=false of quantization_config ignored"]),
        ("gptq zeros", {}, []),
        ("gptq zeros", {"sym": True}, ["sym=true of quantization_config ignored"]),
    ],
)
def test_notes_say_what_a_file_has_otherwise(
    name: str, stated: dict[str, bool], notes: list[str], tmp_path: Path
) -> None:
    make_checkpoint("llama3", tmp_path)
    quantize_checkpoint(tmp_path, FORMATS[name])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= stated
    path.write_text(json.dumps(config))
    found = match_format(read_model_spec(tmp_path), [tmp_path / "model.safetensors"]).notes
    assert [note.partition(":")[0] for note in found] == notes


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_of_gptq_are_those_of_the_file(bits: int) -> None:
    """Zeros that are all the middle need no tensor, in both conventions; one that differs does."""
    scheme = Gptq(bits=bits, group_size=32, version=1)
    for middle in ((1 << (bits - 1)) - 1, 1 << (bits - 1)):
        word = int.from_bytes(bytes([middle | middle << 4 if bits == 4 else middle]) * 4, "little", signed=True)
        words = torch.full((3, 5), word, dtype=torch.int32)
        assert scheme.with_tensor("qzeros", words) == scheme
        words[2, 4] ^= 1
        assert scheme.with_tensor("qzeros", words) == replace(scheme, zeros=True)
    assert scheme.with_tensor("qzeros", torch.zeros(3, 5, dtype=torch.int32)).zeros
    asymmetric = replace(scheme, zeros=True)
    assert asymmetric.with_tensor("qzeros", words) is asymmetric


@pytest.mark.parametrize("group_size", [32, -1])
def test_the_order_of_gptq_is_that_of_the_file(group_size: int) -> None:
    scheme = Gptq(bits=4, group_size=group_size, version=1)
    order_I = torch.arange(96, dtype=torch.int32) // (96 if group_size < 0 else group_size)
    for order in (order_I, order_I[None]):
        assert scheme.with_tensor("g_idx", order) == scheme
    order_I[-1] += 1
    assert scheme.with_tensor("g_idx", order_I) == replace(scheme, ordered=True)
    assert scheme.with_tensor("scales", order_I) == scheme
