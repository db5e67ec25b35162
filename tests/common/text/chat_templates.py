"""Chat templates with the rules of eleven families, and tokenizers with their special tokens.

They are written for these tests, from what the families' model cards and templates are documented to do. Each keeps the
rules that matter to a conversation by tokens: what is trimmed, merged, dropped, refused and dated.
"""

# ruff: noqa: RUF001  DeepSeek's special tokens have such characters

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from slipstream.common.text.tokenizer import load_tokenizer
from tests.common.text.small_tokenizer import chat_tokenizer

# A system message of its own, tools in the system message, results of tools merged into one message of the user.
QWEN2_5 = """{% if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{% else %}{% set system, rest = 'You are a helpful assistant.', messages %}{% endif %}
<|im_start|>system
{{ system }}
{%- if tools %}


# Tools
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools>
{%- endif %}<|im_end|>
{% for message in rest %}
{% if message.role == 'tool' %}
{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{% else %}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{ '\\n' if message.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

# Thoughts before the last question of a user are dropped, unless `preserve_thinking`; results of tools are no question.
# The last reply always shows a thought, an empty one if it has none. `enable_thinking` false writes an empty thought
# into the generation prompt.
QWEN3 = """{% set ns = namespace(last=messages | length - 1) %}
{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}
# Tools
<tools>
{%- for tool in tools %}

{{ tool | tojson }}
{%- endfor %}

</tools><|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% set content, thought = message.content or '', '' %}
{% if '</think>' in content %}
{% set thought = content.split('</think>')[0].strip('\\n').split('<think>')[-1].strip('\\n') %}
{% set content = content.split('</think>')[-1].lstrip('\\n') %}
{% endif %}
<|im_start|>assistant
{% if preserve_thinking or (loop.index0 > ns.last and (loop.last or thought)) %}
<think>
{{ thought }}
</think>

{{ content.lstrip('\\n') }}
{%- else %}
{{ content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{ '\\n' if content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}
{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}

<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{% elif not (message.role == 'system' and loop.first) %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>

{% endif %}
{% endif %}"""

# The date of today in the system message, contents trimmed, results of tools as `ipython`, one call a message.
LLAMA3 = """{{ bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ date_string }}

{{ system }}<|eot_id|>
{%- for message in rest %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
<|start_header_id|>assistant<|end_header_id|>

{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}<|eot_id|>
{%- elif message.role in ['tool', 'ipython'] %}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- else %}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

# The system message becomes the beginning of the user's, user and assistant must alternate, results need an id.
MISTRAL = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
[INST] {{ system + '\\n\\n' if loop.first and system else '' }}{{ message.content }}[/INST]
{%- elif message.tool_calls %}
[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}
{%- elif message.role == 'tool' %}
{%- if not message.tool_call_id or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user, assistant, system and tool roles are supported!') }}{% endif %}
{%- endfor %}"""

# No system message, user and model must alternate, contents trimmed.
GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}
<start_of_turn>model
{% endif %}"""

PHI = """{% for message in messages %}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

# The token of the next role ends a turn. Thoughts before the last question are shown as an empty one.
GLM = """[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}
<|assistant|>
{%- set content, thought = message.content or '', '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}

{% if loop.index0 > ns.last and thought %}<think>{{ thought.strip() }}</think>{% else %}<think></think>{% endif %}
{%- if content.strip() %}

{{ content.strip() }}
{%- endif %}
{%- for call in message.tool_calls or [] %}

<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}<|observation|>{% endif %}

<tool_response>
{{ message.content }}
</tool_response>
{%- else %}
<|system|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}"""

# The generation prompt opens a thought, and every earlier thought is dropped.
DEEPSEEK = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}<|User|>{{ message.content }}
{%- elif message.role == 'tool' %}<|tool_output_begin|>{{ message.content }}<|tool_output_end|>
{%- else %}<|Assistant|>{{ (message.content or '').split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}<|tool_call_begin|>{{ call.function.name }}
{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

# The tools are in the system message, and a call is shown without the mark `functools` that the policy writes first.
PHI4_MINI = """{% if messages[0].role == 'system' %}{% set system, rest = messages[0].content | trim, messages[1:] %}
{% else %}{% set system, rest = 'You are a helpful assistant.', messages %}{% endif %}
<|system|>
{{ system }}
{%- for tool in tools or [] %}

{{ tool | tojson }}
{%- endfor %}<|end|>
{%- for message in rest %}
<|{{ message.role }}|>
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %},{% endif %}
{%- endfor %}<|end|>
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else '' }}"""

# Nothing opens the answer to a result: `<|Assistant|>` only follows a user's message.
DEEPSEEK_V3 = """{{ bos_token }}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}
{%- for tool in tools or [] %}

