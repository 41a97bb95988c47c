"""Chat templates in the form of public models, each with the way in which its model writes reasoning and calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

_QWEN3 = """{%- if tools %}<|im_start|>system
{{ messages[0].content + '\\n\\n' if messages[0].role == 'system' }}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call write <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if loop.first and message.role == 'system' %}
{%- elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
_LLAMA3 = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{% set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{%- endif %}{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_MISTRAL = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set turn = namespace(index=0) %}
{%- for message in rest %}
{%- if message.role != 'tool' and not message.tool_calls %}
{%- if (message.role == 'user') != (turn.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/...') }}
{%- endif %}{% set turn.index = turn.index + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == questions[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + (system + '\\n\\n' if loop.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content + '</s>' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | string | tojson) + '}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""
_R1 = """{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}{% set ns.system = message.content %}{% endfor %}
{{- ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}<｜Assistant｜>
{{- (message.content or '') + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif message.role == 'assistant' %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] }}
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""


def _hermes(calls: Calls) -> str:
    made = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in made)


def _llama(calls: Calls) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Calls) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def _deepseek(calls: Calls) -> str:
    made = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(made) + "<｜tool▁calls▁end｜>"


@dataclass(frozen=True)
class ChatForm:
    """One model's chats.

    markers: tokens of the vocabulary
    calls:   returns calls as the model writes them
    thinks:  returns reasoning as the model writes it
    """

    template: str
    markers: tuple[str, ...]
    calls: Callable[[Calls], str]
    thinks: Callable[[str], str] = lambda text: ""

    def answer(self, text: str, calls: Calls | None = None) -> str:
        """Return an answer of reasoning, then text, or calls."""
        said = text if not calls else (text + "\n" if self.calls is _hermes else "") + self.calls(calls)
        return self.thinks("I should do this.") + said


_THINK = ("<think>", "</think>")
CHAT_FORMS = {
    "qwen3": ChatForm(
        _QWEN3, (*_THINK, "<tool_call>", "</tool_call>"), _hermes, lambda text: f"<think>\n{text}\n</think>\n\n"
    ),
    "llama3": ChatForm(_LLAMA3, (), _llama),
    "mistral": ChatForm(_MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), _mistral),
    "r1": ChatForm(_R1, (*_THINK, "<｜tool▁call▁begin｜>"), _deepseek, lambda text: f"{text}\n</think>\n\n"),
}
