"""Kinds of the layers of a hybrid model, as `layer_types` names them."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import UnsupportedModelError, shortened
from phonograph.models.config_fields import FULL


def check_kinds(types: Sequence[str], kind: str, count: int) -> None:
    """Check that each of `count` layers has a state of this kind or attention, and one or more have attention.

    Raises:
        UnsupportedModelError: there are other kinds, or no attention.
    """
    if len(types) != count or not {kind, FULL} >= set(types) or FULL not in types:
        raise UnsupportedModelError(
            f"layer_types={shortened(repr(types))} must name {kind} or {FULL} for each of {count} layers, and {FULL} "
            "for one or more"
        )
