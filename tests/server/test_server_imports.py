"""Imports of the server's process, which come before the engine's process starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from whisper_checkpoint import make_multilingual

PROGRAM = """
import asyncio, sys
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.engine.process import main
from phonograph.server.http.application import make_app
from phonograph.server.http.run import started_server

async def serve(model):
    config = EngineConfig(model=model, device="cpu", max_num_seqs=2, cudagraph_capture_sizes="1,2", num_kv_blocks=64)
    async with started_server(config, ServerConfig(), None, lambda *_: None) as serving:
        make_app(serving)
        names = {"torch", "phonograph.models.layer_spec"}
        print(serving.engine.facts.encoder is not None, *sorted(names & {*sys.modules}))

if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
"""


@pytest.mark.parametrize("hears", [False, True], ids=["demo", "whisper"])
def test_torch_is_not_imported(hears: bool, tmp_path: Path) -> None:
    """It takes seconds, before the engine's process can compile kernels and make the context of its device.

    Some tokenizers of transformers import it, beside the start of the engine.
    """
    if hears:
        make_multilingual(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path) if hears else "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == ("True torch" if hears else "False")
