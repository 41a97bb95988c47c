"""Forms of quantized weights on a CPU: models compute what their files mean, in the bytes that the plan counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, bind_torch, make_checkpoint
from dense import DenseSequences
from gguf_files import write_gguf
from quantized_checkpoints import FORMATS, quantize_checkpoint

from phonograph.models.layers.linear import Linear
from phonograph.models.quantization.block_embedding import BlockEmbedding
from phonograph.models.quantization.cpu_weights import CpuProducts, Int4Weight
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES
from phonograph.models.quantization.unquantized import DenseWeight
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading

INT4 = CpuProducts(int4=True, dequantize=True, operator_rows=4, tile_dtype="bfloat16", reason="a test")
FLOAT32 = CpuProducts(int4=False, dequantize=True, reason="a test")
GROUPS = CpuProducts(int4=False, dequantize=False, reason="a test")


def load(spec: ModelSpec, path: Path, products: CpuProducts, load_format: str = "auto") -> Transformer:
    with begin_loading(
        products.with_head(spec),
        path,
        dtype=torch.float32,
        device=torch.device("cpu"),
        load_format=load_format,  # pyright: ignore[reportArgumentType]
        cpu_products=products,
    ) as loading:
        loading.finish()
    return bind_torch(loading.model)


def logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    sequences = DenseSequences(model)
    sequences.add()
    return torch.cat([*sequences.step([(0, tokens[:-1])]), *sequences.step([(0, tokens[-1:])])])


def linears(model: Transformer) -> Iterator[Linear]:
    for layer in model.weights:
        yield from layer.linears
    yield model.lm_head


def held_bytes(model: Transformer) -> int:
    """Return the bytes of the model's tensors, each once."""
    tensors = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters}
    for linear in linears(model):
        weight = linear.weight
        if isinstance(weight, Int4Weight):
            tensors[weight.packed.packed_PW.data_ptr()] = weight.packed.nbytes
            if weight.order_I is not None:
                tensors[weight.order_I.data_ptr()] = weight.order_I.nbytes
        elif isinstance(weight, DenseWeight):
            tensors[weight.matrix_IO.data_ptr()] = weight.matrix_IO.nbytes
    if isinstance(model.embedding_VE, BlockEmbedding):
        tensors[model.embedding_VE.rows_VB.data_ptr()] = model.embedding_VE.rows_VB.nbytes
    return sum(tensors.values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("products", [INT4, FLOAT32], ids=["int4", "float32"])
def test_checkpoints(name: str, products: CpuProducts, tmp_path: Path) -> None:
    reference = make_checkpoint("qwen2", tmp_path, seed=len(name), intermediate_size=112)
    reference.load_state_dict(quantize_checkpoint(tmp_path, FORMATS[name]))
    spec = read_model_spec(tmp_path)
    model = load(spec, tmp_path, products)
    form, forms = FORMATS[name], [type(linear.weight) for linear in linears(model)]
    if form.group > 0:
        packs = products is INT4 and not form.scales and form.group % (32 if form.bits == 4 else 16) == 0
        assert set(forms[:-1]) == {Int4Weight if packs else DenseWeight}
    elif products is INT4 and not form.scales:
        # 64 inputs in one group have a packed form, and 112 have none in 4 bits.
        assert Int4Weight in forms and (DenseWeight in forms[:-1]) == (form.bits == 4)
    tokens = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    bound = 1e-4 if Int4Weight not in forms else 3e-2
    assert (logits(model, tokens) - wanted).norm() <= bound * wanted.norm()
    if products is FLOAT32:
        assert products.weight_bytes(spec, "float32") == held_bytes(model)
    else:
        # Outputs are rounded up to blocks for each part of a fused matrix, and the order is counted for each part.
        assert 0 <= products.weight_bytes(spec, "float32") - held_bytes(model) <= 0.35 * held_bytes(model)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_gguf(family: str, kind: str, tmp_path: Path) -> None:
    """The head is packed too, from blocks of its own or those of the embedding, which then stays in the file."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    reference = make_checkpoint(family, tmp_path, seed=len(kind), **sizes)
    path = tmp_path / "model.gguf"
    reference.load_state_dict(write_gguf(path, tmp_path, lambda _: kind), strict=False)
    reference.tie_weights()
    spec = read_model_spec(path)
    model = load(spec, path, INT4)
    assert {type(linear.weight) for linear in linears(model)} == {Int4Weight}
    assert isinstance(model.embedding_VE, BlockEmbedding) == spec.tie_word_embeddings
    # The plan counts a norm of heads once; outputs are rounded up to blocks of 64, for each part of a fused matrix.
    heads = [layer.mixer.head_norms for layer in model.weights]
    norms = sum(one.nbytes for one in heads if one is not None)
    planned, held = INT4.weight_bytes(INT4.with_head(spec), "float32"), held_bytes(model)
    assert -norms <= planned - held <= 0.1 * held
    tokens = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    if isinstance(model.embedding_VE, BlockEmbedding):
        looked_up = model.embedding_VE.lookup(torch.tensor(tokens))
        assert (looked_up - reference.get_input_embeddings()(torch.tensor(tokens))).abs().max() <= 1e-6
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (logits(model, tokens) - wanted).norm() <= 3e-2 * wanted.norm()
    exact = load(spec, path, FLOAT32)
    assert (logits(exact, tokens) - wanted).norm() <= 1e-4 * wanted.norm()
    assert isinstance(load(spec, path, INT4, "dummy").lm_head.weight, Int4Weight)
    # A head that is not packed is dequantized as it is read, and an embedding with it.
    assert FLOAT32.with_head(spec) == GROUPS.with_head(spec) == spec != INT4.with_head(spec)


def test_the_head_is_converted_first(tmp_path: Path) -> None:
    """Its scratch memory is the largest, so that it must not come on top of the packed layers."""
    make_checkpoint("llama2", tmp_path, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path, lambda _: "Q8_0")
    model = load(read_model_spec(tmp_path / "model.gguf"), tmp_path / "model.gguf", INT4)
    assert next(model.quantized_modules()).name == "lm_head"


def test_groups_stay_where_nothing_else_fits(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, intermediate_size=112)
    quantize_checkpoint(tmp_path, FORMATS["fp8"])
    spec = read_model_spec(tmp_path)
    assert GROUPS.weight_bytes(spec, "float32") == spec.weight_bytes("float32")
    tokens = list(range(5))
    near, exact = (logits(load(spec, tmp_path, products), tokens) for products in (GROUPS, FLOAT32))
    assert (near - exact).norm() <= 1e-5 * exact.norm()
