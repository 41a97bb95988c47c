"""`phonograph explain`: what an engine would decide, and why, without its GPU and without weights.

It prints the same plan that an engine starts from, so what is explained is what runs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.batches import batch_text, read_batch
from phonograph.cli.options import takes_engine_config
from phonograph.cli.show import Json, compact, mode_facts, print_json
from phonograph.config.engine_config import EngineConfig
from phonograph.core.batch import ScheduledBatch
from phonograph.core.device import KNOWN_DEVICES, DeviceSpec, known_device
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.resolve import without_support

if TYPE_CHECKING:
    from phonograph.cli.attention_matrix import BackendRows
    from phonograph.cli.product_table import Kernels, ProductRow
    from phonograph.engine.plan import EnginePlan
    from phonograph.graphs.dispatch import Decision
    from phonograph.graphs.modes import GraphKey


class _Decided(NamedTuple):
    """A batch, the leading tokens that each of its sequences shares, and what it runs as."""

    batch: ScheduledBatch
    shared: list[int]
    decision: Decision


@takes_engine_config
def explain(
    config: EngineConfig,
    *,
    device_name: Annotated[
        str | None, Parameter(help=f"Explain for this device instead of this machine's: {', '.join(KNOWN_DEVICES)}.")
    ] = None,
    batch: Annotated[
        list[str] | None,
        Parameter(
            negative="",
            help="Explain what a batch runs as: query length @ sequence length of each, such as 1@65536,5@5; "
            "8x1@32064/32000 are 8 sequences with their first 32000 tokens in the same blocks.",
        ),
    ] = None,
    matrix: Annotated[
        bool, Parameter(negative="", help="Print every backend in every mode instead, each with its reason.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print backend, graph mode, graphs, memory and the decision for batches, each with its reason."""
    from phonograph.cli.attention_matrix import make_matrix
    from phonograph.cli.group_lines import group_names, shared_tiles
    from phonograph.engine.plan import make_plan, resolve_attention
    from phonograph.engine.startup.configured_model import read_configured_model
    from phonograph.files.catalog import catalog_name
    from phonograph.runner.runner import shape_of

    device = planned_device(config, device_name)
    # A revision of a hub id is for the hub to say.
    name = catalog_name(config.model, hub_ids=config.revision is None)
    named = config if name is None else config.model_copy(update={"model": name})
    model = read_configured_model(named, config_only=True)
    if matrix:
        if batch:
            raise ConfigError("batch", " ".join(batch), "the matrix has its own kinds of batches; give one of the two")
        kv = resolve_attention(config, model, device)
        matrices = {spec: make_matrix(spec, device) for spec in kv.members}
        titles = [group_names(kv, kv.members[spec]) for spec in matrices] if len(matrices) > 1 else [""]
        _show_matrices(dict(zip(titles, matrices.values(), strict=True)), as_json=as_json)
        return
    try:
        plan = make_plan(config, model, device)
    except BackendError as error:
        hint = f"; --device-name explains it for another device than {device.name}" if device_name is None else ""
        raise BackendError(f"{error}{hint}") from None
    batches = [read_batch(text, plan.limits) for text in batch or []]
    dispatcher = plan.make_dispatcher()
    decided = [
        _Decided(one, shared, dispatcher.decide(shape_of(one, shared_tiles(plan, one, shared))))
        for one, shared in batches
    ]
    if as_json:
        print_json(_facts(plan, decided))
    else:
        _print(plan, decided)


def planned_device(config: EngineConfig, name: str | None) -> DeviceSpec:
    """Return the device of a name, or without one the device of this machine.

    Raises:
        ConfigError: the name is unknown, or contradicts the configuration.
    """
    from phonograph.engine.build import this_device

    if name is None:
        return this_device(config.device)
    device = known_device(name, setting="device_name")
    if config.device not in ("auto", device.kind):
        raise ConfigError("device", config.device, f"contradicts device_name={name!r}; give one of them")
    return device


