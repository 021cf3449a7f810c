"""Tiny models with what real tokenizers and chat templates have: an end-of-turn token, tools and thoughts."""

from functools import cache

from tokenizers import AddedToken

from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from tests.tiny import byte_tokenizer, make_model

END = "<|im_end|>"
_TURNS = (
    "{% for message in messages %}{% if not (loop.first and tools and message['role'] == 'system') %}"
    "<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}\n"
    "{% if message['role'] == 'tool' %}<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen's: tools are listed in the system message
HERMES = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n"
    "{% endif %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}' + _TURNS
)
# as DeepSeek's: the prompt ends within a thought
THINKING = HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# ends with </think> #}"
# as Qwen 3's: the model decides whether it thinks
MAY_THINK = HERMES + "{# <think> </think> #}"
# as Qwen 3.5's: thinking can be switched off, and a text precedes all messages
SWITCHED = "{% if today %}It is {{ today }}.\n{% endif %}" + HERMES.replace(
    "assistant\n{% endif %}",
    "assistant\n<think>\n{% if not enable_thinking | default(true) %}\n</think>\n\n{% endif %}{% endif %}",
)
# as Mistral's: tools are listed before the user's last message
MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ message['content'] }}"
    "[/SYSTEM_PROMPT]{% elif message['role'] == 'user' %}{% if tools and message == asked[-1] %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'tool' %}[TOOL_RESULTS]{{ message['content'] }}[/TOOL_RESULTS]"
    "{% elif message['tool_calls'] %}[TOOL_CALLS][{% for call in message['tool_calls'] %}{\"name\": "
    "\"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "{% endfor %}]<|im_end|>{% else %}{{ message['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
# as Llama's: tools are listed in a message of the user
LLAMA = (
    "{% if tools %}<|im_start|>system\nEnvironment: ipython<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    '{% if tools and loop.last %}{{ tools | tojson }}\nRespond in the format {"name": ..., "parameters": ...}\n'
    "{% endif %}{% if message['tool_calls'] %}{\"name\": \"{{ message['tool_calls'][0]['function']['name'] }}\", "
    "\"parameters\": {{ message['tool_calls'][0]['function']['arguments'] | tojson }}}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"hermes": HERMES, "thinking": THINKING, "may_think": MAY_THINK, "mistral": MISTRAL, "llama": LLAMA}
_TOKENS = {  # tokens that a family adds to its vocabulary -> whether they are special
    "hermes": {"<tool_call>": False, "</tool_call>": False},
    "may_think": {"<think>": False, "</think>": False},
    "mistral": {"[TOOL_CALLS]": True},
    "llama": {"<|python_tag|>": True},
}


@cache
def chat_model(kind: str, own_tokens: bool = True) -> LoadedModel:
    """own_tokens: a single token marks calls and thoughts, as in most models, instead of text."""
    tokenizer = byte_tokenizer(SWITCHED if kind == "switched" else TEMPLATES[kind])
    tokenizer.add_special_tokens({"eos_token": END})
    tokens = _TOKENS.get(kind, {}) if own_tokens else {}
    tokenizer.add_tokens([AddedToken(text, special=is_special) for text, is_special in tokens.items()])
    model = make_model(vocab_size=len(tokenizer) + 3, max_position_embeddings=8192)  # padded, as in real models
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return wrap_model(model, tokenizer, f"tiny-{kind}")
