"""Families of models that only tests have: norms after attention and feed-forward, and feed-forwards of two widths."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from phonograph.models.families.family import Family, Settings, layer_sizes
from phonograph.models.families.llama import LLAMA
from phonograph.models.layer_spec import Factors, LayerSpec, decoder_layer
from phonograph.models.registry import ARCHITECTURES


def norms_after(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return layers whose outputs are normed before they are added, like OLMo 2's; the last one has norms on both
    sides, like Gemma 2's."""
    sizes = layer_sizes(settings)
    after = decoder_layer(
        sizes,
        attention_norms=(None, "post_attention_layernorm"),
        feed_forward_norms=(None, "post_feedforward_layernorm"),
    )
    both = decoder_layer(
        sizes,
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        feed_forward_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )
    return (*(after,) * (settings["num_hidden_layers"] - 1), both)


def two_widths(settings: Settings) -> tuple[LayerSpec, ...]:
    """Return layers that have a wide and a narrow feed-forward in turn, and biases in the narrow ones."""
    sizes = layer_sizes(settings)
    narrow = decoder_layer(sizes._replace(intermediate_size=sizes.intermediate_size // 3), mlp_bias=True)
    return tuple((decoder_layer(sizes), narrow)[index % 2] for index in range(settings["num_hidden_layers"]))


FAMILIES = {
    "NormsAfterForCausalLM": Family(
        model_type="norms_after",
        fields=LLAMA.fields,
        layers=norms_after,
        factors=lambda settings: Factors(embedding=settings["hidden_size"] ** 0.5, logits=0.25),
    ),
    "TwoWidthsForCausalLM": Family(
        model_type="two_widths", fields=LLAMA.fields, layers=two_widths, factors=lambda _: Factors(residual=0.5)
    ),
}


@contextmanager
def registered() -> Generator[None]:
    """Register the families inside the context."""
    ARCHITECTURES.update(FAMILIES)
    try:
        yield
    finally:
        for name in FAMILIES:
            del ARCHITECTURES[name]
