"""Loading of weights: mapped safetensors or GGUF files into the fused matrices, or random weights.

Each tensor of a checkpoint is copied from the file's mapping into its slice, so that the weights exist once. Every
weight is written exactly once, or loading fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open

from phonograph.errors import ConfigError, WeightError, shortened
from phonograph.files.gguf_file import read_gguf
from phonograph.files.model_files import is_gguf, model_path
from phonograph.models.modules.step_model import StepModel
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.quantization.scheme import Stored
from phonograph.models.spec import ModelSpec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.file_format import match_experts, match_format
from phonograph.models.weights.gguf_tensors import load_gguf, num_copies
from phonograph.models.weights.kv_scales import is_kv_scale, is_unused_scale
from phonograph.models.weights.rank_tensors import RankTensors
from phonograph.models.weights.staging import Copies
from phonograph.models.weights.tensor_parallel import cut_model
from phonograph.models.weights.tied_embeddings import match_tied_embeddings
from phonograph.models.weights.wrapper import is_norm, skipped_note

LoadFormat = Literal["auto", "safetensors", "dummy"]
Model_co = TypeVar("Model_co", bound=StepModel, covariant=True)
Progress = Callable[[int, int], None]
"""Called with the number of loaded tensors and of all tensors."""

INDEX_FILE = "model.safetensors.index.json"
DUMMY_STD = 0.02
ONES = (".layer_scalar", ".per_expert_scale", ".linear_attn.norm.weight")
"""Endings of names of factors, which are 1 in random weights."""
DRAFT_IDS = "d2t", "t2d"
"""Tensors of a draft head that map its tokens to the target's, and say which of these it has."""
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


class Loading(NamedTuple, Generic[Model_co]):
    """A model whose weights may still be loading; its scales are complete.

    Attributes:
        notes: differences between the files and the configuration.
        finish: waits for the weights; raises WeightError if one does not fit the dtype.
    """

    model: Model_co
    notes: tuple[str, ...]
    finish: Callable[[], None]


@contextmanager
def begin_loading(
    spec: ModelSpec,
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    revision: str | None = None,
    download_dir: str | None = None,
    cpu_products: CpuProducts | None = None,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
    rank: tuple[int, int] = (0, 1),
) -> Generator[Loading[Transformer]]:
    """Yield a model from a local folder or GGUF file, a hub id or "demo".

    Copies that are not finished at the exit are dropped.

    Args:
        spec: the model.
        path: folder, GGUF file, hub id or "demo".
        dtype: type of the weights.
        device: device of the weights.
        load_format: "auto" reads the files of `path`, "safetensors" only those of this format; "dummy" draws weights by
            `seed` without files.
        seed: seed of random weights.
        progress: called here and in `Loading.finish`.
        revision: branch, tag or commit on the hub.
        download_dir: folder of downloads; default: the hub's cache.
        cpu_products: form that quantized weights take after loading; None leaves them in groups.
        make_empty: allocates the weights; called as `torch.empty`.
        rank: number of this rank and of all ranks, each of which has a part of the model.

    Raises:
        WeightError: a file is missing, truncated or corrupt; a tensor is missing, unexpected, or of another shape or
            type.
        ModelError: there is no such model.
        ConfigError: the load format is unknown, or not that of the file; or the model cannot be cut.
    """
    if load_format not in ("auto", "safetensors", "dummy"):
        raise ConfigError("load_format", load_format, "must be auto, safetensors or dummy")
    drawn = load_format == "dummy"
    location = None if drawn else model_path(path, weights=True, revision=revision, download_dir=download_dir)
    if load_format == "safetensors" and location is not None and is_gguf(location):
        raise ConfigError("load_format", load_format, f"{location} is a GGUF file, which auto reads")
    files = {} if location is None else weight_files(location)
    if location is not None and spec.pooler is not None:
        files |= {location / one.folder / "model.safetensors": [] for one in spec.pooler.stages if one.folder}
    known_notes = len(spec.notes)
    whole, names = match_tied_embeddings(match_experts(match_format(spec, files), files), files)
    notes = [*whole.notes[known_notes:]]
    spec, cuts = cut_model(whole, rank[1]), None if rank[1] == 1 else RankTensors(whole, *rank)
    with torch.inference_mode():
        model = Transformer(spec, dtype, device, make_empty)
    convert = None if cpu_products is None else partial(cpu_products.convert, dtype=dtype)
    if convert is not None and not drawn:
        model.convert_quantized(convert)
    if location is not None and is_gguf(location):
        num_tensors = num_copies(model)
    else:
        num_tensors = len(spec.tensor_shapes()) + sum(1 for _ in model.quantized_modules())

    def report(num_there: int) -> None:
        if progress is not None:
            progress(num_there, num_tensors)

    with Copies(device, report) as copies:
        with torch.inference_mode():
            if drawn:
                _draw(model, seed)
                if convert is not None:
                    model.convert_drawn(convert)
            elif location is not None and is_gguf(location):
                load_gguf(model, read_gguf(location), copies, cuts)
            else:
                notes += _read(model, files, names, copies, whole, cuts)

        def finish() -> None:
            copies.finish()
            model.finish()

        yield Loading(model, tuple(notes), finish)


