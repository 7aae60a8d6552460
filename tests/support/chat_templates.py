"""Chat templates of the kinds that models have, shortened, and the control tokens that they name."""

from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tests.support.service import byte_tokenizer

LLAMA = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' "
    "+ (strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024') + '\n\n' + system_message "
    "+ '<|eot_id|>' }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""Llama 3: with the date."""
CHATML = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Qwen 2.5: a default system message, unless there is one."""
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
"""Gemma 2: refuses a system's message."""
FOLDING = (
    "{{ bos_token }}{%- set first = '' %}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first = messages[0]['content'] + '\n\n' -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for message in messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}{{ message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
"""Gemma 3: puts a system's message into the first turn."""
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{{- bos_token }}{%- for message in turns %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}"
    "{%- endif %}{%- if message['role'] == 'user' %}{%- if loop.last and system is defined %}"
    "{{- '[INST]' + system + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
    "{{- message['content'] + '<|end|>' }}{%- endif %}{%- endfor %}"
)
"""Mistral v3: puts a system's message into the last turn."""
PASTLESS = (
    "{{ bos_token }}{% for message in messages[-2:] %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Rewrites the past: shows the last two messages."""
THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and not loop.last %}{%- set content = '' %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Rewrites the past: drops the model's earlier messages."""
HERMES = (
    "{%- if reasoning_effort is defined %}{{- '<|im_start|>system\nEffort: ' + reasoning_effort + '<|im_end|>\n' }}"
    "{%- endif %}{%- if tools %}{{- '<|im_start|>system\nYou may call functions:\n' }}{%- for tool in tools %}"
    "{{- tool | tojson + '\n' }}{%- endfor %}"
    '{{- \'Call them as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\n\' }}{%- endif %}'
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content and loop.index0 + 2 >= messages | length %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- message.content }}"
    '{%- for call in message.tool_calls or [] %}{{- \'\n<tool_call>\n{"name": "\' + call.function.name + '
    "'\", \"arguments\": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}{%- endif %}{%- endif %}"
)
"""Qwen 3: tools, calls and results, and reasoning that is shown in the last turn only."""
TEXT_ARGUMENTS = (
    "{%- for tool in tools or [] %}{{- tool.function.name + '\n' }}{%- endfor %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' and not message.content is string %}{%- for call in message.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments "
    "+ '<｜tool▁call▁end｜>' }}{%- endfor %}{%- else %}{{- message.role + ': ' + message.content + '\n' }}{%- endif %}"
    "{%- endfor %}"
)
"""DeepSeek V3: arguments are text, and a message with content shows no calls."""
HARMONY = (
    "{%- for tool in tools or [] %}{{- 'functions.' + tool.function.name + '\n' }}{%- endfor %}"
    "{%- for message in messages %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|start|>assistant to=functions.' + call.function.name + "
    "'<|channel|>commentary json<|message|>' + (call.function.arguments | tojson) + '<|call|>' }}{%- endfor %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
"""GPT-OSS: messages with channels."""
CONTROL = (
    "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<start_of_turn> <end_of_turn> [INST] [/INST]"
).split()
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def chat_tokenizer() -> FastTokenizer:
    """A byte-level one with merges and the words of Llama 3, that knows the control tokens of all templates."""
    tokenizer = byte_tokenizer([("Ġ", "a"), ("e", "r"), ("u", "s"), ("us", "er"), ("Ċ", "Ċ")])
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), bytes_])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])  # pyright: ignore[reportUnknownMemberType]
    return tokenizer
