"""`phonograph models`: known models, their sizes, and those that fit the memory of a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table

from phonograph.cli.show import Json, note, print_json
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import GIB, KNOWN_DEVICES, DeviceSpec, known_device
from phonograph.errors import MemoryLimitError, UnsupportedModelError
from phonograph.files.catalog import HUB_IDS

if TYPE_CHECKING:
    from phonograph.models.spec import ModelSpec

CONTEXT = 4096
"""Tokens of the request that must fit next to the weights, or the model's context if that is shorter."""
GROUP = 128
"""Inputs of the layers' 4-bit weights that have one scale, as in most files of that format."""
_SIZES = "parameters", "16 bits", "4 bits"
AS_IS, IN_16_BITS, IN_4_BITS = "yes", "in bfloat16", "in 4 bits"
"""Forms in which a model fits, the best first: in the default type, which is float32 on a CPU, and smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of the catalog, or the demo model. Sizes are None where the architecture is not supported.

    Attributes:
        name: name for `explain`.
        model: argument of the commands that need weights: a hub id, or demo.
        unsupported: reason why no engine runs it, or None.
        num_parameters: number of parameters.
        bytes_16_bits: size of the weights in 16 bits.
        bytes_4_bits: size of the weights with layers in 4 bits.
        fits: the first form that fits the device with a request of CONTEXT tokens, or None.
    """

    name: str
    model: str
    unsupported: str | None = None
    num_parameters: int | None = None
    bytes_16_bits: int | None = None
    bytes_4_bits: int | None = None
    fits: str | None = None


def models(
    *,
    device_name: Annotated[
        str | None, Parameter(help=f"Fit this device instead of this machine's: {', '.join(KNOWN_DEVICES)}.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List known models with their sizes, and which of them fit the memory of this machine."""
    from phonograph.engine.build import this_device

    device = this_device("auto") if device_name is None else known_device(device_name, setting="device_name")
    found = [_known_model(name, device) for name in ("demo", *HUB_IDS)]
    if as_json:
        for one in found:
            print_json(asdict(one))
        return
    table = Table("model", *(Column(name, justify="right") for name in _SIZES), "fits", box=None, pad_edge=False)
    for one in found:
        table.add_row(*_row(one))
    Console().print(table, markup=False)
    note(
        f"Sizes are GiB of weights. A model fits {device.name} with a request of {CONTEXT} tokens: yes is as it is, "
        f"{IN_16_BITS} needs --dtype bfloat16, {IN_4_BITS} a GGUF, GPTQ or AWQ file. explain also takes short names, "
        "such as qwen3-0.6b."
    )


def _known_model(name: str, device: DeviceSpec) -> KnownModel:
    from phonograph.models.spec import read_model_spec

    model = HUB_IDS.get(name, name)
    try:
        spec = read_model_spec(name, config_only=True)
    except UnsupportedModelError as error:
        return KnownModel(name=name, model=model, unsupported=str(error))
    in_4_bits = _in_4_bits(spec)
    forms = ((AS_IS, spec, "auto"), (IN_16_BITS, spec, "bfloat16"), (IN_4_BITS, in_4_bits, "bfloat16"))
    return KnownModel(
        name=name,
        model=model,
        num_parameters=spec.num_parameters,
        bytes_16_bits=spec.weight_bytes("bfloat16"),
        bytes_4_bits=in_4_bits.weight_bytes("bfloat16"),
        fits=next((form for form, one, dtype in forms if _fits(name, one, dtype, device)), None),
    )


def _in_4_bits(spec: ModelSpec) -> ModelSpec:
    from phonograph.models.quantization.awq import Awq
    from phonograph.models.quantization.scheme import Quantization

    return spec.with_quantization(Quantization("awq", Awq(bits=4, group_size=GROUP, zeros=True)))


def _fits(name: str, spec: ModelSpec, dtype: str, device: DeviceSpec) -> bool:
    """Return True if an engine would start, by the plan that it makes."""
    from phonograph.engine.plan import make_plan

    context = min(CONTEXT, spec.context_length)
    settings = {"device": device.kind, "dtype": dtype, "max_model_len": context, "max_num_seqs": 1}
    try:
        make_plan(EngineConfig(model=name).model_copy(update=settings), spec, device)
    except MemoryLimitError:
        return False
    return True


def _row(one: KnownModel) -> tuple[str, ...]:
    if one.num_parameters is None:
        return one.model, "", "", "", "not supported"
    sizes = (f"{(size or 0) / GIB:.2f}" for size in (one.bytes_16_bits, one.bytes_4_bits))
    return one.model, _parameters(one.num_parameters), *sizes, one.fits or "no"


def _parameters(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