def weight_files(folder: Path) -> dict[Path, list[str]]:
    """Return the safetensors files of a folder, each with its tensors in the index (none without an index).

    A GGUF file in place of the folder has none.

    Raises:
        WeightError: there are none, the index names a missing file, or the index is unusable.
    """
    if is_gguf(folder):
        return {}
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        files: dict[Path, list[str]] = {}
        for tensor_name, file_name in _read_index(index_path).items():
            files.setdefault(folder / file_name, []).append(tensor_name)
        for file, tensor_names in files.items():
            if not file.is_file():
                raise WeightError(
                    f"{file} is missing; {index_path.name} says that it holds {_some(tensor_names)}. Download it again"
                )
        return files
    single = folder / "model.safetensors"
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if found:
        return {file: [] for file in found}
    unsupported = sorted(file.name for pattern in OTHER_FORMATS for file in folder.glob(pattern))
    if unsupported:
        raise WeightError(
            f"{folder} has its weights as {_some(unsupported)}, which is not read; convert them to safetensors "
            "(transformers' save_pretrained writes it)"
        )
    raise WeightError(
        f"{folder} has no *.safetensors files (pytorch_model.bin is not read: convert it); --load-format dummy runs "
        "with random weights"
    )


def _read_index(path: Path) -> dict[str, str]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        weight_map = cast("dict[str, str]", content["weight_map"])
        if weight_map and all(Path(file).name == file for file in weight_map.values()):
            return weight_map
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path} is not a usable index of weights ({error!r}); download it again") from error
    raise WeightError(f"{path} is not a usable index of weights: weight_map must name files of its own folder")


