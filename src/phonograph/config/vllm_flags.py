"""Flags of vLLM that are no settings here: values that change nothing, and the reason for every other one.

One table, `vllm_flag_table`, serves flags, keyword arguments and YAML.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Container, Iterable, Mapping, Sequence

from phonograph.config.values import unless_null
from phonograph.config.vllm_flag_table import ALWAYS, MISSING, NEUTRAL, NO_MEANING, RENAMED, SWITCHES, VARIABLES

SAMPLING = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "shown_token_ids", "detokenize", "structured_outputs"),
    *("reasoning_end_token_ids", "reasoning_start_token_id", "thinking_token_budget"),
    *("allowed_token_ids", "bad_words", "logprob_token_ids", "skip_reading_prefix_cache", "speculate"),
    *("repetition_detection", "stream_interval", "beam_step", "prompt_logprob_token_ids", "prompt_logprob_start"),
)
"""Sampling parameters, which are no settings of an engine. This room cannot import them."""


_AS_HERE = ("backend", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")
"""Keys of vLLM's configuration of structured outputs that change nothing here. Requests may differ from the default."""


def is_neutral(name: str, value: object) -> bool:
    """Return True if a setting or flag of vLLM with this value, or the text of it, changes nothing here."""
    flag = _flag(name)
    if unless_null(value) is None:
        return flag in NEUTRAL or flag in MISSING or flag in ALWAYS or flag in RENAMED
    text = str(value).strip().lower()
    allowed = NEUTRAL.get(flag, ())
    name, _, key = flag.partition(".")
    if name == "--structured-outputs-config":
        return _is_as_here({key.replace("-", "_"): value} if key else value)
    if allowed in (("true",), ("false",)):
        text = {"1": "true", "0": "false", "yes": "true", "no": "false"}.get(text, text)
    elif allowed in (("1",), ("0",)):
        text = text.removesuffix(".0")
    return text in allowed or allowed == ("*",)


def _is_as_here(config: object) -> bool:
    """Return True if vLLM's configuration of structured outputs has only libraries, and forms that are the default."""
    try:
        found = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        return False
    return isinstance(found, Mapping) and all(
        key in _AS_HERE or value in (None, False, "") for key, value in found.items()
    )


def no_meaning(name: str) -> str | None:
    """Return one sentence about a setting or flag of vLLM that has no meaning here; None for others."""
    flag = _flag(name.partition("=")[0]).replace("--no-", "--", 1)
    return f"{flag} is vLLM's and has no effect here: {NO_MEANING[flag]}" if flag in NO_MEANING else None


def explain_variables(environ: Mapping[str, str]) -> str | None:
    """Return one sentence about the variables of vLLM that are set, with ours; None if there are none."""
    found = sorted(name for name in environ if name.startswith("VLLM_"))
    if not found:
        return None
    texts = [f"{name} (here it is {VARIABLES[name]})" if name in VARIABLES else name for name in found]
    return f"environment variables of vLLM are not read: {', '.join(texts)}"


def without_neutral(words: Sequence[str], unknown: str) -> list[str] | None:
    """Return a command line without an unknown flag, if that is one of vLLM's whose value changes nothing here."""
    unknown = unknown.partition("=")[0]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != unknown:
            continue
        name, end = _flag(flag), place + 1
        positive = name.replace("--no-", "--", 1)
        if not equals and positive in SWITCHES:
            value = str(name == positive)
        elif not equals:
            value, end = " ".join(words[end : end + 1]), end + 1
        return [*words[:place], *words[end:]] if value and is_neutral(positive, value) else None
    return None


def explain_setting(name: str, known: Container[str]) -> str | None:
    """Return the problem with a setting of vLLM, for an error that names it; None for other settings."""
    flag = _flag(name)
    ours = RENAMED.get(flag, "").removeprefix("--").replace("-", "_")
    if ours in known:
        return f"is vLLM's name; here it is {ours}"
    explained = explain_flag(flag, ())
    return None if explained is None else explained.removeprefix(f"{flag} ")


def _flag(name: str) -> str:
    """Return a setting or a flag as the tables have flags."""
    if name.startswith("-") and not name.startswith("--"):
        return name
    return "--" + name.removeprefix("--").lower().replace("_", "-")


def explain_flag(flag: str, known: Container[str]) -> str | None:
    """Return one sentence about a flag of vLLM as typed, perhaps with =value; None for other flags."""
    name = _flag(flag.split("=", 1)[0].split(".", 1)[0])
    positive = name.replace("--no-", "--", 1)
    ours = RENAMED.get(name)
    if ours is not None and ours in known:
        return f"{name} is vLLM's name; here it is {ours}"
    if positive in ALWAYS:
        return f"{name} is vLLM's and cannot be set here: {ALWAYS[positive]}; leave it out"
    if positive in MISSING:
        reason = f" ({MISSING[positive]})" if MISSING[positive] else ""
        return f"{name} is vLLM's and not here yet{reason}; leave it out"
    return None


def sampling_hint(name: str, known: Iterable[str]) -> str | None:
    """Return a hint for an unknown setting or flag that is like a sampling parameter; None for others.

    `known` are the settings or flags that may be meant instead.
    """
    asked = _flag(name.partition("=")[0])
    flags = {_flag(one): one for one in (*SAMPLING, *known)}
    near = difflib.get_close_matches(asked, flags, n=1)
    # Each short flag is close to --n.
    if not near or flags[near[0]] not in SAMPLING or (near[0] == "--n" != asked):
        return None
    found = flags[near[0]]
    return f"{found} is a sampling parameter: SamplingParams, requests and the command generate take it"
