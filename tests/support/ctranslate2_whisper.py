"""Reader of Whisper in CTranslate2's container, which writes a folder with transformers' names.

Version 6 has a header, then each variable: its name, its shape, the number of its type and its bytes. Projections of
the same input are one matrix there.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, WhisperConfig

_TYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 4: torch.float16}
_PROJECTIONS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}


def _text(file: BinaryIO) -> str:
    return file.read(*struct.unpack("<H", file.read(2))).rstrip(b"\0").decode()


def _variables(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with path.open("rb") as file:
        (version,) = struct.unpack("<I", file.read(4))
        assert (version, _text(file)) == (6, "WhisperSpec")
        _, count = struct.unpack("<II", file.read(8))
        for _ in range(count):
            name, rank = _text(file), file.read(1)[0]
            shape = struct.unpack(f"<{rank}I", file.read(4 * rank))
            kind, size = struct.unpack("<BI", file.read(5))
            yield name, torch.frombuffer(bytearray(file.read(size)), dtype=_TYPES.get(kind, torch.uint8)).reshape(shape)


def write_whisper(source: Path, folder: Path) -> None:
    """Write config, weights in float16, tokenizer and generation config of the container's folder."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _variables(source / "model.bin"):
        if tensor.dtype != torch.float16:
            continue
        path, _, kind = name.replace("/layer_", "/layers.").replace("layers.norm", "layer_norm").rpartition("/")
        side, *where = path.split("/")
        layer = f"{where.pop(0)}." if where[0].startswith("layers.") else ""
        kind = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
        names = _PROJECTIONS.get("/".join(where), tuple(where))
        for one, part in zip(names, tensor.chunk(len(names)), strict=True):
            if not (one.endswith("k_proj") and kind == "bias"):
                tensors[f"model.{side}.{layer}{one}.{kind}"] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
    layers = sum(name.endswith("encoder_attn.out_proj.weight") for name in tensors)
    sizes = {"vocab_size": vocab_size, "d_model": width, "encoder_layers": layers, "decoder_layers": layers}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": width // 64, f"{side}_ffn_dim": 4 * width}
    several = vocab_size >= 51865
    first = 50256 + several  # Models of several languages have one token more.
    tokens = {"eos_token_id": first, "pad_token_id": first, "decoder_start_token_id": first + 1}
    ids = json.loads((source / "config.json").read_text())
    tokens |= {"suppress_tokens": ids["suppress_ids"], "begin_suppress_tokens": ids["suppress_ids_begin"]}
    name = "WhisperForConditionalGeneration"
    WhisperConfig(**sizes, **tokens, architectures=[name], dtype="float16").save_pretrained(folder)
    times: dict[str, Any] = {"alignment_heads": ids["alignment_heads"]}
    times |= {"no_timestamps_token_id": first + 106, "max_initial_timestamp_index": 50}
    if several:
        added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
        names = {token["id"]: token["content"] for token in added}
        times |= {"is_multilingual": True, "lang_to_id": {names[token]: token for token in ids["lang_ids"]}}
        times |= {"task_to_id": {"translate": first + 101, "transcribe": first + 102}}
    GenerationConfig(**tokens, **times).save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
