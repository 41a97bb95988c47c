"""Errors for flags of vLLM: the flag that means the same here, or the reason for its absence."""

from __future__ import annotations

from collections.abc import Container

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
    **dict.fromkeys(("--speculative-config", "--speculative-model"), "no draft model runs"),
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


def explain_flag(flag: str, known: Container[str]) -> str | None:
    """Return one sentence about a flag of vLLM; None for other flags.

    Args:
        flag: the flag as typed, perhaps with =value.
        known: flags of the command.
    """
    name = flag.split("=", 1)[0]
    if name.startswith("--"):
        name = name.lower().replace("_", "-")
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