{{ tool | tojson }}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}<｜Assistant｜>
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}
<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}
{%- elif message.role == 'assistant' %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>
{{- call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<｜tool▁call▁end｜>
{%- if loop.last %}<｜tool▁calls▁end｜>{% endif %}
{%- endfor %}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}"""

# As Qwen2.5's, with other marks: no line break follows a role, and every message ends with one.
ROLE = r"<\|im_start\|>(user|system|assistant|\{\{ message.role \}\})\n?"
GRANITE4 = re.sub(ROLE, r"<|start_of_role|>\1<|end_of_role|>", QWEN2_5.replace("\n\n# Tools", ""))
GRANITE4 = GRANITE4.replace("<|im_end|>", "<|end_of_text|>")


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template, and the special tokens of its tokenizer."""

    template: str
    marks: str  # of which the first ends a text, the second a turn
    has_system: bool = True  # and lets roles follow in any order
    has_tools: bool = True

    @property
    def special(self) -> list[str]:
        return self.marks.split()


FAMILIES = {
    "qwen2.5": Family(QWEN2_5, "<|endoftext|> <|im_end|> <|im_start|>"),
    "qwen3": Family(QWEN3, "<|endoftext|> <|im_end|> <|im_start|>"),
    "llama3": Family(LLAMA3, "<|end_of_text|> <|eot_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>"),
    "mistral": Family(  # a result needs the id of a call
        MISTRAL, "</s> </s> <s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]", has_tools=False
    ),
    "gemma": Family(GEMMA, "<eos> <end_of_turn> <bos> <start_of_turn>", has_system=False, has_tools=False),
    "phi": Family(PHI, "<|endoftext|> <|end|> <|system|> <|user|> <|assistant|> <|tool|>"),
    "glm": Family(GLM, "<|endoftext|> <|user|> <|observation|> <|assistant|> <|system|> [gMASK] <sop>"),
    "deepseek": Family(
        DEEPSEEK,
        "<|end_of_sentence|> <|end_of_sentence|> <|begin_of_sentence|> <|User|> <|Assistant|> "
        "<|tool_output_begin|> <|tool_output_end|> <|tool_call_begin|> <|tool_call_end|>",
    ),
}

# Tokens around a message, and marks of their own around a thought, which stays where it was.
SEED = """{% for message in messages %}<seed:bos>{{ message.role }}
{{ message.content }}<seed:eos>{% endfor %}
{%- if add_generation_prompt %}<seed:bos>assistant
{% endif %}{# <seed:think> #}"""

# Thoughts are dropped from all earlier replies, and contents trimmed. The prompt closes an empty thought.
GEMMA4 = """{{ bos_token }}{% for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}<|turn>{{ role }}
{{ message.content.split('<channel|>')[-1] | trim }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{{ '' if enable_thinking else '<|channel>thought\\n<channel|>' }}{% endif %}{# <|think|> #}"""

# Each role has tokens of its own.
APERTUS = """<s>{% for message in messages %}<|{{ message.role }}_start|>{{ message.content }}<|{{ message.role }}_end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}{# <|inner_prefix|> #}"""

KIMI = """{% for message in messages %}
{%- set begins = {'system': '<|im_system|>', 'tool': '<|im_system|>', 'user': '<|im_user|>'} %}
{{- begins[message.role] if message.role in begins else '<|im_assistant|>' }}{{ message.role }}<|im_middle|>
{{- message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}{# ◁think▷ #}"""


# Those whose templates the tests of calls and of other texts need, beside the eight above.
CALLERS = FAMILIES | {
    "phi4-mini": Family(PHI4_MINI, "<|endoftext|> <|end|> <|system|> <|user|> <|assistant|> <|tool|>"),
    "deepseek-v3": Family(
        DEEPSEEK_V3,
        "<｜end▁of▁sentence｜> <｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
        "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
        "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    ),
    "seed-oss": Family(SEED, "<seed:eos> <seed:eos> <seed:bos>"),
    "gemma4": Family(GEMMA4, "<eos> <turn|> <bos> <|turn> <|channel> <channel|>"),
    "apertus": Family(
        APERTUS,
        "</s> <|assistant_end|> <s> <|system_start|> <|system_end|> <|user_start|> <|user_end|> <|tool_start|> "
        "<|tool_end|> <|assistant_start|>",
    ),
    "kimi": Family(KIMI, "[EOS] <|im_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|>"),
    "granite4": Family(GRANITE4, "<|end_of_text|> <|end_of_text|> <|start_of_role|> <|end_of_role|>"),
}


def family_tokenizer(name: str, folder: Path, arguments: dict[str, object] | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer with the special tokens and the chat template of a family."""
    family = CALLERS[name]
    begins = [text for text in family.special if text.startswith(("<s>", "<bos>", "<|begin", "<｜begin"))]
    ends = family.special[:3] if name == "glm" else family.special[:2]
    save_byte_tokenizer(folder, family.template, family.special, ends=ends, bos=(begins or [None])[0])
    return load_tokenizer(folder, arguments)


def save_byte_tokenizer(folder: Path, template: str, special: list[str], *, ends: list[str], bos: str | None) -> None:
    """Save to `folder` a tokenizer of bytes that merges "ab" and " a"; its generation config has all of `ends`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*alphabet, "ab", "Ġa"])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys(special)])
    tokenizer = chat_tokenizer(model, template, eos_token=ends[0], bos_token=bos, pad_token=ends[0])
    tokenizer.save_pretrained(folder)
    config = {"eos_token_id": tokenizer.convert_tokens_to_ids(ends)}
    (folder / "generation_config.json").write_text(json.dumps(config))
