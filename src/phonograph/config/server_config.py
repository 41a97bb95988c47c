"""Settings of `phonograph serve` apart from the engine's. Names and meanings are vLLM's where it has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phonograph.config import values
from phonograph.config.base import Settings

LogFormat = Literal["text", "json"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]
GenerationConfig = Literal["auto", "none", "vllm"]
ToolCallParser = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "deepseek_v3"]
ReasoningParser = Literal["qwen3", "deepseek_r1", "mistral", "none"]
TOOL_FORMATS_GROUP = "phonograph.tool_formats"
"""Group of entry points of other packages' forms of calls. Each leads to a `ToolFormat`."""
REASONING_FORMATS_GROUP = "phonograph.reasoning_formats"
"""Group of entry points of other packages' formats of reasoning. Each leads to a `ReasoningMarkers`."""
ReasoningKey = Literal["both", "reasoning", "reasoning_content"]
ChatFormat = Literal["template", "harmony"]
UnknownFields = Literal["error", "warn"]


class ServerConfig(Settings):
    """Every setting of the server.

    Raises:
        ConfigError: a setting is unknown or has an invalid value.
    """

    host: values.Text = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 is every address of the machine."
    )
    port: Annotated[int, values.whole(0, 65535)] = Field(
        default=8000, description="TCP port to listen on; 0 selects a free one."
    )
    uds: values.OptionalText = Field(
        default=None, description="Unix domain socket to listen on, in place of host and port."
    )
    ssl_certfile: values.OptionalText = Field(
        default=None, description="Certificate of the server, a PEM file; with it the server speaks HTTPS."
    )
    ssl_keyfile: values.OptionalText = Field(
        default=None, description="Key of the certificate, a PEM file without a password; default: ssl_certfile has it."
    )
    ssl_ca_certs: values.OptionalText = Field(
        default=None, description="Authorities of the clients' certificates, a PEM file."
    )
    ssl_cert_reqs: Annotated[int, values.whole(0, 2)] = Field(
        default=0, description="Certificates of clients: 0 asks for none, 1 checks those sent, 2 needs one."
    )
    root_path: values.OptionalText = Field(default=None, description="Path of the server behind a proxy.")
    api_key: values.Texts = Field(default=(), description="Valid API keys; without any, requests are not checked.")
    enable_admin: values.Flag = Field(
        default=False,
        description="Serve the verbs of the engine, such as /pause, /sleep and /start_profile; needs admin_api_key.",
    )
    admin_api_key: values.Texts = Field(
        default=(), description="Valid API keys of the endpoints of enable_admin, which take no others."
    )
    enable_tokenizer_info_endpoint: values.Flag = Field(
        default=False, description="Serve /tokenizer_info: special tokens and the chat template."
    )
    allowed_origins: values.Texts = Field(
        default=(), description="Origins of web pages that may send requests; * is any."
    )
    allowed_methods: values.Texts = Field(default=("*",), description="HTTP methods that these pages may use.")
    allowed_headers: values.Texts = Field(default=("*",), description="HTTP headers that these pages may send.")
    allow_credentials: values.Flag = Field(default=False, description="Let these pages send credentials.")
    uvicorn_log_level: Annotated[LogLevel, values.one_of(LogLevel)] = Field(
        default="info", description="Log level of the HTTP server."
    )
    log_level: Annotated[LogLevel, values.one_of(LogLevel)] = Field(
        default="info", description="Log level of server and engine."
    )
    log_format: Annotated[LogFormat, values.one_of(LogFormat)] = Field(
        default="text", description="Lines of the log: text, or one JSON object each."
    )
    enable_log_requests: values.Flag = Field(
        default=False, description="Log the prompt, the parameters and the end of each request."
    )
    max_log_len: values.OptionalCount = Field(
        default=None, description="Maximum characters of a prompt in the log; default: all."
    )
    otlp_traces_endpoint: values.OptionalText = Field(
        default=None,
        description="OpenTelemetry collector for a trace of each request, such as http://localhost:4318; needs the "
        "extra otel.",
    )
    disable_uvicorn_access_log: values.Flag = Field(default=False, description="Do not log each request.")

    served_model_name: values.Texts = Field(
        default=(), description="Names of the model in requests, the first one also in answers; default: the model's."
    )
    chat_template: values.OptionalText = Field(
        default=None, description="Chat template, or its file; default: the model's."
    )
    trust_request_chat_template: values.Flag = Field(
        default=False,
        description="Take chat_template of requests. A template is a program: one that does not end blocks the server.",
    )
    default_chat_template_kwargs: values.OptionalObject = Field(
        default=None,
        description="Variables of the chat template, as a JSON object; chat_template_kwargs of a request go before.",
    )
    chat_format: Annotated[ChatFormat, values.one_of(ChatFormat)] = Field(
        default="template",
        description="Format of chats: template, or harmony for gpt-oss, which needs the extra harmony.",
    )
    generation_config: Annotated[GenerationConfig, values.one_of(GenerationConfig, {"vllm": "none"})] = Field(
        default="auto", description="Use the sampling defaults of the model: auto, or none; vllm is none too."
    )
    override_generation_config: values.OptionalObject = Field(
        default=None, description="Sampling defaults that replace those of the model, as a JSON object."
    )
    enable_auto_tool_choice: values.Flag = Field(
        default=True, description="Let the model decide to call tools, where the format of its calls is known."
    )
    tool_call_parser: Annotated[str | None, values.one_of(ToolCallParser, group=TOOL_FORMATS_GROUP)] = Field(
        default=None,
        description="Format of the model's tool calls, or one of an installed package; default: the chat template's.",
    )
    reasoning_parser: Annotated[str | None, values.one_of(ReasoningParser, group=REASONING_FORMATS_GROUP)] = Field(
        default=None,
        description="Format of the model's reasoning, or one of an installed package; default: the chat template's.",
    )
    reasoning_key: Annotated[ReasoningKey, values.one_of(ReasoningKey)] = Field(
        default="both", description="Keys of the reasoning in messages and chunks."
    )
    unknown_fields: Annotated[UnknownFields, values.one_of(UnknownFields)] = Field(
        default="error",
        description="Unknown fields of a request: error refuses it, warn drops them and names them in a header.",
    )
    return_tokens_as_token_ids: values.Flag = Field(
        default=False, description="Name tokens in log-probabilities by their ids, unless the request says otherwise."
    )
    enable_force_include_usage: values.Flag = Field(
        default=False, description="Send the usage in every chunk of completions and chats, whatever the request says."
    )
    enable_per_request_metrics: values.Flag = Field(
        default=False, description="Send the times of the request with completions and chats."
    )
    stream_interval: values.Size = Field(
        default=1, description="Tokens of a chunk of a stream; the first and the last chunk may have fewer."
    )
    max_logprobs: values.CountOrAll = Field(
        default=20, description="Maximum logprobs of a request; -1 is the vocabulary."
    )
    request_timeout: values.OptionalDuration = Field(
        default=None, description="Timeout in seconds from a request to the end of its answer."
    )
    shutdown_timeout: values.Seconds = Field(
        default=20.0, description="Grace period in seconds for running requests after SIGTERM."
    )

    max_stored_responses: values.Count = Field(
        default=1024,
        description="Latest answers of /v1/responses that stay in memory, for previous_response_id; 0 stores none.",
    )
    max_queued_requests: values.Count = Field(
        default=4096, description="Maximum waiting prompts, times their samples; more are refused."
    )
    max_queued_bytes: values.Size = Field(
        default=256 * 2**20,
        description="Maximum bytes of request bodies that are read or wait for tokenization at one time.",
    )
    max_request_bytes: values.Size = Field(default=16 * 2**20, description="Maximum bytes of a request body.")
    max_request_fields: values.Size = Field(
        default=131_072, description="Maximum strings, field names, lists and objects of a request body together."
    )
    max_request_token_ids: values.Size = Field(
        default=524_288, description="Maximum token ids of a request's prompts together, and numbers in its body."
    )
    max_request_depth: Annotated[int, values.whole(8, 512)] = Field(
        default=512, description="Maximum nesting of lists and objects in a request body."
    )
    max_request_prompts: values.Size = Field(default=2048, description="Maximum prompts of a completion request.")
    max_request_messages: values.Size = Field(default=16_384, description="Maximum messages of a chat request.")
    max_request_tools: values.Count = Field(default=128, description="Maximum tools of a chat request.")
    max_request_stops: values.Count = Field(default=64, description="Maximum stop strings of a request.")
    max_request_stop_token_ids: values.Count = Field(default=1024, description="Maximum stop token ids of a request.")
    max_request_biases: values.Count = Field(
        default=16_384, description="Maximum token ids in the logit_bias of a request."
    )
    header_timeout: values.Duration = Field(default=20.0, description="Timeout in seconds for a request's headers.")
    body_timeout: values.Duration = Field(
        default=10.0, description="Timeout in seconds for a request's body, plus one second for each 128 KiB received."
    )
