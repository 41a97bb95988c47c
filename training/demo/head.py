"""The EAGLE-3 head that is trained: plain torch, with the names of the authors' files, and the loss of its drafts.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025). Entry p
has the features of token p and the embedding of token p + 1, and says token p + 2.

Shape suffixes: B rows, T entries of a row, S states of a token side by side, E hidden size, H query heads, D head size,
V vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from model import MLP, Decoder, Shape, rotary, rotate
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention whose input is an embedding and a feature, each normed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def project(self, both_BTF: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [B, H, T, D]."""
        q, k, v = (
            proj(both_BTF).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (one.repeat_interleave(self.groups, 1) for one in (rotate(k, cos_TD, sin_TD), v))
        return rotate(q, cos_TD, sin_TD), k, v

    def attend(self, q_BHTD: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Return the output of step s = len(keys) - 1, [B, T, E].

        The entry of step s at position p follows the entries of the target's features up to p - s, and those of the
        steps before it at p - s + 1 to p - 1.
        """
        step, length = len(keys) - 1, q_BHTD.shape[2]
        positions = torch.arange(length)
        hidden = positions[None] > positions[:, None] - step
        scores = (q_BHTD @ keys[0].transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
        # One more score for the entry of each later step: step j has its entry at p - s + j.
        others = [(q_BHTD * _behind(keys[j], step - j)).sum(-1, keepdim=True).float() for j in range(1, step + 1)]
        shares = (torch.cat([scores, *others], -1) * self.head_dim**-0.5).softmax(-1).to(q_BHTD.dtype)
        out = shares[..., :length] @ values[0]
        for j in range(1, step + 1):
            out = out + shares[..., length + j - 1, None] * _behind(values[j], step - j)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The only layer of the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            nn.RMSNorm(size, eps) for _ in range(3)
        )
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)


class Head(nn.Module):
    """Joins states of the target, and drafts with its embedding and its matrix of logits.

    Args:
        shape: sizes of the layer.
        taps: states that it reads: state j of the target enters its layer j.
    """

    def __init__(self, shape: Shape, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.taps = replace(shape, num_hidden_layers=1), taps
        self.fc = nn.Linear(len(taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, states_BTS: Tensor, embedded_BTE: Tensor, steps: int) -> list[Tensor]:
        """Return the normed output [B, T, E] of each step of drafting.

        In a later step, the feature of an entry is the output of the step before at the entry before (the training-time
        test). The token is the right one, as if all drafts before were accepted.
        """
        layer, width = self.midlayer, states_BTS.shape[1]
        cos_TD, sin_TD = rotary(width, self.shape, states_BTS.device)
        embedded_BTE = layer.input_layernorm(embedded_BTE)
        feature = self.fc(states_BTS)
        keys, values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
        for _ in range(steps):
            both = torch.cat([embedded_BTE, layer.hidden_norm(feature)], -1)
            q_BHTD, k_BHTD, v_BHTD = layer.self_attn.project(both, cos_TD, sin_TD)
            keys.append(k_BHTD)
            values.append(v_BHTD)
            stream = feature + layer.self_attn.attend(q_BHTD, keys, values)
            stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
            outputs.append(self.norm(stream))
            feature = _behind(stream, 1)
        return outputs


def _behind(x: Tensor, places: int) -> Tensor:
    """Return what was said some places earlier along the second but last axis, zeros before the first."""
    return x if places == 0 else F.pad(x, (0, 0, places, 0))[..., :-places, :]


@torch.no_grad()
def states_of(target: Decoder, tokens_BT: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the target's states [B, T, S], and its last stream [B, T, E] behind the final norm."""
    x = target.model["embed_tokens"](tokens_BT)
    cos_TD, sin_TD = rotary(tokens_BT.shape[1], target.shape, x.device)
    states = [x]
    for layer in target.model["layers"]:
        x = layer(x, cos_TD, sin_TD)
        states.append(x)
    return torch.cat([states[tap] for tap in taps], -1), target.model["norm"](x)


def losses(head: Head, target: Decoder, tokens_BT: Tensor, answers_BT: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy with the target's distribution, and the share of equal most likely tokens.

    Args:
        head: the head.
        target: the model that it drafts for.
        tokens_BT: tokens.
        answers_BT: True for tokens that the assistant says; only these are drafted.
        steps: steps of drafting.

    Returns:
        Both of each step, [steps].
    """
    states_BTS, said_BTE = states_of(target, tokens_BT, head.taps)
    table_VE = target.model["embed_tokens"].weight
    outputs = head(states_BTS[:, :-2], F.embedding(tokens_BT[:, 1:-1], table_VE), steps)
    wanted_BT = answers_BT[:, 2:]
    with torch.no_grad():
        logits = F.linear(said_BTE[:, 1:-1], table_VE)
    found: list[Tensor] = []
    equal: list[Tensor] = []
    for step, output in enumerate(outputs):
        # An entry of step s has s entries before it that said its features.
        chosen = wanted_BT.clone()
        chosen[:, :step] = False
        probabilities = logits[chosen].float().softmax(-1)
        own = F.linear(output[chosen], table_VE).float()
        found.append(-(probabilities * own.log_softmax(-1)).sum(-1).mean())
        equal.append((own.argmax(-1) == probabilities.argmax(-1)).float().mean())
    return torch.stack(found), torch.stack(equal).detach()
