"""Stop strings and streamed text, with the demo model's real tokenizer."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_like import END, sentencepiece_like

from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.outputs import CompletionOutput
from phonograph.errors import ModelError, RequestError
from phonograph.text.output_text import TextBuilder
from phonograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(MODEL_DIRECTORY)


def build(text: str, **settings) -> tuple[TextBuilder, list[str], int]:
    """Feed the tokens of a text one by one; return the text after each, and the number of tokens that were needed."""
    builder = TextBuilder(TOKENIZER, SamplingParams(**settings), ())
    token_ids = TOKENIZER.encode(text)
    shown = []
    for count in range(1, len(token_ids) + 1):
        seen = len(shown[-1]) if shown else 0
        builder.push(token_ids[:count])
        shown.append(builder.text)
        assert builder.text_from(seen) == builder.text[seen:]
        assert not builder.text_from(len(builder.text) + 1)
        if builder.stopped is not None:
            return builder, shown, count
    builder.finish()
    return builder, shown, len(token_ids)


def test_a_stop_string_cuts_the_text_and_is_named() -> None:
    text = "12 + 7 = 19. #### 19 and more"
    builder, shown, _ = build(text, stop=["= 19.", "####"])
    assert (builder.text, builder.stopped) == ("12 + 7 ", "= 19.")
    assert all("12 + 7 ".startswith(earlier) for earlier in shown), "nothing shown is taken back"
    assert build(text, stop="####", include_stop_str_in_output=True)[0].text == "12 + 7 = 19. ####"


@pytest.mark.parametrize("prompt", ["To", "To 😀", "To a To a To a To a To a"])
def test_text_goes_on_with_the_space_that_a_decoder_would_take(prompt: str) -> None:
    tokenizer = sentencepiece_like()
    before = tokenizer.encode(prompt)
    builder = TextBuilder(tokenizer, SamplingParams(), before)
    builder.push(tokenizer.encode(f"{prompt} a Tom.")[len(before) :])
    assert builder.text == " a Tom."
    # Behind a special token a text begins, as an answer behind a template does.
    begun = TextBuilder(tokenizer, SamplingParams(), tokenizer.encode(prompt + END))
    begun.push(tokenizer.encode("a Tom."))
    assert begun.text == "a Tom."


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    for tokenizer in (TOKENIZER, sentencepiece_like()):
        token_ids = tokenizer.encode("a😀.")
        for cut in range(1, len(token_ids)):
            builder = TextBuilder(tokenizer, SamplingParams(), token_ids[:cut])
            builder.push(token_ids[cut:])
            assert "a" not in builder.text and builder.text.endswith(".")


def test_min_tokens_holds_stop_strings_back() -> None:
    text = "a b a b a b a b a b a b"
    first = build(text, stop=["b"])[2]
    builder, _, needed = build(text, stop=["b"], min_tokens=first + 3)
    assert needed > first + 3
    assert builder.stopped == "b" and builder.text.count("b") >= 1


def test_the_start_of_a_stop_string_is_shown_once_it_is_none() -> None:
    builder, shown, _ = build("to be or not to be", stop=["to be or else"])
    assert builder.text == "to be or not to be" and builder.stopped is None
    assert "to be or" not in shown[1], "it might still have become the stop string"


@pytest.mark.parametrize("stop", [["abc", "b"], ["b", "abc"], ["bc", "b"], ["b", "b y"]])
def test_of_stop_strings_in_one_token_the_one_that_ends_first_stops(stop: list[str]) -> None:
    stream = SimpleNamespace(push=lambda _: "x abc y")
    tokenizer: Any = SimpleNamespace(stream=lambda **_: stream)
    builder = TextBuilder(tokenizer, SamplingParams(stop=stop), ())
    builder.push([0])
    assert (builder.text, builder.stopped) == ("x a", "b")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["ab", "cx", "xy", "q"], ["ab", "abc", "abcx", "abcxxyq"]),  # "x", then "xy", might become "xyz"
        (["xyx", "y", "q"], ["xy", "xy", "xyxyq"]),
        (["aaaa", "z"], ["aa", "aaaaz"]),
    ],
)
def test_only_what_may_begin_a_stop_string_is_withheld(pieces: list[str], shown: list[str]) -> None:
    arriving = iter(pieces)
    tokenizer: Any = SimpleNamespace(stream=lambda **_: SimpleNamespace(push=lambda _: next(arriving)))
    builder = TextBuilder(tokenizer, SamplingParams(stop=["xyz", "aab"]), ())
    found = []
    for count in range(1, len(pieces) + 1):
        builder.push([0] * count)
        found.append(builder.text)
    assert found == shown


@given(text=st.text(min_size=1, max_size=40), stop=st.lists(st.text("ab #=1é", min_size=1, max_size=4), max_size=3))
def test_any_text_streams_without_taking_back_and_stops_first(text: str, stop: list[str]) -> None:
    whole = TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True)
    builder, shown, _ = build(text, stop=stop)
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)
    if builder.stopped is None:
        assert builder.text == whole
        assert not any(one in whole for one in stop)
    else:
        assert whole.startswith(builder.text + builder.stopped)
        assert not any(one in builder.text for one in stop)


@given(
    text=st.text("ab #=1é😀", min_size=1, max_size=40),
    stop=st.lists(st.text("ab #=1é", min_size=1, max_size=4), max_size=3),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
    data=st.data(),
)
def test_runs_of_tokens_give_the_output_of_single_tokens(
    text: str, stop: list[str], min_tokens: int, data: st.DataObject
) -> None:
    """A stop string may end in the middle of a run; the tokens after it are dropped with their log-probabilities."""
    token_ids = TOKENIZER.encode(text)
    positions = [TokenLogprobs([token_id], [-1.0], [place]) for place, token_id in enumerate(token_ids)]
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    cuts = data.draw(st.sets(st.integers(1, len(token_ids))))
    outputs: list[CompletionOutput] = []
    for ends in (range(1, len(token_ids) + 1), sorted({*cuts, len(token_ids)})):
        output = CompletionOutput(0, TextBuilder(TOKENIZER, params, ()), [], logprobs=[])
        start = 0
        for end in ends:
            output.token_ids += token_ids[start:end]
            output.positions += positions[start:end]
            output.update("length" if end == len(token_ids) else None, None)
            start = end
            if output.finish_reason is not None:
                break
        outputs.append(output)
    assert outputs[0] == outputs[1] and outputs[0].token_ids == token_ids[: len(outputs[0].token_ids)]


def test_tokenizer_errors_name_a_remedy(tmp_path) -> None:
    with pytest.raises(ModelError, match="(?s)no usable tokenizer.*--tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(RequestError, match="chat template rejects"):
        TOKENIZER.encode_chat([{"content": "no role"}])


def test_an_output_shows_and_pickles_all_of_its_fields() -> None:
    output = CompletionOutput(1, "it's", [5, 6], "stop", 6, [])
    shown = (
        "CompletionOutput(index=1, text=\"it's\", token_ids=[5, 6], finish_reason='stop', stop_reason=6, logprobs=[])"
    )
    assert repr(output) == shown
    assert pickle.loads(pickle.dumps(output)) == output == eval(shown)
    assert output != CompletionOutput(1, "it's", [5, 6], "stop", 7, [])
