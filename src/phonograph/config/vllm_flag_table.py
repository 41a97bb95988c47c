"""Flags of vLLM as data: which of them have another name here, are fixed, missing, or without meaning.

A flag of `scripts/vllm-flags.txt`, which names the version, has the same name and meaning here if it is in no table.
Flags of earlier versions and of the benchmarks are listed too.
"""

from __future__ import annotations

from collections.abc import Mapping

RENAMED = {
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--disable-cascade-attn": "--cascade-attention",
    "--attention-config": "--attention-backend",
    "-ac": "--attention-backend",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "--log-config-file": "--log-format",
    "--logging-config": "--log-format",
    "--rope-scaling": "--hf-overrides",
    "--rope-theta": "--hf-overrides",
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
    "--disable-tqdm": "bars are only on a terminal",
    "--disable-log-requests": "requests are logged with --enable-log-requests only",
    "--disable-custom-all-reduce": "the notes of a start say which sums over ranks run by NCCL",
    "--enable-prompt-tokens-details": "the usage always has the cached tokens",
    "--enable-request-id-headers": "every answer has the header x-request-id",
    "--enable-server-load-tracking": "/load always has the number of requests",
}
"""Flags of vLLM for behaviour that is fixed here, each with that behaviour."""

ABSENT: Mapping[tuple[str, str], str] = {
    ("Several GPUs", "-tp N runs an engine on GPUs of one host, -dp N several engines"): """
        --pipeline-parallel-size -pp --prefill-context-parallel-size -pcp --data-parallel-size-local -dpl
        --data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-address -dpa
        --data-parallel-rpc-port -dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph
        --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port
        --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold
        --dp-sync-interval --distributed-executor-backend --distributed-timeout-seconds
        --cpu-distributed-timeout-seconds --master-addr --master-port --headless --nnodes -n --node-rank -r
        --enable-expert-parallel -ep --enable-ep-weight-filter --all2all-backend --enable-eplb --eplb-config
        --expert-placement-strategy --enable-elastic-ep --elastic-ep-max-dp-size --enable-dbo --ubatch-size
        --dbo-decode-token-threshold --dbo-prefill-token-threshold --disable-nccl-for-dp-synchronization
        --enable-nccl-comm-suspend --dcp-comm-backend --dcp-q-replicate --dcp-kv-cache-interleave-size
        --cp-kv-cache-interleave-size --enable-hc-sp --enable-batch-sharded-sampling --enable-fault-tolerance
        --fault-tolerance-config --enable-scale-out --api-server-count -asc --aggregate-engine-logging
        --ray-workers-use-nsight""",
    ("Several GPUs", "CUDA_VISIBLE_DEVICES selects the GPU"): "--device-ids",
    ("LoRA at run time", "adapters are merged into the weights beforehand"): """
        --enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype --fully-sharded-loras
        --lora-target-modules --default-mm-loras --specialize-active-lora --enable-tower-connector-lora
        --enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels""",
    ("Images and audio", "models take text"): """
        --limit-mm-per-prompt --mm-processor-kwargs --mm-encoder-tp-mode --allowed-local-media-path
        --allowed-media-domains --language-model-only --skip-mm-profiling --enable-mm-embeds --media-io-kwargs
        --mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm --mm-shm-cache-max-object-size-mb
        --mm-encoder-only --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
        --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --interleave-mm-strings
        --video-pruning-rate --video-pruning-method --mm-tensor-ipc --mm-processor-device --mm-ipc-gpu-memory-gb
        --mm-device-do-normalize --disable-chunked-mm-input --trust-request-mm-kwargs --ec-transfer-config
        --ec-manager-config""",
    ("Keys and values outside the device", "KV blocks stay in the memory of the device"): """
        --swap-space --cpu-offload-gb --cpu-offload-params --kv-offloading-size --kv-offloading-backend
        --kv-transfer-config --offload-backend --offload-group-size --offload-num-in-group
        --offload-prefetch-step --offload-params""",
    ("Embeddings and pooling", "models generate text"): """
        --runner --task --pooler-config --io-processor-plugin --enable-flash-late-interaction""",
    ("Speculation", "no draft model runs"): """
        --speculative-model --spec-method --spec-model --spec-tokens
        --per-request-spec-decode-metrics --diffusion-config -dc""",
    ("State space models", "models have attention only"): """
        --mamba-backend --mamba-ssu-algorithm --enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds
        --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode
        --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len --use-replayssm --gdn-prefill-backend
        --kda-prefill-backend --kda-decode-backend --engram-config""",
    ("Thinking and tools", ""): """
        --reasoning-parser-plugin --reasoning-config --reasoning-effort-map --tool-parser-plugin
        --exclude-tools-when-tool-choice-none --tool-strict-level --tool-server --chat-template-content-format
        --response-role --anthropic-disabled-thinking-effort
        --cohere-is-reasoning-model --cohere-format""",
    ("Sleep and transfer of weights", ""): """
        --sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names
        --enable-cumem-allocator --weight-transfer-config""",
    ("Requests and sampling", ""): """
        --logits-processors --return-sampling-mask --use-fp64-gumbel --enable-prompt-embeds
        --enable-return-routed-experts --aux-output-config --tokenizer-mode
        --sse-keep-alive-interval --structured-outputs-config
        --guided-decoding-backend --watermark-config --enable-trace-replay --fingerprint-mode --fingerprint-value
        --tokens-only""",
    ("Scheduling and the KV cache", ""): """
        --long-prefill-token-threshold --long-prefill-token-threshold-adaptive --max-num-partial-prefills
        --max-long-partial-prefills --max-num-scheduled-tokens --max-num-active-seqs --max-num-queued-tokens
        --scheduler-cls --scheduler-reserve-full-isl --watermark --prefill-schedule-interval
        --prefix-caching-hash-algo --prefix-cache-retention-interval --prefix-match-unit
        --kv-cache-dtype-skip-layers --kv-sharing-fast-prefill --swa-bounded-replay --disable-sliding-window
        --disable-hybrid-kv-cache-manager""",
    ("Models and loading", ""): """
        --hf-config-path --code-revision --config-format --model-class-overrides --quantization-config
        --allow-deprecated-quantization --model-loader-extra-config --ignore-patterns --worker-cls
        --worker-extension-cls --additional-config""",
    ("Models and loading", "the environment variable HF_TOKEN has the token"): "--hf-token",
    ("Server", ""): "--middleware --disable-fastapi-docs --enable-offline-docs --grpc --grpc-port",
    ("Server", "a proxy before the server does it"): "--ssl-ciphers --enable-ssl-refresh",
    ("Logs, metrics and profiles", ""): """
        --disable-log-stats --enable-log-outputs --enable-log-deltas --log-error-stack
        --disable-access-log-for-endpoints --collect-detailed-traces --kv-cache-metrics --kv-cache-metrics-sample
        --custom-histogram-buckets --show-hidden-metrics-for-version --enable-layerwise-nvtx-tracing
        --enable-mfu-metrics --enable-logging-iteration-details""",
    ("Logs, metrics and profiles", "--profile-dir FOLDER has start_profile and stop_profile write traces"): """
        --profiler-config""",
    ("Logs, metrics and profiles", "/v1/graphs and the metrics of steps have them"): "--cudagraph-metrics",
    ("Benchmarks", ""): """
        --goodput --percentile-metrics --metric-percentiles --ramp-up-strategy --request-id-prefix --profile
        --use-beam-search --hf-split --hf-subset --random-prefix-len""",
}
"""Flags of vLLM for features that are missing here, by subject and present limit."""
MISSING = {flag: reason for (_, reason), flags in ABSENT.items() for flag in flags.split()}
"""The same by flag, each with the limit if there is one to say."""

