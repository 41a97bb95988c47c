"""Hook of MkDocs: makes the pages of the reference from the code, and checks links to files outside `docs`.

Pages: settings from the configuration models, commands from the command line's help, endpoints from the OpenAPI
document, metrics from the collector, models from the registry, and the API by mkdocstrings.
"""

from __future__ import annotations

import html
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest.mock import MagicMock

import vllm_flags_page
from cyclopts import App
from fastapi import FastAPI
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from supported_models import formats, hardware_table

from phonograph.cli import options
from phonograph.cli.app import COMMANDS, app
from phonograph.config.values import ValueKind
from phonograph.files.catalog import HUB_IDS
from phonograph.models.config_fields import FULL
from phonograph.models.hf_config import read_settings
from phonograph.models.registry import ARCHITECTURES
from phonograph.server.http import admin
from phonograph.server.http.application import ERRORS, ROUTERS
from phonograph.server.observe.metrics import EngineCollector

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
API = {
    "llm": ("Engines: LLM and AsyncLLM", ("phonograph.engine.llm.LLM", "phonograph.engine.async_llm.AsyncLLM")),
    "sampling": (
        "Sampling and structured outputs",
        (
            "phonograph.core.sampling_params.SamplingParams",
            "phonograph.core.pooling_params.PoolingParams",
            "phonograph.core.structured_outputs.StructuredOutputs",
            "phonograph.core.beam_search_params.BeamSearchParams",
        ),
    ),
    "outputs": (
        "Outputs",
        (
            "phonograph.engine.outputs",
            "phonograph.text.logprob_views.LogprobsView",
            "phonograph.text.logprob_views.PositionLogprobs",
            "phonograph.text.logprob_views.Logprob",
            "phonograph.engine.offline.beam_search.BeamSearchOutput",
            "phonograph.engine.offline.beam_search.BeamSearchSequence",
        ),
    ),
    "config": ("Configuration", ("phonograph.config.engine_config.EngineConfig",)),
    "attention": (
        "phonograph.attention",
        (
            "phonograph.attention.capabilities",
            "phonograph.attention.attention_spec",
            "phonograph.attention.backend",
            "phonograph.attention.metadata",
        ),
    ),
    "graphs": (
        "phonograph.graphs",
        (
            "phonograph.graphs.modes",
            "phonograph.graphs.resolve",
            "phonograph.graphs.capture_list",
            "phonograph.graphs.dispatch",
            "phonograph.graphs.runtime",
            "phonograph.graphs.verification",
        ),
    ),
    "testing": (
        "phonograph.testing",
        ("phonograph.testing.suite.check_conformance", "phonograph.testing.report"),
    ),
}
"""Pages of the API reference: title and objects."""
ERRORS_PAGE = """# Errors

Each exception is one class of this tree. The message names the setting or parameter, its value and what would work.

| error | what to do |
|---|---|
| `MemoryLimitError` | [out of memory](../guides/troubleshooting.md#out-of-memory) |
| `ConfigError` of `max_model_len` | [context too long](../guides/troubleshooting.md#context-too-long) |
| `RequestError` of a prompt's length | [context too long](../guides/troubleshooting.md#context-too-long) |
| `BackendError` | [no kernel](../guides/troubleshooting.md#no-kernel) |
| `CaptureError`, `ReplayError` | [a graph that is refused](../guides/troubleshooting.md#a-graph-is-refused) |
| `EngineUnavailable` | [the server answers 503](../guides/troubleshooting.md#the-server-answers-503) |
| `UnsupportedModelError`, `WeightError` | [a model is refused](../guides/troubleshooting.md#a-model-is-refused) |

::: phonograph.errors
    options:
      show_root_heading: false
"""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        **{f"reference/api/{name}.md": api_page(title, names) for name, (title, names) in API.items()},
        "reference/endpoints.md": endpoints_page(),
        "reference/metrics.md": metrics_page(),
        "reference/errors.md": ERRORS_PAGE,
        "reference/models.md": models_page(),
        "reference/vllm-flags.md": vllm_flags_page.page(),
        "changelog.md": root_page("CHANGELOG.md"),
        "contributing.md": root_page("CONTRIBUTING.md"),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files of the repository outside `docs` by their text.

    Raises:
        PluginError: there is no such file.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[3]))
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: the link to {match[3]} leads to no file")
        return match[2]

    return LINK.sub(replaced, markdown)


def root_page(name: str) -> str:
    """Return a page of the repository's root with its links as the site has them."""
    text = (ROOT / name).read_text(encoding="utf-8")

    def moved(match: re.Match[str]) -> str:
        if match[3] in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"[{match[2]}]({match[3].lower()}{match[4] or ''})"
        if match[3].startswith("docs/"):
            return f"{match[1]}[{match[2]}]({match[3].removeprefix('docs/')}{match[4] or ''})"
        return f"{match[1]}[{match[2]}](../{match[3]}{match[4] or ''})"

    return LINK.sub(moved, text)


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Return the text of a cell. A bar stays in code, where Markdown divides no cells, and is an entity elsewhere."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("|", "&#124;") for part in parts)


