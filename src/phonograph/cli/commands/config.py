"""`phonograph config`: what the settings come to, and which source gave each."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.options import GROUPS, takes_engine_settings
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
    effective, given = settings
    values = effective.model_dump(mode="json")
    if as_json:
        rows = {
            name: {"value": value, "source": given[name].source, "where": given[name].where}
            if name in given
            else {"value": value, "source": "default"}
            for name, value in values.items()
        }
        print(json.dumps(rows, indent=2))
        return
    table = Table("setting", "value", "from", title="Effective configuration", title_justify="left")
    for names in GROUPS.values():
        for name in names:
            if name in values:
                table.add_row(name, _shown(values[name]), given[name].where if name in given else "default")
        table.add_section()
    Console().print(table, markup=False)


def _shown(value: object) -> str:
    return "unset" if value is None else json.dumps(value).strip('"')