_KERNELS = "kernels are chosen by device, weights and attention backend; explain prints them"
_COMPILER = "no compiler runs on the model"
_PROCESS = "one process does the engine's work"
_FILES = "weights are read from mapped files"
NO_MEANING = {
    **dict.fromkeys(("--moe-backend", "--linear-backend", "--kernel-config", "--ir-op-priority"), _KERNELS),
    **dict.fromkeys(("--enable-flashinfer-autotune", "--monokernel", "--sparse-indexer-topk-backend"), _KERNELS),
    **dict.fromkeys(("--optimization-level", "-O", "--performance-mode"), _COMPILER),
    **dict.fromkeys(("--jit-monitor-mode", "--jit-monitor-verbose"), _COMPILER),
    **dict.fromkeys(("--max-parallel-loading-workers", "--renderer-num-workers", "--watchdog-config"), _PROCESS),
    **dict.fromkeys(("--numa-bind", "--numa-bind-nodes", "--numa-bind-cpus", "--enable-shm-tensor-arena"), _PROCESS),
    **dict.fromkeys(("--safetensors-load-strategy", "--safetensors-prefetch-num-threads"), _FILES),
    **dict.fromkeys(("--safetensors-prefetch-block-size", "--pt-load-map-location", "--use-tqdm-on-load"), _FILES),
    **dict.fromkeys(("--h11-max-incomplete-event-size", "--h11-max-header-count"), "another parser reads HTTP"),
    "--async-scheduling": "a GPU's next step is always scheduled while one runs",
    "--fail-on-environ-validation": "an unknown PHONOGRAPH variable is always an error",
}
"""Flags of vLLM that choose among ways which only vLLM has, each with the reason. Every value is taken and has no
effect; the command line says so."""

