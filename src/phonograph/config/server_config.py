"""The settings of `phonograph serve` beside the engine's, from the same sources by the same words.

Names and meanings are vLLM's where it has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phonograph.config import values
from phonograph.config.base import Settings

LogLevel = Literal["critical", "error", "warning", "info", "debug"]
GenerationConfig = Literal["auto", "none"]
ToolCallParser = Literal["hermes", "llama3_json"]


class ServerConfig(Settings):
    """Every setting of the server.

    Raises:
        ConfigError: a setting is unknown or has a value that does not work.
    """

    host: values.Text = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 is all of the machine's.")
    port: Annotated[int, values.whole(0, 65535)] = Field(
        default=8000, description="TCP port to listen on; 0 takes a free one."
    )
    api_key: values.Texts = Field(default=(), description="Keys, one of which a client has to send; none: no check.")
    served_model_name: values.Texts = Field(
        default=(), description="Names that clients may use for the model, the first in answers; else the model's own."
    )
    chat_template: values.OptionalText = Field(
        default=None, description="File of a chat template, or the template itself, if not the model's own."
    )
    generation_config: Annotated[GenerationConfig, values.one_of(GenerationConfig)] = Field(
        default="auto", description="Whether the sampling defaults that come with the model are used."
    )
    enable_auto_tool_choice: values.Flag = Field(
        default=False, description="Whether the model may decide to call tools; needs tool_call_parser."
    )
    tool_call_parser: Annotated[ToolCallParser | None, values.one_of(ToolCallParser)] = Field(
        default=None, description="Form in which the model writes tool calls."
    )
    max_logprobs: values.Count = Field(default=20, description="Likely tokens that a request may ask for at most.")

    allowed_origins: values.Texts = Field(default=(), description="Origins of web pages that may call; * is any.")
    allowed_methods: values.Texts = Field(default=("*",), description="HTTP methods that these pages may use.")
    allowed_headers: values.Texts = Field(default=("*",), description="HTTP headers that these pages may send.")
    allow_credentials: values.Flag = Field(default=False, description="Whether these pages may send credentials.")
    root_path: values.OptionalText = Field(default=None, description="Path under which a proxy shows the server.")

    max_queued_requests: values.Count = Field(
        default=4096, description="Prompts that may wait beside those that run, samples counted; more are refused."
    )
    max_queued_bytes: values.Size = Field(
        default=256 * 2**20, description="Bytes of request bodies that may be read or wait to be tokenized at one time."
    )
    max_request_bytes: values.Size = Field(default=16 * 2**20, description="Bytes of a request's body at most.")
    max_request_fields: values.Size = Field(
        default=131_072, description="Texts, field names, lists and objects in a request's body at most, all counted."
    )
    max_request_token_ids: values.Size = Field(
        default=524_288, description="Token ids of a request's prompts together, and numbers in its body, at most."
    )
    max_request_depth: Annotated[int, values.whole(8, 512)] = Field(
        default=512, description="Levels of lists and objects within each other in a request's body at most."
    )
    max_request_prompts: values.Size = Field(default=2048, description="Prompts of a completion request at most.")
    max_request_messages: values.Size = Field(default=16_384, description="Messages of a chat request at most.")
    max_request_tools: values.Count = Field(default=128, description="Tools of a chat request at most.")
    max_request_stops: values.Count = Field(default=64, description="Stop strings of a request at most.")
    max_request_stop_token_ids: values.Count = Field(default=1024, description="Stop token ids of a request at most.")
    max_request_biases: values.Count = Field(
        default=16_384, description="Token ids in the logit_bias of a request at most."
    )
    header_timeout: values.Duration = Field(default=20.0, description="Seconds that a request's headers may take.")
    body_timeout: values.Duration = Field(
        default=10.0, description="Seconds that a request's body may take, beside one for each 128 KiB that came."
    )
    request_timeout: values.OptionalDuration = Field(
        default=None, description="Seconds that an answer may take from its request to its end."
    )
    shutdown_timeout: values.Seconds = Field(
        default=20.0, description="Seconds that answers in progress are given after SIGTERM."
    )
    uvicorn_log_level: Annotated[LogLevel, values.one_of(LogLevel)] = Field(
        default="info", description="What the HTTP server logs."
    )
    disable_uvicorn_access_log: values.Flag = Field(default=False, description="No line in the log for each request.")
