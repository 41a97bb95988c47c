"""`owner/repo:TYPE`: a GGUF file of the hub, served here by a fake of its HTTP interface, and files in parts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import ModelError
from phonograph.files import hub_client
from phonograph.files.gguf_file import read_gguf
from phonograph.files.gguf_parts import parts_of
from phonograph.files.hub_gguf import files_of_type, gguf_reference, gguf_types
from phonograph.files.model_files import model_path

COMMIT = "1" * 40
FILES = {
    "owner/repo": {
        "README.md": b"text",
        "Model-Q4_K_M.gguf": b"GGUF small",
        "model.q8_0.gguf": b"GGUF large",
        "BF16/Model-BF16-00001-of-00002.gguf": b"GGUF first",
        "BF16/Model-BF16-00002-of-00002.gguf": b"GGUF second",
        "Model-F16-00001-of-00002.gguf": b"GGUF alone",
        "mmproj-Q4_K_M.gguf": b"GGUF of pictures",
        "a/Model-IQ4_XS.gguf": b"1",
        "b/Model-IQ4_XS.gguf": b"2",
    },
    "owner/plain": {"config.json": b"{}"},
    "owner/broken": {"m-Q4_0.gguf": bytes(range(250)) * 100_000},
    "owner/demo": {path.name: path.read_bytes() for path in MODEL_DIRECTORY.iterdir() if path.is_file()},
}
BREAKS = "owner/broken"
"""Repository whose first transfer of a file breaks in the middle."""
TYPES = "BF16, F16, IQ4_XS, Q4_K_M, Q8_0"


class Hub(BaseHTTPRequestHandler):
    """Lists and sends files as the hub does."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        ranges = self.headers.get("range", "")
        self.server.asked.append(f"{self.command} {self.path} {ranges}")  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        _, _, name = path.partition("/api/models/")
        repo = "/".join((name or path.strip("/")).split("/")[:2])
        files = FILES.get(repo)
        if files is None:
            self._send(401, b"{}", {"x-error-code": "RepoNotFound"})
        elif "/tree/" in name:
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        elif name:
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            content = files.get(path.split("/resolve/")[1].split("/", 1)[1])
            if content is None:
                self._send(404, b"", {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT})
                return
            tags = {"etag": f'"{hashlib.sha1(content).hexdigest()}"', "x-repo-commit": COMMIT}
            start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            if start:
                tags["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            breaks = repo == BREAKS and self.command == "GET" and not start
            self._send(206 if start else 200, content[start:], tags, cut=len(content) // 2 if breaks else None)
            self.close_connection = breaks or self.close_connection

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def hub() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def with_hub(hub: Any, home: Path, command: list[str], **environment: str) -> tuple[str, str]:
    """Run Python in a process that has this hub; return what it prints on both streams."""
    variables = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        **environment,
    }
    command = [sys.executable, *command]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=100)
    return result.stdout.strip(), result.stderr


def found(hub: Any, home: Path, *models: str, folder: Path | None = None, **environment: str) -> str:
    """Return what `model_path` says in a process that has this hub: the path with its content, or the error.

    A line for each model. folder: of downloads.
    """
    program = (
        "import sys\n"
        "from phonograph.errors import ModelError\n"
        "from phonograph.files.model_files import model_path\n"
        "for model in sys.argv[2:]:\n"
        "    try:\n"
        "        path = model_path(model, download_dir=sys.argv[1] or None)\n"
        "        print(path, path.read_text() if path.is_file() else '')\n"
        "    except ModelError as error:\n"
        "        print(error)\n"
    )
    return with_hub(hub, home, ["-c", program, str(folder or ""), *models], **environment)[0]


def test_one_file_is_downloaded_and_found_again_without_network(hub: Any, tmp_path: Path) -> None:
    hub.asked.clear()
    said = found(hub, tmp_path, "owner/repo:q4_k_m")
    assert said.endswith("/Model-Q4_K_M.gguf GGUF small") and said.startswith(str(tmp_path))
    assert not any("q8_0" in path or "BF16" in path or "mmproj" in path for path in hub.asked)
    assert found(hub, tmp_path, "owner/repo:Q4_K_M", HF_HUB_OFFLINE="1") == said
    assert found(hub, tmp_path, "owner/repo:Q4_K_M", HF_ENDPOINT="http://127.0.0.1:9") == said
    assert "cannot be reached" in found(hub, tmp_path, "owner/repo:Q8_0", HF_HUB_OFFLINE="1")


def test_a_download_goes_on_where_its_connection_broke(hub: Any, tmp_path: Path) -> None:
    hub.asked.clear()
    program = "import sys; from phonograph.files.model_files import model_path; print(model_path(sys.argv[1]))"
    path, _ = with_hub(hub, tmp_path, ["-c", program, f"{BREAKS}:Q4_0"])
    content = FILES[BREAKS]["m-Q4_0.gguf"]
    assert Path(path).read_bytes() == content
    gets = [asked for asked in hub.asked if asked.startswith("GET") and "resolve" in asked]
    starts = [int(asked.rpartition("bytes=")[2].removesuffix("-")) for asked in gets if "bytes=" in asked]
    assert len(gets) == 2 and len(starts) == 1 and 0 < starts[0] <= len(content) // 2