_ANY = ("*",)
_TRUE, _FALSE, _ONE, _ZERO = ("true",), ("false",), ("1",), ("0",)
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), _ONE),
    **dict.fromkeys(("--data-parallel-size-local", "--nnodes"), _ONE),
    **dict.fromkeys(("--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size"), _ONE),
    **dict.fromkeys(("--api-server-count", "-asc"), _ONE),
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp", "-dpl", "-n"), _ONE),
    **dict.fromkeys(("--max-num-partial-prefills", "--max-long-partial-prefills"), _ONE),
    **dict.fromkeys(("--data-parallel-rank", "--node-rank", "-dpn", "-r", "--long-prefill-token-threshold"), _ZERO),
    **dict.fromkeys(("--cpu-offload-gb", "--kv-offloading-size", "--sse-keep-alive-interval", "--watermark"), _ZERO),
    **dict.fromkeys(("--enable-chunked-prefill", "--disable-log-requests"), _TRUE),
    **dict.fromkeys(
        ("--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-server-load-tracking"), _TRUE
    ),
    **dict.fromkeys(("--enable-expert-parallel", "-ep", "--enable-lora", "--headless"), _FALSE),
    **dict.fromkeys(("--disable-sliding-window", "--enable-eplb", "--enable-dbo"), _FALSE),
    **dict.fromkeys(("--enable-prompt-embeds", "--grpc", "--enable-log-outputs", "--log-error-stack"), _FALSE),
    "--enable-mm-embeds": _FALSE,
    # They choose among ways to the same result, or have no effect in vLLM either.
    **dict.fromkeys(("--swap-space", "--disable-custom-all-reduce", "--disable-hybrid-kv-cache-manager"), _ANY),
    "--guided-decoding-backend": _ANY,
    **dict.fromkeys(("--disable-tqdm", "--disable-log-stats", "--language-model-only", "--skip-mm-profiling"), _ANY),
    **dict.fromkeys(NO_MEANING, _ANY),
    "--distributed-executor-backend": ("mp", "uni"),
    "--tokenizer-mode": ("auto",),
    "--config-format": ("auto",),
    "--chat-template-content-format": ("auto", "string"),
    "--response-role": ("assistant",),
    "--runner": ("auto", "generate"),
    "--task": ("auto", "generate"),
}
"""Flags of vLLM, each with values that change nothing here. Null changes nothing for any flag of vLLM."""
_FURTHER_SWITCHES = (
    "--async-scheduling",
    *("--language-model-only", "--enable-flashinfer-autotune", "--monokernel", "--use-tqdm-on-load"),
    *("--jit-monitor-verbose", "--numa-bind", "--enable-shm-tensor-arena", "--fail-on-environ-validation"),
)
SWITCHES = frozenset(_FURTHER_SWITCHES) | frozenset(
    flag for flag, values in NEUTRAL.items() if values in (_TRUE, _FALSE) or flag.startswith(("--disable", "--skip"))
)
"""Flags of the table that take no value on the command line."""

VARIABLES = {
    "VLLM_API_KEY": "PHONOGRAPH_API_KEY",
    "VLLM_LOGGING_LEVEL": "PHONOGRAPH_LOG_LEVEL",
    "VLLM_ATTENTION_BACKEND": "PHONOGRAPH_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT": "PHONOGRAPH_BATCH_INVARIANT",
    "VLLM_KV_CACHE_LAYOUT": "PHONOGRAPH_KV_CACHE_LAYOUT",
    "VLLM_CPU_KVCACHE_SPACE": "PHONOGRAPH_KV_CACHE_MEMORY_BYTES, in bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "OMP_NUM_THREADS and taskset",
    "VLLM_FLASH_ATTN_VERSION": "PHONOGRAPH_FLASH_ATTN_VERSION",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "PHONOGRAPH_MAX_REQUEST_BYTES",
    "VLLM_MAX_STOP_STRINGS": "PHONOGRAPH_MAX_REQUEST_STOPS",
    "VLLM_MAX_COMPLETION_PROMPTS": "PHONOGRAPH_MAX_REQUEST_PROMPTS",
    "VLLM_USE_MODELSCOPE": "PHONOGRAPH_USE_MODELSCOPE",
}
"""Environment variables of vLLM, each with the one that means the same here."""