def code(text: str) -> str:
    """Return code for a cell, which breaks after each bar."""
    return f"<code>{html.escape(text).replace('|', '&#124;<wbr>')}</code>"


def flag(name: str, prefix: str = "") -> str:
    """Return a flag with an anchor of its name, which leads to itself."""
    anchor = prefix + name.lstrip("-")
    return f'<a class="flag" id="{anchor}" href="#{anchor}"><code>{name}</code></a>'


def settings_page() -> str:
    """Return the page of settings, from the fields of the configuration models."""
    text = [
        "---\nsearch:\n  boost: 20\n---",
        "# Settings",
        "Each setting has one name in four sources. `max_num_seqs` is a keyword argument of `LLM` and a key of the "
        "YAML file, `--max-num-seqs` is its flag, and `PHONOGRAPH_MAX_NUM_SEQS` its environment variable. A flag "
        "takes precedence over the environment, and the environment over the file. A flag that is on or off has a "
        "second form that begins with `--no-`. If the default is empty, the engine chooses a value, which "
        "`phonograph explain` prints.",
    ]
    tables: dict[str, list[tuple[str, ...]]] = {}
    heading = ""
    for name, field in {**options.ENGINE_FIELDS, **options.SERVER_FIELDS}.items():
        heading = options.HEADINGS.get(name, heading)
        values = next((kind.metavar for kind in field.metadata if isinstance(kind, ValueKind)), "JSON")
        default = "required" if field.is_required() else "" if field.default in (None, ()) else f"`{field.default}`"
        names = " ".join(flag(one) for one in (f"--{name.replace('_', '-')}", options.SHORT_NAMES.get(name)) if one)
        tables.setdefault(heading, []).append((names, code(values), default, field.description or ""))
    for title, rows in tables.items():
        text += [f"## {title}", table(("flag", "value", "default", "meaning"), rows)]
    return "\n\n".join(text)


def commands_page() -> str:
    """Return the page of commands, with the arguments of each but for the settings of the engine and the server."""
    text = [
        "# Commands",
        "All commands of an engine also take the flags of [the settings](settings.md). `phonograph COMMAND --help` "
        "prints them all.",
        table(
            ("command", "purpose"),
            ((f"[`phonograph {name}`](#phonograph-{name})", summary) for name, summary in COMMANDS.items()),
        ),
    ]
    for name, summary in COMMANDS.items():
        subcommands = [one for one in app[name] if not one.startswith("-")] if name == "bench" else []
        text += [f"## phonograph {name}", summary]
        for words in [[name, one] for one in subcommands] or [[name]]:
            command = app
            for word in words:
                command = command[word]
            if subcommands:
                text.append(f"### phonograph {' '.join(words)}")
            text += [described(command), argument_table(command, "-".join(words) + "-")]
    return "\n\n".join(part for part in text if part) + "\n"


def described(command: App) -> str:
    """Return the docstring of a command up to its arguments."""
    lines = inspect.cleandoc(inspect.getdoc(command.default_command) or "").splitlines()
    end = next(
        (place for place, line in enumerate(lines) if re.fullmatch(r"(Args|Raises|Returns|Examples?):", line)), None
    )
    return "\n".join(lines[:end])


def argument_table(command: App, prefix: str) -> str:
    """Return the table of a command's own arguments."""
    shared = set(options.HEADINGS.values())
    rows: list[tuple[str, ...]] = []
    for one in command.assemble_argument_collection(parse_docstring=True):
        groups = {group if isinstance(group, str) else group.name for group in one.parameter.group or ()}
        if not one.show or groups & shared:
            continue
        default = one.field_info.default
        shown = "" if default in (None, (), "") or default is inspect.Parameter.empty else f"`{default}`"
        names = [name for name in one.names if not name.startswith("--no-")] or list(one.names)
        marks = " ".join(flag(name, prefix) if name.startswith("-") else f"`{name}`" for name in names)
        rows.append((marks, code(type_text(one.hint)), "required" if one.required else shown, one.parameter.help or ""))
    return table(("argument", "value", "default", "meaning"), rows) if rows else ""


def type_text(hint: Any) -> str:
    """Return the type of an argument in a few words."""
    arguments = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is Literal:
        return "|".join(map(str, arguments))
    if get_origin(hint) in (Union, UnionType):
        return "|".join(map(type_text, arguments))
    if get_origin(hint) in (list, tuple):
        return f"{type_text(arguments[0])} ..." if arguments else "text ..."
    if get_origin(hint) is Annotated:
        return type_text(arguments[0])
    return {"str": "text", "int": "integer", "float": "number", "bool": "flag", "Path": "file"}.get(
        getattr(hint, "__name__", ""), str(getattr(hint, "__name__", hint))
    )


