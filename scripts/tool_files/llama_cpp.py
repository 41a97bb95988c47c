"""Cases of llama.cpp: GGUF files that its library quantizes, by ctypes on the build that the package of npm ships.

The tests' writer makes the file in F32. The reference has the weights as gguf's Python code dequantizes them, which the
products of llama.cpp follow only as far as its activations of 8 bits allow; its own logits are kept beside them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import torch
from gguf_files import NAMES, halved, write_gguf
from tiny_models import TOKENS, VOCAB_SIZE, keep_case, logits_of, make_source

LARGE = {
    **{"hidden_size": 256, "intermediate_size": 256},
    **{"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
}
"""Sizes with blocks of 256 numbers, except in o_proj, for which llama.cpp takes another type."""
TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
"""Values of the enumeration llama_ftype."""
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "q4-0": ("Q4_0", "llama", {}),
    "q8-0": ("Q8_0", "qwen2", {}),
    "q4-k-m": ("Q4_K_M", "llama", LARGE),
    "q5-k-m": ("Q5_K_M", "llama", LARGE | {"num_hidden_layers": 1}),
    "q6-k": ("Q6_K", "llama", LARGE | {"num_attention_heads": 8, "num_hidden_layers": 1}),
}


class Settings(ctypes.Structure):
    """A structure of settings; its size is larger than that of any of llama.cpp's."""

    _fields_ = [("numbers", ctypes.c_int32 * 128)]


class Batch(ctypes.Structure):
    """Structure llama_batch."""

    _fields_ = [("count", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("tokens", "embeddings", "positions", "counts", "sequences", "wanted")
    ]


class Library:
    """llama.cpp's libraries in a folder."""

    def __init__(self, folder: Path) -> None:
        libraries = {}
        for name in ("libggml-base", "libggml", "libllama"):
            (path,) = [path for path in folder.glob(f"{name}.*so*") if path.name.split(".")[0] == name]
            libraries[name] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        libraries["libggml"].ggml_backend_load_all_from_path(str(folder).encode())
        self.llama = libraries["libllama"]
        for name in ("model_quantize", "model", "context"):
            getattr(self.llama, f"llama_{name}_default_params").restype = Settings
        for name in ("model_load_from_file", "init_from_model"):
            getattr(self.llama, f"llama_{name}").restype = ctypes.c_void_p
        self.llama.llama_batch_get_one.restype = Batch
        self.llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)

    def quantize(self, source: Path, path: Path, kind: str) -> None:
        """Write a file whose matrices are of a type."""
        settings = self.llama.llama_model_quantize_default_params()
        settings.numbers[0], settings.numbers[1] = 1, TYPES[kind]
        status = self.llama.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(settings))
        if status:
            raise RuntimeError(f"llama_model_quantize returned {status}")

    def logits(self, path: Path) -> torch.Tensor:
        """Return the logits of `TOKENS` of a file."""
        model = self.llama.llama_model_load_from_file(str(path).encode(), self.llama.llama_model_default_params())
        context = self.llama.llama_init_from_model(ctypes.c_void_p(model), self.llama.llama_context_default_params())
        tokens = (ctypes.c_int32 * len(TOKENS))(*TOKENS)
        wanted = (ctypes.c_int8 * len(TOKENS))(*[1] * len(TOKENS))
        batch = self.llama.llama_batch_get_one(tokens, len(TOKENS))
        batch.wanted = ctypes.cast(wanted, ctypes.c_void_p)
        if self.llama.llama_decode(ctypes.c_void_p(context), batch):
            raise RuntimeError("llama_decode failed")
        rows = [
            self.llama.llama_get_logits_ith(ctypes.c_void_p(context), row)[:VOCAB_SIZE] for row in range(len(TOKENS))
        ]
        return torch.tensor(rows)


def tokenizer_keys(arch: str) -> dict[str, Any]:
    """Return keys of a SentencePiece tokenizer of words, and of the file's maker."""
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in b"\n "),
        *(f"\u2581w{i}" for i in range(5, VOCAB_SIZE)),
    ]
    return {
        "general.name": "tiny",
        "general.quantization_version": 2,
        f"{arch}.vocab_size": VOCAB_SIZE,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0] * 5 + [float(-i) for i in range(5, VOCAB_SIZE)],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 6] + [1] * (VOCAB_SIZE - 5),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def meant(path: Path, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Return the weights of a file by their names in transformers, as gguf dequantizes them."""
    names = {own: name for name, own in NAMES.items()}
    weights: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        module, _, end = tensor.name.rpartition(".")
        block, _, own = module.rpartition(".")
        if own in heads:
            array = halved(array, heads[own])
        prefix = f"model.layers.{block.removeprefix('blk.')}." if block else ""
        weights[f"{prefix}{names[own]}.{end}"] = torch.from_numpy(array)
    return weights


def main(out: Path, libraries: Path, only: list[str]) -> None:
    library = Library(libraries)
    build = json.loads((libraries / "_nlcBuildMetadata.json").read_text())["buildOptions"]
    for case, (kind, family, sizes) in CASES.items():
        if only and case not in only:
            continue
        source = make_source(Path(mkdtemp()), family=family, dtype=torch.float32, **sizes)
        full, written = source / "full.gguf", Path(mkdtemp())
        write_gguf(full, source, lambda name: "F32", header=tokenizer_keys(family))
        path = written / "model.gguf"
        library.quantize(full, path, kind)
        heads = {"attn_q": sizes.get("num_attention_heads", 4), "attn_k": sizes.get("num_key_value_heads", 2)}
        logits = logits_of(source, meant(path, heads if family == "llama" else {}))
        theirs = library.logits(path)
        print(case, "llama.cpp's logits are apart by", float((theirs - logits).norm() / logits.norm()), flush=True)
        how = "weights by gguf's dequantize; transformers, float32. theirs: llama.cpp on the CPU, activations of 8 bits"
        keep_case(
            out, written, case, packages=["gguf"], logits=logits, theirs=theirs, reference=how, build=build["llamaCpp"]
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
