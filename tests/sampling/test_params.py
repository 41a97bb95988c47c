"""Validation of sampling parameters: a bad value is refused by name, with its value and what would work."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import RequestError

NAN, INF = math.nan, math.inf

REFUSED = [
    *(("n", value, ">= 1 and <= 1024") for value in (0, -1, 1025, 1.0, "1", None, True, np.True_, 2**70)),
    *(("temperature", value, "finite number >= 0") for value in (-0.1, -1, NAN, INF, "1", None, True, 10**400, [1.0])),
    *(("top_k", value, ">= -1") for value in (-2, 1.5, NAN, "5", None, False)),
    *(("top_p", value, "> 0 and <= 1") for value in (0, 0.0, -0.5, 1.0001, NAN, INF, True, "0.5", None)),
    *(("min_p", value, ">= 0 and <= 1") for value in (-0.001, 1.5, NAN, -INF, True, None)),
    *(("repetition_penalty", value, ">= 1e-06 and <= 1e+06") for value in (0, -1.0, 1e-9, 1e9, NAN, INF, None)),
    *(("presence_penalty", value, ">= -2 and <= 2") for value in (-2.01, 2.01, NAN, "x", True)),
    *(("frequency_penalty", value, ">= -2 and <= 2") for value in (-3, 3, NAN, None, -(10**400))),
    *(
        ("seed", value, ">= -9223372036854775808 and <= 9223372036854775807")
        for value in (2**63, -(2**63) - 1, 0.5, True)
    ),
    *(("logprobs", value, ">= -1 and <= 1024") for value in (-2, 1025, True, 1.0)),
    *(("prompt_logprobs", value, ">= -1 and <= 1024") for value in (-2, 1025, False, "2")),
    *(("max_tokens", value, ">= 1") for value in (0, -5, 1.0, True, "16")),
    *(("min_tokens", value, ">= 0") for value in (-1, 0.0, None, True)),
    *(("stop", value, "strings") for value in (5, b"ab", {"a": 1})),
    *(("stop_token_ids", value, "token ids") for value in (3, "12", {1: 2})),
    *(("ignore_eos", value, "True or False") for value in (0, 1, None, "yes")),
    *(("include_stop_str_in_output", value, "True or False") for value in (0, None)),
    *(("skip_special_tokens", value, "True or False") for value in (1, "no")),
    *(("detokenize", value, "True or False") for value in (0, None)),
    *(("logit_bias", value, "map token ids to biases") for value in ([1, 2], "x", 3)),
]


@pytest.mark.parametrize(("name", "value", "remedy"), REFUSED)
def test_refuses_and_says_what_works(name: str, value: object, remedy: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert caught.value.value is value or caught.value.value == value
    said = str(caught.value)
    assert said.startswith(f"{name}={value!r}: " if len(repr(value)) < 80 else f"{name}={repr(value)[:80]}")
    assert len(said) < 400, "long values are cut"
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("params", "parameter", "value", "remedy"),
    [
        ({"stop": ["ok", ""]}, "stop", "", "non-empty"),
        ({"stop": ["ok", 7]}, "stop", 7, "string"),
        ({"stop": ""}, "stop", "", "non-empty"),
        ({"stop": "END", "detokenize": False}, "detokenize", False, "use stop_token_ids"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids", -1, ">= 0"),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids", 2.0, "integer"),
        ({"stop_token_ids": [True]}, "stop_token_ids", True, "integer"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key", -1, ">= 0"),
        ({"logit_bias": {"7": 1.0}}, "logit_bias key", "7", "integer"),
        ({"logit_bias": {7: INF}}, "logit_bias", INF, "<= 1e30"),
        ({"logit_bias": {7: 1e31}}, "logit_bias", 1e31, "token 7"),
        ({"logit_bias": {7: "much"}}, "logit_bias", "much", "number"),
        ({"logit_bias": {7: True}}, "logit_bias", True, "number"),
        (
            {"logit_bias": {token: token / 7 for token in range(1024)}},
            "logit_bias",
            "...",
            "1024 different biases; at most 1023",
        ),
        ({"min_tokens": 17}, "min_tokens", 17, "max_tokens (16)"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", 5, "max_tokens (4)"),
    ],
)
def test_refuses_items_and_contradictions(
    params: dict[str, object], parameter: str, value: object, remedy: str
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert (caught.value.parameter, caught.value.value) == (parameter, value)
    assert remedy in str(caught.value)


def test_nan_bias_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias=nan"):
        SamplingParams(logit_bias={3: NAN})


def test_accepts_the_edges() -> None:
    params = SamplingParams(
        n=1024,
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=1.0,
        repetition_penalty=1e-6,
        presence_penalty=-2,
        frequency_penalty=2.0,
        logit_bias={0: -INF, 5: -1e300, 6: 100},
        seed=-(2**63),
        logprobs=0,
        prompt_logprobs=1024,
        max_tokens=None,
        min_tokens=10**9,
        stop="end",
        stop_token_ids=range(3),
    )
    assert params.greedy
    assert params.has_penalties
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (0, 1, 2)
    assert pickle.loads(pickle.dumps(params)) == params


def test_numbers_become_pythons() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        seed=np.uint8(7),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(9): np.float64(1.5)},
        max_tokens=np.int16(20),
    )
    assert [type(value) for value in (params.n, params.seed, params.max_tokens)] == [int, int, int]
    assert [type(value) for value in (params.temperature, params.top_p)] == [float, float]
    assert (params.n, params.temperature, params.top_p, params.seed, params.max_tokens) == (2, 0.5, 0.5, 7, 20)
    assert [type(token_id) for token_id in (*params.stop_token_ids, *params.logit_bias)] == [int] * 3
    assert type(params.logit_bias[9]) is float


def test_keeps_no_hold_of_the_callers_collections() -> None:
    stop, stop_token_ids, logit_bias = ["a"], [1], {2: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=stop_token_ids, logit_bias=logit_bias)
    stop.append("")
    stop_token_ids.append(-1)
    logit_bias[-1] = NAN
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {2: 1.0})


def test_a_generator_of_stops_is_read_once() -> None:
    assert SamplingParams(stop=(text for text in ("a", "b"))).stop == ("a", "b")


def test_vocabulary() -> None:
    SamplingParams(logit_bias={99: 1.0}, stop_token_ids=[99]).check_vocabulary(100)
    with pytest.raises(RequestError, match=r"logit_bias=100: .* 0 to 99"):
        SamplingParams(logit_bias={99: 1.0, 100: 1.0}).check_vocabulary(100)
    with pytest.raises(RequestError, match=r"stop_token_ids=250: .* 0 to 99"):
        SamplingParams(stop_token_ids=[250]).check_vocabulary(100)


def test_a_copy_with_checked_values_has_all_others() -> None:
    params = SamplingParams(
        n=2, temperature=0.3, top_k=7, logit_bias={2: 1.0}, stop=["a"], max_tokens=9, ignore_eos=True
    )
    assert params.with_checked(seed=5, stop=()) == replace(params, seed=5, stop=()) != params
    assert params.seed is None and params.stop == ("a",)
