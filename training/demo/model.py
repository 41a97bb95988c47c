"""The Llama that is trained: plain torch, parameters named and laid out as the Hugging Face checkpoint wants them.

Shape suffixes: B rows, T tokens of a row, H query heads, K KV heads, D head size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The architecture; field names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        rows, width, _ = x.shape
        q_BHTD, k_BKTD, v_BKTD = (
            proj(x).view(rows, width, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTD, k_BKTD = rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BKTD, cos_TD, sin_TD)
        out = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, width, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TD, sin_TD)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embeddings (also the output head), layers, final norm; its state dict is the checkpoint's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers)),
                "norm": nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps),
            }
        )
        self._initialize()

    def _initialize(self) -> None:
        depth_scale = (2 * self.shape.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.04 * (depth_scale if residual else 1.0))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x = self.model["embed_tokens"](tokens_BT)
        cos_TD, sin_TD = rotary(tokens_BT.shape[1], self.shape, x.device)
        for layer in self.model["layers"]:
            x = layer(x, cos_TD, sin_TD)
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def rotary(width: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position in float32, halves repeated as Hugging Face lays them out."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(width, device=device, dtype=torch.float32), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Apply the rotary embedding in float32, and give back x's own type."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos_TD + turned * sin_TD).to(x.dtype)


def losses(model: Decoder, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean loss of a batch [B, T + 1], and for the log the plain mean over answer tokens."""
    logits = model(tokens[:, :-1])
    each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    answers = (weight == 1.0).float()
    return (each * weight).sum() / weight.sum(), (each.detach() * answers).sum() / answers.sum()
