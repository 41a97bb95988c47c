"""The whole table of downgrades: mode x support x pieces x speculation."""

from __future__ import annotations

import itertools

import pytest

from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, Reason, resolve_mode, without_support

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
DECODE_ONLY, BOTH = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
NEVER, SINGLE = GraphSupport.NEVER, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM, ALWAYS = GraphSupport.UNIFORM_BATCH, GraphSupport.ALWAYS
ERROR = "error"

# (asked, support): results for (pieces, no speculation), (pieces, speculation), (no pieces, no speculation),
# (no pieces, speculation). None asks for the default.
TABLE = {
    (NONE, NEVER): (NONE, NONE, NONE, NONE),
    (NONE, SINGLE): (NONE, NONE, NONE, NONE),
    (NONE, UNIFORM): (NONE, NONE, NONE, NONE),
    (NONE, ALWAYS): (NONE, NONE, NONE, NONE),
    (PIECEWISE, NEVER): (PIECEWISE, PIECEWISE, NONE, NONE),
    (PIECEWISE, SINGLE): (PIECEWISE, PIECEWISE, NONE, NONE),
    (PIECEWISE, UNIFORM): (PIECEWISE, PIECEWISE, NONE, NONE),
    (PIECEWISE, ALWAYS): (PIECEWISE, PIECEWISE, NONE, NONE),
    (FULL, NEVER): (ERROR, ERROR, ERROR, ERROR),
    (FULL, SINGLE): (BOTH, PIECEWISE, DECODE_ONLY, NONE),
    (FULL, UNIFORM): (BOTH, BOTH, DECODE_ONLY, DECODE_ONLY),
    (FULL, ALWAYS): (FULL, FULL, FULL, FULL),
    (DECODE_ONLY, NEVER): (PIECEWISE, PIECEWISE, NONE, NONE),
    (DECODE_ONLY, SINGLE): (DECODE_ONLY, PIECEWISE, DECODE_ONLY, NONE),
    (DECODE_ONLY, UNIFORM): (DECODE_ONLY, DECODE_ONLY, DECODE_ONLY, DECODE_ONLY),
    (DECODE_ONLY, ALWAYS): (DECODE_ONLY, DECODE_ONLY, DECODE_ONLY, DECODE_ONLY),
    (BOTH, NEVER): (PIECEWISE, PIECEWISE, NONE, NONE),
    (BOTH, SINGLE): (BOTH, PIECEWISE, DECODE_ONLY, NONE),
    (BOTH, UNIFORM): (BOTH, BOTH, DECODE_ONLY, DECODE_ONLY),
    (BOTH, ALWAYS): (BOTH, BOTH, DECODE_ONLY, DECODE_ONLY),
    (None, NEVER): (PIECEWISE, PIECEWISE, NONE, NONE),
    (None, SINGLE): (BOTH, PIECEWISE, DECODE_ONLY, NONE),
    (None, UNIFORM): (BOTH, BOTH, DECODE_ONLY, DECODE_ONLY),
    (None, ALWAYS): (FULL, FULL, FULL, FULL),
}
CASES = [
    (asked, level, pieces, tokens, TABLE[asked, level][column])
    for asked, level in TABLE
    for column, (pieces, tokens) in enumerate([(True, 0), (True, 3), (False, 0), (False, 3)])
]


@pytest.mark.parametrize("asked", [DECODE_ONLY, BOTH])
@pytest.mark.parametrize(("level", "tokens"), [(NEVER, 0), (SINGLE, 3)])
def test_reasons_say_that_there_are_no_pieces_only_where_there_are_none(
    asked: GraphMode, level: GraphSupport, tokens: int
) -> None:
    support = Support(level, "because of the test")
    with_pieces, without = (
        resolve_mode(asked, support, Pieces(available, "as it is"), speculative_tokens=tokens).reasons[-1].text
        for available in (True, False)
    )
    assert (
        f"{level.name} (because of the test)" in with_pieces and without == f"{with_pieces}; and no pieces (as it is)"
    )
    assert ("3 speculative tokens a decode has 4 tokens" in with_pieces) == bool(tokens)


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(itertools.product([None, *GraphMode], GraphSupport))


@pytest.mark.parametrize(("asked", "level", "pieces", "tokens", "expected"), CASES)
def test_table(asked, level, pieces, tokens, expected) -> None:
    support = Support(level, "because of the test")
    arguments = (asked, support, Pieces(pieces, "as the test has it"))
    if expected is ERROR:
        with pytest.raises(ConfigError, match="cudagraph_mode='FULL'.*because of the test.*works"):
            resolve_mode(*arguments, speculative_tokens=tokens)
        return
    resolution = resolve_mode(*arguments, speculative_tokens=tokens)
    assert resolution.mode is expected
    assert resolution.reasons[0].before is None
    assert resolution.reasons[-1].after is expected
    for before, after in itertools.pairwise(resolution.reasons):
        assert after.before is before.after, "the chain has no gap"
        assert after.text, "no step without a reason"
    if asked is not None and expected is not asked:
        assert len(resolution.reasons) > 1


def test_a_resolution_is_described_with_what_was_asked_for() -> None:
    support, pieces = Support(UNIFORM, "of the test"), Pieces(True, "as it is")
    default, changed, kept = (resolve_mode(asked, support, pieces) for asked in (None, FULL, PIECEWISE))
    assert default.label == "mode FULL_AND_PIECEWISE (default)"
    assert changed.label == "mode FULL_AND_PIECEWISE (FULL was asked for)"
    assert kept.label == "mode PIECEWISE"
    assert [str(one) for one in changed.reasons] == [
        "FULL: asked for",
        "FULL -> FULL_AND_PIECEWISE: support is UNIFORM_BATCH, and mixed batches need ALWAYS (of the test)",
    ]
    assert without_support(changed.reasons[-1].text, support).endswith("need ALWAYS")
    assert str(Reason(FULL, FULL, "a cause")) == "FULL: a cause"