def _facts(plan: EnginePlan, decided: list[_Decided]) -> dict[str, Any]:
    from phonograph.cli.group_lines import sharing_reason, shorten_layers
    from phonograph.engine.groups.group_facts import group_facts

    capabilities, memory, captures = plan.selection.capabilities, plan.memory, plan.captures
    model = asdict(plan.whole)
    shorten_layers(model["layers"])
    return {
        "model": {"name": plan.config.model, **model, "num_parameters": plan.whole.num_parameters},
        "device": asdict(plan.device),
        "products": [asdict(one) for one in _product_rows(plan)],
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.attention.kv_cache_dtype,
        "limits": _limits(plan),
        "attention": {
            "backend": capabilities.name,
            "version": capabilities.version,
            "missing": capabilities.missing(),
            "reasons": plan.selection.reasons,
            "rejected": plan.selection.rejected,
            "shared_prefixes": sharing_reason(plan, plan.selection, plan.attention),
        },
        "support": {"level": plan.resolution.support.level.name, "reason": plan.resolution.support.reason},
        "mode": mode_facts(plan),
        "captures": {
            "decode": [key.num_tokens for key in captures.decode],
            "sharing": [key.num_tokens for key in captures.sharing],
            "drafting": [[key.num_tokens, key.num_reqs] for key in captures.drafting],
            "mixed": [key.num_tokens for key in captures.mixed],
            "piecewise": [key.num_tokens for key in captures.piecewise],
        },
        "memory": {
            "weights": memory.weights,
            "graphs": memory.graphs,
            "attention": memory.attention,
            "sampling": memory.sampling,
            "states": memory.states,
            "num_state_checkpoints": memory.num_checkpoints,
            "kv_cache": memory.kv_cache,
            "kv_block": memory.block,
            "num_kv_blocks": memory.num_blocks,
            "num_kv_tokens": memory.num_tokens,
        },
        "kv_groups": [asdict(group) for group in group_facts(plan)],
        "threads": None if plan.threads is None else plan.threads.count,
        "notes": plan.notes,
        "batches": [_batch_facts(plan, one) for one in decided],
    }


def _limits(plan: EnginePlan) -> dict[str, int]:
    limits = asdict(plan.limits)
    for name in ("lookahead_tokens", "pools", "whole_prompts", "max_audios"):
        if not limits[name]:
            del limits[name]
    return {**limits, "block_size": plan.attention.block_size}


def _batch_facts(plan: EnginePlan, one: _Decided) -> dict[str, Any]:
    from phonograph.cli.group_lines import runs_of

    batch, decision = one.batch, one.decision
    _, runs, (shared_units, own_units, _) = next(runs_of(plan, batch, one.shared), ("", [], (0, 0, 0)))
    return {
        "batch": batch_text(batch),
        "num_reqs": batch.num_reqs,
        "num_decodes": batch.num_decodes,
        "num_tokens": batch.num_tokens,
        "mode": decision.mode.value,
        "graph": None if decision.key is None else str(decision.key),
        "padded_tokens": decision.num_tokens,
        "reason": decision.reason,
        "shared_prefixes": [run._asdict() for run in runs],
        "attention_units": {"shared": shared_units, "own": own_units},
    }


