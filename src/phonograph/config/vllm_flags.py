"""Flags of vLLM: values that change nothing here, the flag that means the same, or the reason for its absence.

One table serves flags, keyword arguments and YAML.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence

from phonograph.config.values import unless_null

RENAMED = {
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--disable-cascade-attn": "--no-cascade-attention",
    "--tokenizer-revision": "--revision",
    "--rope-scaling": "--hf-overrides",
    "--rope-theta": "--hf-overrides",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--random-range-ratio": "--input-len",
    "--sharegpt-output-len": "--output-len",
    "--output-json": "--output",
    "--save-result": "--output",
    "--result-dir": "--output",
    "--result-filename": "--output",
    "--top-p": "--extra-body",
    "--top-k": "--extra-body",
    "--min-p": "--extra-body",
    "--logprobs": "--extra-body",
    "--metadata": "--label",
}
"""Flags of vLLM, each with the flag that replaces it here."""

ALWAYS = {
    "--enable-chunked-prefill": "prefills are always chunked",
    "--async-scheduling": "a GPU's next step is always scheduled while one runs",
    "--disable-tqdm": "bars are only on a terminal",
    "--disable-log-requests": "the text of requests is not logged",
    "--disable-custom-all-reduce": "an engine runs on one GPU",
}
"""Flags of vLLM for behaviour that is fixed here, each with that behaviour."""

_GPUS = "an engine runs on one GPU"
_LORA = "adapters are merged into the weights beforehand"
_TEXT = "models take text"
_KV = "KV blocks stay in the memory of the device"
_TLS = "a proxy before the server does TLS"
MISSING = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), _GPUS),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--data-parallel-rank", "--data-parallel-size-local"), _GPUS),
    **dict.fromkeys(("--distributed-executor-backend", "--enable-expert-parallel", "--nnodes", "--node-rank"), _GPUS),
    **dict.fromkeys(("--decode-context-parallel-size", "-dcp", "--master-addr", "--master-port", "--headless"), _GPUS),
    **dict.fromkeys(("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras"), _LORA),
    **dict.fromkeys(("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mm-encoder-tp-mode"), _TEXT),
    **dict.fromkeys(("--allowed-local-media-path", "--language-model-only", "--skip-mm-profiling"), _TEXT),
    **dict.fromkeys(("--swap-space", "--cpu-offload-gb", "--kv-offloading-size", "--kv-transfer-config"), _KV),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"), _TLS),
    **dict.fromkeys(("--runner", "--task", "--convert", "--pooler-config"), "models generate text"),
    "--speculative-model": "no draft model runs; --speculative-config drafts by prompt lookup, on a CPU",
    **dict.fromkeys(("--reasoning-parser", "--structured-outputs-config", "--guided-decoding-backend"), ""),
    **dict.fromkeys(("--tool-parser-plugin", "--chat-template-content-format", "--response-role"), ""),
    **dict.fromkeys(("--download-dir", "--hf-token", "--code-revision", "--config-format", "--tokenizer-mode"), ""),
    **dict.fromkeys(("--skip-tokenizer-init", "--model-impl", "--override-generation-config"), ""),
    **dict.fromkeys(("--logits-processors", "--logprobs-mode", "--stream-interval", "--enable-sleep-mode"), ""),
    **dict.fromkeys(("--prefix-caching-hash-algo", "--long-prefill-token-threshold", "--api-server-count"), ""),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills", "--scheduler-cls"), ""),
    **dict.fromkeys(("--disable-sliding-window", "--disable-hybrid-kv-cache-manager", "--kv-events-config"), ""),
    **dict.fromkeys(("--enable-log-requests", "--max-log-len", "--log-config-file", "--disable-log-stats"), ""),
    **dict.fromkeys(("--middleware", "--uds", "--disable-fastapi-docs", "--enable-prompt-tokens-details"), ""),
    **dict.fromkeys(("--optimization-level", "-O", "--worker-cls", "--additional-config", "--profiler-config"), ""),
    **dict.fromkeys(("--goodput", "--percentile-metrics", "--metric-percentiles", "--ramp-up-strategy"), ""),
    **dict.fromkeys(("--enable-request-id-headers", "--request-id-prefix"), ""),
    **dict.fromkeys(("--profile", "--use-beam-search", "--hf-split", "--hf-subset", "--random-prefix-len"), ""),
}
"""Flags of vLLM for features that are missing here, each with the present limit if it says more."""


SAMPLING = (
    *("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "detokenize", "structured_outputs"),
)
"""Sampling parameters, which are no settings of an engine. This room cannot import them."""

_ANY = ("*",)
_TRUE, _FALSE, _ONE, _ZERO = ("true",), ("false",), ("1",), ("0",)
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"), _ONE),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--data-parallel-size-local", "--nnodes"), _ONE),
    **dict.fromkeys(("--decode-context-parallel-size", "-dcp", "--api-server-count"), _ONE),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills", "--stream-interval"), _ONE),
    **dict.fromkeys(("--data-parallel-rank", "--node-rank", "--long-prefill-token-threshold"), _ZERO),
    **dict.fromkeys(("--cpu-offload-gb", "--kv-offloading-size"), _ZERO),
    **dict.fromkeys(("--enable-chunked-prefill", "--async-scheduling", "--disable-log-requests"), _TRUE),
    **dict.fromkeys(("--enable-expert-parallel", "--enable-lora", "--headless", "--skip-tokenizer-init"), _FALSE),
    **dict.fromkeys(("--enable-sleep-mode", "--disable-sliding-window", "--enable-log-requests"), _FALSE),
    # They choose among ways to the same result, or have no effect in vLLM either.
    **dict.fromkeys(("--swap-space", "--disable-custom-all-reduce", "--disable-hybrid-kv-cache-manager"), _ANY),
    **dict.fromkeys(("--disable-tqdm", "--disable-log-stats", "--language-model-only", "--skip-mm-profiling"), _ANY),
    "--distributed-executor-backend": ("mp", "uni"),
    "--tokenizer-mode": ("auto",),
    "--config-format": ("auto",),
    "--model-impl": ("auto",),
    "--runner": ("auto", "generate"),
    "--task": ("auto", "generate"),
    "--convert": ("auto", "none"),
}
"""Flags of vLLM, each with values that change nothing here. Null changes nothing for any flag of vLLM."""
_SWITCHES = frozenset(
    flag for flag, values in NEUTRAL.items() if values in (_TRUE, _FALSE) or flag.startswith(("--disable", "--skip"))
) | {"--language-model-only"}
"""Flags of the table that take no value on the command line."""


def is_neutral(name: str, value: object) -> bool:
    """Return True if a setting or flag of vLLM with this value, or the text of it, changes nothing here."""
    flag = _flag(name)
    if unless_null(value) is None:
        return flag in NEUTRAL or flag in MISSING or flag in ALWAYS or flag in RENAMED
    text = str(value).strip().lower()
    allowed = NEUTRAL.get(flag, ())
    if allowed in (_TRUE, _FALSE):
        text = {"1": "true", "0": "false", "yes": "true", "no": "false"}.get(text, text)
    elif allowed in (_ONE, _ZERO):
        text = text.removesuffix(".0")
    return text in allowed or allowed is _ANY


def without_neutral(words: Sequence[str], unknown: str) -> list[str] | None:
    """Return a command line without an unknown flag, if that is one of vLLM's whose value changes nothing here."""
    unknown = unknown.partition("=")[0]
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != unknown:
            continue
        name, end = _flag(flag), place + 1
        positive = name.replace("--no-", "--", 1)
        if not equals and positive in _SWITCHES:
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
    name = _flag(flag.split("=", 1)[0])
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
    if not near or flags[near[0]] not in SAMPLING:
        return None
    found = flags[near[0]]
    return f"{found} is a sampling parameter: SamplingParams, requests and the command generate take it"