def _read(
    model: Transformer,
    files: dict[Path, list[str]],
    names: dict[str, str],
    copies: Copies,
    whole: ModelSpec,
    cuts: RankTensors | None,
) -> list[str]:
    """Start copies of all tensors, and read the scales. Return notes on unused tensors.

    `names` maps tensors to the names that they stand for, `whole` is the model in the files, and `cuts` are the parts
    of its tensors in `model`, or None.
    """
    heads = [one for one in model.stages if one.spec.rows is not None]
    # The weight of a classifier of tokens is no tensor of the files.
    made = {f"{one.spec.name}.weight" for one in heads}
    shapes = {name: shape for name, shape in whole.tensor_shapes().items() if name not in made}
    # Modules of sentence-transformers have files in folders of their own.
    stages = {one.spec.folder: one.spec.name for one in model.stages if one.spec.folder}
    destinations, factors = model.destinations(), dict(whole.tensor_factors)
    modules = [(module, module.stored()) for module in model.quantized_modules()]
    packed = {module.tensor_name(end): stored for module, ends in modules for end, stored in ends.items()}
    if cuts is not None:
        packed = {name: stored._replace(shape=cuts.whole_shape(name, stored.shape)) for name, stored in packed.items()}
        for one in (*cuts.dequantized, *cuts.permuted.values()):
            packed |= {f"{one.module}.{end}": stored for end, stored in one.stored().items()}
    parts: dict[str, torch.Tensor] = {}
    written: dict[str, Path] = {}
    unused: list[str] = []
    skipped: list[str] = []
    for file, indexed_names in files.items():
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for own_name in cast("list[str]", tensors.keys()):
                    if model.features is not None and own_name in DRAFT_IDS:
                        # The second one says the same.
                        if own_name == DRAFT_IDS[0]:
                            model.features.take_draft_ids(tensors.get_tensor(own_name), file)
                        continue
                    stage = stages.get(file.parent.name)
                    text_name = own_name.replace("linear", stage) if stage else model.spec.tensor_name(own_name)
                    if text_name is None:
                        skipped.append(own_name)
                        continue
                    name = names.get(text_name, text_name)
                    if is_kv_scale(name):
                        tensor = cast("torch.Tensor", tensors.get_tensor(own_name))
                        model.kv_scales.take(name, tensor, file, whole, model.device)
                        continue
                    if name not in shapes and name not in packed:
                        # transformers ignores tensors that no part of the model takes. Tensors in the index belong to
                        # the checkpoint, and a model without them would be another one.
                        if is_unused_scale(name) or (indexed_names and own_name not in indexed_names):
                            unused.append(own_name)
                        elif not _is_zero_bias(name, tensors, own_name, model.spec):
                            _refuse_unexpected(name, file, model.spec)
                        continue
                    if name in written:
                        raise WeightError(f"tensor {name} is in both {written[name]} and {file}; remove one")
                    tensor = cast("torch.Tensor", tensors.get_tensor(own_name))
                    written[name] = file
                    pieces = factors.get(name.split(".", 3)[-1])
                    if name in packed:
                        _check_packed(name, tensor, packed[name], file, model.spec)
                        tensor = tensor.reshape(packed[name].shape)
                        tensor = tensor if pieces is None else _multiplied(tensor, pieces)
                        parts[name] = tensor if cuts is None else cuts.of(name, tensor)
                    else:
                        _check(name, tensor, shapes[name], file, model.spec)
                        if model.features is not None and bool(tensor[0].isnan().any()):
                            raise WeightError(f"tensor {own_name} in {file} has NaN; its tool left it unset")
                        if model.spec.norms.offset and is_norm(name):
                            tensor = tensor.float() + model.spec.norms.offset
                        tensor = tensor if pieces is None else _multiplied(tensor, pieces)
                        destination = destinations[name]
                        if cuts is not None:
                            tensor, destination = cuts.fitted(name, tensor, destination)
                        if tensor.numel() == destination.numel():
                            # Outputs of stacked experts lie in another order in memory: a view has more dimensions.
                            tensor = tensor.reshape(destination.shape)
                        copies.add(name, destination, tensor)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file} is truncated or corrupt ({error}); download it again") from error
    model.kv_scales.check(whole)
    if cuts is not None:
        model.kv_scales.keep(cuts.kv_heads)
    if model.features is not None:
        model.features.check_draft_ids(model.spec.vocab_size)
    for one in heads:
        copies.add(f"{one.spec.name}.weight", one.weight_OI, one.read_rows(files))
    expected = {name: list(shape) for name, shape in shapes.items()}
    expected |= {name: list(stored.shape) for name, stored in packed.items() if stored.required}
    missing = [name for name in expected if name not in written]
    if missing:
        indexed = [file.name for file, names in files.items() if missing[0] in map(model.spec.tensor_name, names)]
        raise WeightError(
            f"tensor {missing[0]} {expected[missing[0]]} is in none of {_some([file.name for file in files])}"
            f"{f' ({INDEX_FILE} says {indexed[0]})' if indexed else ''}; missing are {_some(missing)}"
            f"{_stated(missing[0], model.spec)}"
        )
    for one in () if cuts is None else cuts.dequantized:
        copies.run(partial(one.load, parts, destinations[f"{one.module}.weight"]))
    while modules:
        # A weight that a CPU converts is freed with its last part.
        module, ends = modules.pop(0)
        if cuts is not None and module.name in cuts.permuted:
            copies.run(partial(cuts.permuted[module.name].load, parts, module))
            continue
        own = {end: parts[module.tensor_name(end)] for end in ends if module.tensor_name(end) in parts}
        copies.run(partial(module.load, own))
    notes = [f"tensors of the checkpoint that the model does not use: {_some(unused)}"] if unused else []
    return [*notes, skipped_note(skipped)] if skipped else notes


