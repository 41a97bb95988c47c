"""Loading of weights from a GGUF file.

All names and shapes are checked before a tensor is read. A tensor in blocks becomes the quantized weight of its
projection; embeddings, and matrices that are not quantized as a whole, become numbers in the model's type. Biases that
a file lacks are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from phonograph.errors import WeightError
from phonograph.files.gguf_file import GgufFile, GgufTensor
from phonograph.models.layers.linear import Linear
from phonograph.models.quantization.block_embedding import BlockEmbedding
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES, FLOATS, GgufBlocks, dequantize_rows
from phonograph.models.quantization.mxfp4 import tensors_of_gguf
from phonograph.models.quantization.scheme import QuantizedModule
from phonograph.models.transformer import Transformer
from phonograph.models.weights.gguf_config import INTERLEAVED, ROPE_FACTORS
from phonograph.models.weights.gguf_experts import ExpertPiece, expert_pieces, expert_tensors
from phonograph.models.weights.gguf_names import gguf_name, hugging_face_name
from phonograph.models.weights.rank_tensors import RankTensors
from phonograph.models.weights.staging import Copies

_EMBEDDING = "model.embed_tokens.weight"
_USED_ELSEWHERE = frozenset({ROPE_FACTORS})


def load_gguf(model: Transformer, file: GgufFile, copies: Copies, cuts: RankTensors | None = None) -> None:
    """Start copies of all tensors, or of the parts of one rank.

    Raises:
        WeightError: a tensor that is not a bias is missing; a tensor is unexpected, or has another shape; a vector is
            in blocks.
    """
    pieces, of_experts = expert_pieces(model.spec.layers), expert_tensors(model.spec.layers)
    modules = [module for module in model.quantized_modules() if module.tensor_name("weight") not in of_experts]
    architecture = str(file.values["general.architecture"])
    half = next(iter(model.spec.attentions.values())).head_size // 2
    rank, whole_pieces = (0, pieces) if cuts is None else (cuts.rank, expert_pieces(cuts.whole.layers))
    shapes = _without(model.spec.tensor_shapes(), of_experts)
    shapes |= {f"{module.name}.weight": (module.outputs, module.weight.shape[0]) for module in modules}
    shapes |= {name: piece.shape for name, piece in whole_pieces.items()}
    if cuts is not None:
        shapes = {name: cuts.whole_sizes(name, shape) for name, shape in shapes.items()}
    tensors = {
        hugging_face_name(name, architecture): tensor
        for name, tensor in file.tensors.items()
        if name not in _USED_ELSEWHERE
    }
    ties_blocks = model.spec.tie_word_embeddings and "lm_head.weight" in shapes
    if ties_blocks and _EMBEDDING in tensors:
        tensors.setdefault("lm_head.weight", tensors[_EMBEDDING])
    for name, tensor in tensors.items():
        shown = f"tensor {_shown(name, architecture)} in {file.path}"
        if name not in shapes:
            raise WeightError(
                f"{shown} is not part of this {model.spec.architecture}; it has a feature that is not implemented"
            )
        # A matrix of one output may be a vector, and taps have no dimension of one input.
        if [size for size in tensor.shape if size > 1] != [size for size in shapes[name] if size > 1]:
            raise WeightError(
                f"{shown} has shape {list(tensor.shape)}; the header's sizes of the model ask for {list(shapes[name])}"
            )
        if tensor.kind not in FLOATS and (len(tensor.shape) < 2 or name.endswith(".bias")):
            raise WeightError(f"{shown} is not a matrix, and has the type {tensor.kind}")
    required = [name for name in shapes if not name.endswith(".bias")]
    missing = [_shown(name, architecture) for name in required if name not in tensors]
    if missing:
        more = f"; missing are {len(missing)} tensors" if len(missing) > 1 else ""
        raise WeightError(f"tensor {missing[0]} is not in {file.path}{more}; download it again")
    for name, destination in _without(model.destinations(), of_experts).items():
        if name not in tensors:
            copies.run(partial(_clear, destination))
            continue
        if name == _EMBEDDING and ties_blocks:
            # A head of the same blocks is packed, and rows are looked up in the file.
            copies.run(partial(_keep_blocks, model, tensors[name]))
            continue
        tensor, interleaved = tensors[name], _is_interleaved(name, file)
        rows, into = _part(name, tensor, destination, cuts)
        if tensor.kind in FLOATS:
            if interleaved:
                view = into.unflatten(0, (-1, 2, half)).transpose(1, 2)
                copies.add(name, view, rows.unflatten(0, (-1, half, 2)))
            else:
                copies.add(name, into, _numbers(name, rows))
        else:
            copies.run(
                partial(_dequantize, _shown(name, architecture), tensor.kind, rows, half if interleaved else 0, into)
            )
    for name, piece in pieces.items():
        if name not in tensors:
            copies.run(partial(_clear, _biases(model, piece)))
            continue
        rows = piece.part(whole_pieces[name], rank, _rows(tensors[name]))
        _load_piece(model, name, piece, tensors[name].kind, rows, copies)
        _release(model, file)
    while modules:
        # A weight that a CPU converts is freed with its last part.
        module = modules.pop(0)
        name = f"{module.name}.weight"
        rows = _rows(tensors[name])
        rows = rows if cuts is None else cuts.of(name, rows)
        copies.run(partial(_load, module, rows, half if _is_interleaved(name, file) else 0))
        _release(model, file)


def num_copies(model: Transformer) -> int:
    """Return the number of copies that `load_gguf` starts."""
    of_experts = expert_tensors(model.spec.layers)
    modules = sum(module.tensor_name("weight") not in of_experts for module in model.quantized_modules())
    shapes = _without(model.spec.tensor_shapes(), of_experts)
    return len(shapes) + modules + len(expert_pieces(model.spec.layers))


_Value = TypeVar("_Value")


def _without(by_name: Mapping[str, _Value], names: set[str]) -> dict[str, _Value]:
    """Return the tensors with other names than these."""
    return {name: value for name, value in by_name.items() if name not in names}


def _release(model: Transformer, file: GgufFile) -> None:
    if model.device.type == "cpu":
        # Pages that were read would count as memory of this process.
        file.release()


def _load_piece(
    model: Transformer, name: str, piece: ExpertPiece, kind: str, rows: torch.Tensor, copies: Copies
) -> None:
    """Start to load a piece of a matrix of experts, whose rows are [experts, outputs, numbers or bytes]."""
    linear = _linear(model, piece)
    if piece.bias:
        copies.add(name, _biases(model, piece), rows)
        return
    if linear.spec.scheme is not None:
        copies.run(partial(_load_blocks, model, name, piece, kind, rows))
        return
    into = linear.matrix.t().unflatten(0, (len(rows), -1))[:, piece.first : piece.first + piece.outputs]
    if kind in FLOATS:
        copies.add(name, into, rows)
    else:
        copies.run(partial(_dequantize_experts, name, kind, rows, into))


def _linear(model: Transformer, piece: ExpertPiece) -> Linear:
    weights = model.weights[piece.layer].feed_forward
    assert weights is not None
    return weights.linears[piece.place]


def _biases(model: Transformer, piece: ExpertPiece) -> torch.Tensor:
    """Return the memory of a piece's biases, [experts, outputs]."""
    bias_O = _linear(model, piece).bias_O
    assert bias_O is not None
    return bias_O.view(piece.matrix.num_experts or 1, -1)[:, piece.first : piece.first + piece.outputs]


