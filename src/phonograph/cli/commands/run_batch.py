"""`phonograph run-batch`: answers the requests of a file of OpenAI's batch format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from phonograph.cli.options import takes_serve_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import check_installed, note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import counted

PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


@takes_serve_config
def run_batch(
    configs: tuple[EngineConfig, ServerConfig],
    *,
    input_file: Annotated[Path, Parameter(alias="-i", help="Requests, one JSON object a line.")],
    output_file: Annotated[Path, Parameter(alias="-o", help="Answers, one JSON object a line; it is replaced.")],
) -> int:
    """Answer the requests of a file in OpenAI's batch format, in their order. Answers may be errors."""
    check_installed("run-batch", PACKAGES, extra="server")
    from phonograph.server.batch.batch_file import check_output, read_batch
    from phonograph.server.batch.batch_run import URLS
    from phonograph.server.batch.batch_run import run_batch as run

    requests = read_batch(input_file, URLS)
    check_output(output_file)
    statuses: Counter[bool] = Counter()
    with output_file.open("w", encoding="utf-8") as output, progress_bar() as progress:

        def answered(line: str, status: int) -> None:
            output.write(line)
            output.flush()
            statuses[status < 400] += 1
            progress("requests", statuses.total(), len(requests))

        if requests:
            run(*configs, requests, progress, answered)
    note(f"{counted(statuses[True], 'request')} answered, {statuses[False]} with an error, in {output_file}")
    return 0