def test_a_model_is_pulled_with_its_tokenizer_and_listed(hub: Any, tmp_path: Path) -> None:
    cli = ["-m", "phonograph"]
    pull = [*cli, "pull", "owner/demo"]
    said, notes = with_hub(hub, tmp_path, pull)
    size = len(FILES["owner/demo"]["model.safetensors"])
    assert said.endswith(f"({size / 2**30:.2f} GiB)") and "of owner/demo, 0.0 GiB, to" in notes
    found(hub, tmp_path, "owner/repo:Q4_K_M", "owner/repo:BF16")
    twice = "from phonograph.cli.app import main; assert main(['list', '--json']) == main(['ls']) == 0"
    listed, _ = with_hub(hub, tmp_path, ["-c", twice], HF_HUB_OFFLINE="1")
    rows = [json.loads(line) for line in listed.splitlines() if line.startswith("{")]
    assert {row["model"]: row["bytes"] for row in rows} == {
        "owner/demo": size,
        "owner/repo:Q4_K_M": 10,
        "owner/repo:BF16": 10 + 11,
    }
    assert re.search(r"^owner/repo:BF16 +0\.00 ", listed, flags=re.MULTILINE)
    again, notes = with_hub(hub, tmp_path, pull, HF_ENDPOINT="http://127.0.0.1:9")
    assert again == said and "of owner/demo" not in notes, "files and tokenizer are there without the network"


def test_nothing_downloaded_is_said(hub: Any, tmp_path: Path) -> None:
    said, notes = with_hub(hub, tmp_path, ["-m", "phonograph", "list"])
    assert said == "" and "no model was downloaded; `phonograph pull MODEL` does" in notes


def test_all_parts_are_downloaded_to_the_folder_of_downloads(hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    said = found(hub, tmp_path / "home", "owner/repo:BF16", folder=folder)
    first = Path(said.partition(" ")[0])
    assert first.is_relative_to(folder) and said.endswith("-00001-of-00002.gguf GGUF first")
    assert [part.read_text() for part in parts_of(first)] == ["GGUF first", "GGUF second"]


def test_what_a_repository_lacks_is_named_with_what_it_has(hub: Any, tmp_path: Path) -> None:
    cases = {
        "owner/repo:Q5_0": f"owner/repo has no GGUF file of type 'Q5_0'; it has {TYPES}",
        "owner/repo:F16": "owner/repo has 1 of the 2 parts of type 'F16'; choose another type",
        "owner/repo:IQ4_XS": "2 GGUF files of type 'IQ4_XS'; give one by its name: a/Model-IQ4_XS.gguf, b/Model",
        "owner/repo": f"owner/repo has GGUF files; choose one by its type, such as owner/repo:Q4_K_M; it has {TYPES}",
        "owner/plain:Q4_0": "owner/plain has no GGUF file, and so none of type 'Q4_0'; leave the type out",
        "owner/absent:Q4_0": "model 'owner/absent:Q4_0' is not on the hub, or is private",
    }
    lines = found(hub, tmp_path, *cases).splitlines()
    for line, said in zip(lines, cases.values(), strict=True):
        assert said in line


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub_client.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))

    def check(sizes: dict[str, int]) -> None:
        folder = str(tmp_path / "not" / "there")
        place = {"revision": None, "download_dir": folder}
        hub_client.check_room("owner/repo", sizes, patterns=["*.gguf"], ignored=["b*"], **place)

    with pytest.raises(ModelError, match=r"needs 2.0 GiB, and .* has 1.0 GiB of free space; .*--download-dir"):
        check({"a.gguf": 2**31})
    check({"a.gguf": 2**29, "b.gguf": 2**31, "c.bin": 2**31})


def test_references() -> None:
    assert gguf_reference("owner/repo-GGUF:UD-Q4_K_XL") == ("owner/repo-GGUF", "UD-Q4_K_XL")
    assert gguf_reference("owner/repo:sub/model.gguf") == ("owner/repo", "sub/model.gguf")
    for other in ("owner/repo", "demo", "./a/b:c", "/a/b:c", "a:b", "owner/repo:"):
        assert gguf_reference(other) is None, other


def test_types_in_names() -> None:
    names = ["M-Q4_K_M.gguf", "m.q8_0.gguf", "M-UD-Q4_K_XL.gguf", "M-MXFP4_MOE.gguf", "M-1.5B.gguf", "x-F16.bin"]
    assert gguf_types(names) == ["MXFP4_MOE", "Q4_K_M", "Q8_0", "UD-Q4_K_XL"]
    assert files_of_type(["M-UD-Q4_K_XL.gguf", "mmproj-Q4_K_XL.gguf"], "Q4_K_XL", "r") == ["M-UD-Q4_K_XL.gguf"]
    assert files_of_type(["M-Q4_0.gguf", "M-Q4_0_8.gguf"], "Q4_0", "r") == ["M-Q4_0.gguf"]
    assert files_of_type(["a/M-Q4_0.gguf", "b/M-Q4_0.gguf"], "b/M-Q4_0.gguf", "r") == ["b/M-Q4_0.gguf"]
    with pytest.raises(ModelError, match="it has M.gguf"):
        files_of_type(["M.gguf"], "Q4_0", "r")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Return the parts of a file as llama.cpp's package writes them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(7)
    for number in range(5):
        writer.add_tensor(f"t{number}", np.full((4, 8), number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def test_parts_are_read_as_one_file(parts: list[Path]) -> None:
    for path in parts:
        file = read_gguf(path)
        assert file.values["llama.block_count"] == 7 and file.path == parts[0]
        assert {name: float(tensor.data[0, 0]) for name, tensor in file.tensors.items()} == {
            f"t{number}": number for number in range(5)
        }
        file.release()
    assert model_path(parts[0].parent) == parts[0]


def test_a_part_that_is_missing_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003.gguf is missing, part 2 of 3 of a model; download it"):
        read_gguf(parts[0])
    with pytest.raises(ModelError, match="has 2 GGUF files"):
        model_path(parts[0].parent)
    renamed = parts[0].rename(parts[0].with_name("m.gguf"))
    with pytest.raises(
        ModelError, match=r"one of 3 parts, and its name does not end with -00001-of-00003.gguf: rename"
    ):
        read_gguf(renamed)
