"""Chat templates of well-known families, written from the formats that they have published.

Each is the shape of a family's format, no copy of its template. ANSWER: how an answer stands in
the text, up to its closing token.
"""

from __future__ import annotations

_SYSTEM_FIRST = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set turns = messages[1:] if first else messages %}"
)

LLAMA_2 = (
    _SYSTEM_FIRST
    + """\
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}
{%- endif %}
{%- if m.role == 'user' %}
{{- bos_token + '[INST] '
    + ('<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' if first and loop.first else '')
    + m.content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""
)

LLAMA_3 = """\
{{- bos_token }}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if first else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools %}{{- 'You have these functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
{{- first.strip() + '<|eot_id|>' }}
{%- for m in turns %}
{%- if m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name
    + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n'
    + m.content.strip() + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# The system prompt stands before the last turn, if that is a question; tools before the last one.
MISTRAL = (
    _SYSTEM_FIRST
    + """\
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in turns %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (first + '\\n\\n' if first and loop.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] ' + m.tool_calls | tojson + eos_token }}
{%- else %}{{- ' ' + m.content | trim + eos_token }}{% endif %}
{%- endfor %}"""
)

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# The mark leaves the closing token out, as many published ones do.
MARKED = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content }}{% endgeneration %}
{%- else %}{{- m.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

_CALLS = """\
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '
    + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}"""
_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}"""
_TOOLS = """\
{%- if tools %}{{- '\\n\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{% endif %}"""

QWEN_2_5 = (
    """\
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system'
    else 'You are a helpful assistant.') }}"""
    + _TOOLS
    + """{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}"""
    + _RESULTS
    + """
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}"""
    + _CALLS
    + """
{%- elif m.role != 'system' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)

# Thoughts are kept since the last question, and dropped before it.
QWEN_3 = (
    """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if first or tools %}{{- '<|im_start|>system\\n' + first }}"""
    + _TOOLS
    + """\
{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if not ns.found and m.role == 'user' %}
{%- set ns.found = true %}{% set ns.last = messages | length - loop.index %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}{% set answer = m.content %}
{%- if '</think>' in answer %}
{%- set thought = answer.split('</think>')[0].split('<think>')[-1] %}
{%- set answer = answer.split('</think>')[-1] %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- answer.lstrip('\\n') }}"""
    + _CALLS
    + """
{%- elif m.role == 'tool' %}"""
    + _RESULTS
    + """
{%- elif m.role != 'system' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
)

GEMMA_3 = (
    _SYSTEM_FIRST
    + """\
{{- bos_token }}
{%- for m in turns %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'
    + (first + '\\n\\n' if first and loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""
)

PHI_3 = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% else %}{{- eos_token }}{% endif %}"""

# The last answer ends with another token than those before it, which lose their thoughts.
GPT_OSS = """\
{%- macro spoken(channel, text, end) -%}
{{ '<|start|>assistant<|channel|>' + channel + '<|message|>' + text + end }}{% endmacro %}
{{- '<|start|>system<|message|>You are a large language model.<|end|>' }}
{%- set first = messages[0].role == 'system' %}
{%- if first or tools %}{{- '<|start|>developer<|message|>' }}
{%- if first %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{% endif %}
{%- if tools %}{{- '# Tools\\n\\n' }}
{%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: any) => any;\\n' }}{% endfor %}
{%- endif %}{{- '<|end|>' }}{% endif %}
{%- for m in (messages[1:] if first else messages) %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}{{- spoken('analysis', m.thinking, '<|end|>') }}{% endif %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name
    + '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson
    + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and m.thinking %}{{- spoken('analysis', m.thinking, '<|end|>') }}{% endif %}
{{- spoken('final', m.content, '<|return|>' if loop.last else '<|end|>') }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>'
    + m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

TEMPLATES = {
    "llama 2": LLAMA_2,
    "llama 3": LLAMA_3,
    "mistral": MISTRAL,
    "chatml": CHATML,
    "marked": MARKED,
    "qwen 2.5": QWEN_2_5,
    "qwen 3": QWEN_3,
    "gemma 3": GEMMA_3,
    "phi 3": PHI_3,
    "gpt-oss": GPT_OSS,
}
ANSWERS = {
    "llama 2": " {} </s>",
    "llama 3": "{}<|eot_id|>",
    "mistral": " {}</s>",
    "gemma 3": "{}<end_of_turn>",
    "phi 3": "{}<|end|>",
    "qwen 3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "gpt-oss": "<|channel|>final<|message|>{}<|return|>",
}
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
)
# These add no BOS by themselves.
WITHOUT_BOS = ("chatml", "marked", "qwen 2.5", "qwen 3", "gpt-oss")