def _print(plan: EnginePlan, decided: list[_Decided]) -> None:
    """Two columns that wrap, so that a narrow terminal shows all of it too."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, lines in _sections(plan, decided):
        for index, line in enumerate(lines):
            table.add_row("" if index else title, line)
    Console().print(table, markup=False, highlight=False)


def _sections(plan: EnginePlan, decided: list[_Decided]) -> list[tuple[str, list[str]]]:
    from phonograph.cli.group_lines import attention_lines, group_lines

    support = plan.resolution.support
    # The chain repeats why the support is what it is; here that stands right above it.
    chain = [without_support(str(reason), support) for reason in plan.resolution.reasons]
    return [
        ("model", [_model_line(plan)]),
        ("device", [_device_line(plan.device)]),
        ("products", _product_lines(plan)),
        ("limits", [", ".join(f"{name} {size}" for name, size in _limits(plan).items())]),
        ("KV groups", group_lines(plan)),
        ("attention", attention_lines(plan)),
        ("support", [support.level.name, f"- {support.reason}"]),
        ("mode", _mode_lines(plan, chain)),
        ("graphs", _graph_lines(plan)),
        ("memory", _memory_lines(plan)),
        ("notes", [f"- {text}" for text in plan.notes]),
        ("batches", [line for one in decided for line in _batch_lines(plan, one)]),
    ]


def _mode_lines(plan: EnginePlan, chain: list[str]) -> list[str]:
    """Return the mode and the steps to it. The only step to a default repeats the mode."""
    if plan.resolution.asked is None and len(chain) == 1:
        return chain
    return [plan.resolution.mode.value, *(f"- {text}" for text in chain)]


def _model_line(plan: EnginePlan) -> str:
    from phonograph.cli.group_lines import layers_text

    model, size = plan.whole, plan.config.tensor_parallel_size
    attentions = model.attentions.values()
    windows = sorted({one.window[0] + 1 for one in attentions if one.window[0] >= 0})
    return (
        f"{plan.config.model}: {model.architecture}, {model.num_parameters / 1e6:,.1f} million parameters in "
        f"{plan.dtype}, {layers_text(model)}"
        + (f", sliding window {', '.join(map(str, windows))}" if windows else "")
        + (", attention sinks" if any(one.sinks for one in attentions) else "")
        + (f"; projections in {model.quantization.name}" if model.quantization is not None else "")
        + (f"; lm_head in {model.head.scheme.name}" if model.head.scheme is not None else "")
        + f"; {_bytes(plan.memory.weights)} of weights"
        + (f" on each of {size} ranks" if size > 1 else "")
        + f"; KV cache in {plan.attention.kv_cache_dtype}"
    )


def _product_rows(plan: EnginePlan) -> list[ProductRow]:
    # Needs torch, which --help must not load.
    from phonograph.cli.product_table import product_rows

    return product_rows(plan.model, plan.dtype, plan.device, plan.cpu_products)


def _product_lines(plan: EnginePlan) -> list[str]:
    """Return the matrices of each format with their bytes, and what multiplies so many rows."""
    alike: dict[tuple[str, Kernels], list[str]] = {}
    for one in _product_rows(plan):
        times = f"{one.count} x " if one.count > 1 else ""
        text = f"{one.layer} {times}{one.outputs} x {one.inputs} ({_bytes(one.nbytes)})"
        alike.setdefault((one.format, one.kernels), []).append(text)
    lines: list[str] = []
    for (name, kernels), matrices in alike.items():
        rows = {None: "more" if len(kernels) > 1 else "all rows", 1: "1 row"}
        by_rows = (f"{rows.get(most, f'to {most} rows')} by {kernel}" for most, kernel in kernels)
        lines += [f"{name}: {', '.join(matrices)}", f"- {'; '.join(by_rows)}"]
    return lines


def _device_line(device: DeviceSpec) -> str:
    if device.kind == "cpu":
        return device.name
    major, minor = device.capability
    return (
        f"{device.name}: compute capability {major}.{minor}, {device.num_sms} multiprocessors, {_bytes(device.memory)}"
    )


def _graph_lines(plan: EnginePlan) -> list[str]:
    captures = plan.captures
    count = len(captures.largest_first())
    if not count:
        return ["none"]

    def line(name: str, keys: tuple[GraphKey, ...], what: str) -> list[str]:
        return [f"{len(keys)} {name} of {compact([key.num_tokens for key in keys])} tokens{what}"] if keys else []

    longest = max((key.query_len for key in captures.drafting), default=1)
    drafts = f", up to {longest} a sequence, which verify drafts"
    slots = f" and {plan.limits.max_num_seqs} request slots"
    return [
        *line("decode", captures.decode, ", 1 a sequence"),
        *line("decode", captures.sharing, ", 1 a sequence, where much of prefixes is shared"),
        *line("decode", captures.drafting, drafts),
        *line("mixed", captures.mixed, slots),
        *line("piecewise", captures.piecewise, slots),
        *line("mixed or piecewise", captures.wide, f"{slots}, for steps with drafts"),
    ]


def _memory_lines(plan: EnginePlan) -> list[str]:
    memory, size = plan.memory, " and ".join(map(str, dict.fromkeys(plan.kv.block_sizes)))
    slots = plan.limits.max_num_seqs
    states = (
        f", states {_bytes(memory.states)} ({slots} slots of {_bytes(memory.states // slots)}), checkpoints "
        f"{_bytes(memory.checkpoints)} ({memory.num_checkpoints})"
    )
    return [
        f"weights {_bytes(memory.weights)}, graphs {_bytes(memory.graphs)} (estimate), attention "
        f"{_bytes(memory.attention)}, sampling {_bytes(memory.sampling)}{states if memory.states else ''}, KV cache "
        f"{_bytes(memory.kv_cache)}",
        f"{memory.num_blocks} KV blocks of {size} tokens and {_bytes(memory.block)} each: {memory.num_tokens} tokens",
    ]


def _show_matrices(matrices: dict[str, list[BackendRows]], *, as_json: bool) -> None:
    """Print the matrix of each distinct attention, by the names of its KV groups; the only one has no name."""
    if as_json:
        facts = {title: [_backend_facts(rows) for rows in matrix] for title, matrix in matrices.items()}
        print_json({"backends": facts[""]} if "" in facts else {"kv_groups": facts})
        return
    console = Console()
    for title, matrix in matrices.items():
        if title:
            console.print(f"\n{title}", style="bold underline", markup=False)
        _show_matrix(console, matrix)


def _show_matrix(console: Console, matrix: list[BackendRows]) -> None:
    for rows in matrix:
        console.print(f"\n{rows.backend}", style="bold", markup=False)
        if rows.support is None:
            console.print(f"refused: {'; '.join(rows.refusals)}", markup=False, highlight=False)
            continue
        support = rows.support
        console.print(f"{support.level.name}: {support.reason}", markup=False, highlight=False)
        console.print(rows.invariance, markup=False, highlight=False)
        table = Table("asked", "runs as", *rows.modes[0].batches, "why")
        for mode in rows.modes:
            why = [without_support(reason, support) for reason in mode.reasons[1:]]
            table.add_row(mode.asked_as, mode.runs_as, *mode.batches.values(), "\n".join(why))
        console.print(table, markup=False, highlight=False)


def _backend_facts(rows: BackendRows) -> dict[str, Any]:
    return {
        "backend": rows.backend,
        "varies": rows.varies,
        "refusals": rows.refusals,
        "support": None if rows.support is None else {"level": rows.support.level.name, "reason": rows.support.reason},
        "modes": [
            {
                "asked": None if mode.asked is None else mode.asked.value,
                "resolved": None if mode.resolved is None else mode.resolved.value,
                "batches": mode.batches,
                "reasons": mode.reasons,
            }
            for mode in rows.modes
        ],
    }


def _batch_lines(plan: EnginePlan, one: _Decided) -> list[str]:
    from phonograph.cli.group_lines import sharing_lines

    batch, decision = one.batch, one.decision
    graph = "no graph" if decision.key is None else str(decision.key)
    runs = "eager" if decision.key is None else f"{decision.mode.value}, {graph}"
    return [f"{batch_text(batch)}: {runs}", f"- {decision.reason}", *sharing_lines(plan, batch, one.shared)]


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