@torch.inference_mode()
def _load_blocks(model: Transformer, name: str, piece: ExpertPiece, kind: str, rows: torch.Tensor) -> None:
    linear = _linear(model, piece)
    scheme, outputs = linear.spec.scheme, linear.spec.expert_outputs
    if isinstance(scheme, GgufBlocks):
        # Pieces of several types have one layout in memory.
        scheme = replace(scheme, kind=kind)
    assert scheme is not None
    for expert, own_rows in enumerate(rows):
        there = own_rows.to(linear.weight.device)
        stored = {"weight": there} if isinstance(scheme, GgufBlocks) else tensors_of_gguf(there)
        scheme.load(name.removesuffix(".weight"), stored, linear.weight, expert * outputs + piece.first)
    loaded = model.when_loaded(linear)
    if loaded is not None and piece.first + piece.outputs == outputs:
        loaded()


def _dequantize_experts(name: str, kind: str, rows: torch.Tensor, into: torch.Tensor) -> None:
    for own_rows, destination in zip(rows, into, strict=True):
        dequantize_rows(name, kind, own_rows, destination)


def _is_interleaved(name: str, file: GgufFile) -> bool:
    """Return True if the file has the outputs of a tensor in another order.

    Models of some of llama.cpp's architectures rotate neighbouring numbers of a head, so that their files interleave
    the two halves of each head of queries and keys.
    """
    return file.values["general.architecture"] in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj")


def _rows(tensor: GgufTensor) -> torch.Tensor:
    """Return the mapped numbers; bytes for types in blocks."""
    rows = torch.from_numpy(tensor.data)
    return rows.view(torch.bfloat16) if tensor.kind == "BF16" else rows


def _part(
    name: str, tensor: GgufTensor, destination: torch.Tensor, cuts: RankTensors | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a tensor that a rank has, and their destination."""
    rows = _rows(tensor)
    if cuts is None:
        return rows, destination
    return cuts.fitted(name, rows, destination, 1 if tensor.kind in FLOATS else BLOCK_TYPES[tensor.kind].inputs)


def _numbers(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a checkpoint. A file has rates of decay without the logarithm, and taps as a matrix."""
    if name.endswith(".conv1d.weight"):
        return rows.unsqueeze(1)
    return rows.neg().log_() if name.endswith(".A_log") else rows


def _in_halves(rows: torch.Tensor, half: int) -> torch.Tensor:
    """Return interleaved rows of heads in the order of transformers; `half` is 0 for rows that are not interleaved."""
    return rows.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2) if half else rows


@torch.inference_mode()
def _clear(destination: torch.Tensor) -> None:
    destination.zero_()


def _keep_blocks(model: Transformer, tensor: GgufTensor) -> None:
    model.keep_embedding_blocks(BlockEmbedding(_rows(tensor), tensor.kind, model.dtype))


def _dequantize(name: str, kind: str, rows: torch.Tensor, half: int, destination: torch.Tensor) -> None:
    dequantize_rows(name, kind, _in_halves(rows, half), destination)


def _load(module: QuantizedModule, rows: torch.Tensor, half: int) -> None:
    module.load({"weight": _in_halves(rows, half)})


def _shown(name: str, architecture: str) -> str:
    """Return a name as the file has it."""
    return gguf_name(name, architecture) if name.startswith(("model.", "lm_head.")) else name
