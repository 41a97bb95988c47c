"""`phonograph config`: the effective settings, each with the source of its value."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.options import HEADINGS, takes_engine_settings
from phonograph.config.engine_config import EngineConfig
from phonograph.config.sources import SourcedValue


@takes_engine_settings
def config(
    settings: tuple[EngineConfig, dict[str, SourcedValue]],
    *,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", show_default=False, help="One JSON object instead of a table.")
    ] = False,
) -> None:
    """Print the effective configuration and where each value comes from."""
    effective, sources = settings
    values = effective.model_dump(mode="json")
    if as_json:
        rows = {
            name: {"value": value, "source": sources[name].source, "where": sources[name].where}
            if name in sources
            else {"value": value, "source": "default"}
            for name, value in values.items()
        }
        print(json.dumps(rows, indent=2))
        return
    table = Table("setting", "value", "from", title="Effective configuration", title_justify="left")
    for name, value in values.items():
        if name in HEADINGS:
            table.add_section()
        shown = "unset" if value is None else json.dumps(value).strip('"')
        table.add_row(name, shown, sources[name].where if name in sources else "default")
    Console().print(table, markup=False)