def api_page(title: str, names: tuple[str, ...]) -> str:
    """Return a page of the public API."""
    # The engines inherit their verbs from classes that have no page.
    inherits = {"phonograph.engine.llm.LLM", "phonograph.engine.async_llm.AsyncLLM"}
    blocks = [
        f"::: {name}\n    options:\n      heading_level: 2"
        + ("\n      inherited_members: true" if name in inherits else "")
        for name in names
    ]
    return "\n\n".join([f"# {title}", *blocks]) + "\n"


def endpoints_page() -> str:
    """Return the page of endpoints, from the OpenAPI document."""
    app = FastAPI(title="Phonograph", responses=ERRORS)
    for router in (*ROUTERS, admin.router):
        app.include_router(router)
    document = app.openapi()
    schemas = document["components"]["schemas"]
    text = [
        "# Endpoints",
        "The server's own OpenAPI document is at `/openapi.json`. Every error is an object "
        '`{"error": {"message", "type", "param", "code"}}`.',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            text += [f"## {method.upper()} {path}", operation.get("description", "")]
            if parameters := operation.get("parameters"):
                rows = ((f"`{one['name']}`", kind_of(one["schema"]), one.get("description", "")) for one in parameters)
                text.append(table(("parameter", "type", "meaning"), rows))
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
                text.append(table(("field", "type", "default", "meaning"), field_rows(schema)))
    return "\n\n".join(part for part in text if part) + "\n"


def field_rows(schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each field of a body."""
    for name, field in schema.get("properties", {}).items():
        required = name in schema.get("required", ())
        default = "required" if required else f"`{field['default']}`" if field.get("default") is not None else ""
        yield f"`{name}`", kind_of(field), default, field.get("description", "").replace("\n", " ")


def kind_of(schema: dict[str, Any]) -> str:
    """Return a schema's type in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = str(schema.get("type", "any"))
    return f"list of {kind_of(schema['items'])}" if kind == "array" and schema.get("items") else kind


def metrics_page() -> str:
    """Return the page of metrics, from the collector that Prometheus reads."""
    text = [
        "# Metrics",
        "`GET /metrics` has these. Names that begin with `vllm:` mean what vLLM means by them. The dashboard for "
        "Grafana is `deploy/grafana/phonograph.json`.",
    ]
    families = EngineCollector(MagicMock(), "demo", {}).collect()
    rows = (
        (f"`{one.name}{'_total' if one.type == 'counter' else ''}`", one.type, one.documentation) for one in families
    )
    return "\n\n".join([*text, table(("name", "type", "meaning"), rows)])


def models_page() -> str:
    """Return the page of supported models, from the registry."""
    rows: list[tuple[str, str, str, str]] = []
    for name, one in sorted(ARCHITECTURES.items()):
        config: dict[str, object] = {"model_type": one.model_type, "num_hidden_layers": 1}
        # Some families have no layers by default that are implemented.
        if "layer_types" in one.fields and one.fields["layer_types"].kind.accepts([FULL]):
            config["layer_types"] = [FULL]
        if "attn_layer_indices" in one.fields:
            config["attn_layer_indices"] = [0]
        if "hybrid_override_pattern" in one.fields:
            config["hybrid_override_pattern"] = "*"
        attention = one.layers(read_settings(config, name, one))[0].attention
        bias = "by config.json" if "attention_bias" in one.fields else "yes" if attention.qkv.bias else "no"
        rows.append((f"`{name}`", f"`{one.model_type}`", bias, "yes" if attention.head_norms else "no"))
    catalog = ((f"`{name}`", f"`{hub_id}`") for name, hub_id in HUB_IDS.items())
    return "\n\n".join(
        [
            "# Supported models",
            "A model is a folder or a hub id with safetensors and one of these values in `architectures` of its "
            "`config.json`. Any other architecture is refused by name. `demo` is a model of 6 million parameters in "
            "the package.",
            table(("architecture", "model type", "bias of QKV", "norm of Q and K"), rows),
            formats(),
            "## Hardware",
            "Columns are compute capabilities of NVIDIA GPUs. FP8 means that keys and values may also be FP8. The "
            "[attention matrix](../attention-matrix.md) has the graph modes.",
            hardware_table(),
            "## Configurations in the package",
            "`phonograph explain` takes these names without network and weights, and `bench` does with "
            "`--load-format dummy`. A configuration of an architecture that is not in the table above is there to show "
            "the refusal.",
            table(("name", "hub id"), catalog),
        ]
    )