def _multiplied(tensor: torch.Tensor, pieces: tuple[tuple[int, float], ...]) -> torch.Tensor:
    """Return the tensor, float32, with each number of rows multiplied by its factor."""
    rows, factors = zip(*pieces, strict=True)
    by_row = torch.tensor(factors).repeat_interleave(torch.tensor(rows))
    return tensor.float() * by_row.view(-1, *(1,) * (tensor.ndim - 1))


def _check_packed(name: str, tensor: torch.Tensor, stored: Stored, file: Path, spec: ModelSpec) -> None:
    shape = list(tensor.shape)
    # Tools write a scale for each output with one dimension or two, and a single scale with none.
    if [size for size in shape if size != 1] != [size for size in stored.shape if size != 1]:
        raise WeightError(
            f"tensor {name} in {file} has shape {shape}; quantization_config and sizes of the model ask for "
            f"{list(stored.shape)}; do bits and group_size belong to this file?"
        )
    if tensor.dtype not in stored.dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in stored.dtypes)
        raise WeightError(
            f"tensor {name} in {file} is {str(tensor.dtype).removeprefix('torch.')}; expected {names}"
            f"{_stated(name, spec)}"
        )


def _is_zero_bias(name: str, tensors: Any, own_name: str, spec: ModelSpec) -> bool:
    """Return True for zeros: a bias that a quantization tool added to a projection, or BART's bias of the logits."""
    module, _, end = name.rpartition(".")
    added = end == "bias" and spec.scheme_of(module) is not None and module.startswith("model.layers.")
    if not added and name != "final_logits_bias":
        return False
    return not bool(tensors.get_tensor(own_name).any())


def _check(name: str, tensor: torch.Tensor, expected: tuple[int, ...], file: Path, spec: ModelSpec) -> None:
    if tuple(tensor.shape) != expected:
        raise WeightError(
            f"tensor {name} in {file} has shape {list(tensor.shape)}; the configuration expects {list(expected)}"
        )
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise WeightError(
            f"tensor {name} in {file} is {str(tensor.dtype).removeprefix('torch.')}; expected float32, float16 or "
            f"bfloat16{_stated(name, spec) or ' (config.json has no quantization_config for it)'}"
        )


def _refuse_unexpected(name: str, file: Path, spec: ModelSpec) -> None:
    """Reject a tensor, unless it is redundant: rotary tables, and a second copy of tied embeddings."""
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings):
        return
    raise WeightError(
        f"tensor {name} in {file} is not part of this {spec.architecture}"
        f"{_stated(name, spec) or '; do config.json and weights belong together?'}"
    )


def _stated(name: str, spec: ModelSpec) -> str:
    """Return what quantization_config says of the module of a tensor, for an error; nothing for other modules."""
    module, quantization = name.rpartition(".")[0], spec.quantization
    if quantization is None or not spec.has_projection(module):
        return ""
    entries = ", ".join((*(entry for entry, _ in quantization.rules), *quantization.only))
    lists = f" with {' and '.join(quantization.lists)} ({shortened(entries) or 'empty'})" if quantization.lists else ""
    state = "not quantized" if spec.scheme_of(module) is None else "quantized"
    return f"; by quantization_config{lists}, {module} is {state}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _draw(model: Transformer, seed: int) -> None:
    generator = torch.Generator(model.device).manual_seed(seed)
    for parameter in model.parameters:
        parameter.normal_(0.0, DUMMY_STD, generator=generator)
    for weight in model.quantized:
        weight.draw(DUMMY_STD, generator)
    for name, view in model.destinations().items():
        if is_norm(name) or name.endswith(ONES):
            view.fill_(1.0)
