"""Fields that clients of all kinds send, also those of other servers: some change nothing here, others are not
supported."""

from typing import Any

from workers.api.fields import Fields

# OpenAI's; and llama.cpp's, Ollama's and vLLM's about the server's own work
IGNORED = (
    "cache_control",
    "cache_prompt",
    "id_slot",
    "keep_alive",
    "metadata",
    "n_keep",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "return_tokens",
    "safety_identifier",
    "service_tier",
    "store",
    "timings_per_token",
    "user",
    "verbosity",
)

_NO_FORM = "use response_format to constrain answers"
_NO_SAMPLER = "this way of sampling is not supported; leave it out"
# the neutral values of each, and why it can have no others
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "bad_words": (([],), "words cannot be forbidden; forbid tokens with logit_bias"),
    "chat_template": ((), "only the model's own chat template is used"),
    "documents": (([],), "send documents as text, in messages or as a context"),
    "format": (("",), _NO_FORM),
    "grammar": (("",), _NO_FORM),
    "guided_choice": (([],), _NO_FORM),
    "guided_grammar": (("",), _NO_FORM),
    "guided_json": ((), _NO_FORM),
    "guided_regex": (("",), _NO_FORM),
    "include_stop_str_in_output": ((False,), "an answer always ends before its stop string"),
    "json_schema": ((), _NO_FORM),
    "length_penalty": ((1, 1.0), "beams are not searched; leave it out"),
    "mirostat": ((0,), _NO_SAMPLER),
    "n_predict": ((-1,), "it is called max_tokens here"),
    "n_probs": ((0,), "they are called logprobs here"),
    "num_predict": ((-1,), "it is called max_tokens here"),
    "options": (({},), "send its entries as fields of the request itself"),
    "prompt_logprobs": ((0,), "a completion with echo and logprobs returns those of the prompt"),
    "repeat_penalty": ((1, 1.0), "it is called repetition_penalty here"),
    "skip_special_tokens": ((True,), "special tokens have no text here"),
    "spaces_between_special_tokens": ((True, False), "special tokens have no text here"),
    "structured_outputs": (({},), _NO_FORM),
    "tfs_z": ((1, 1.0), _NO_SAMPLER),
    "think": ((), "send reasoning_effort, or chat_template_kwargs"),
    "truncate_prompt_tokens": ((-1,), "prompts are not truncated"),
    "typical_p": ((1, 1.0), _NO_SAMPLER),
    "use_beam_search": ((False,), "beams are not searched; leave it out"),
    "xtc_probability": ((0, 0.0), _NO_SAMPLER),
}


def check_foreign_fields(fields: Fields) -> None:
    """Ignore or refuse these fields, each with a message of its own."""
    fields.ignore(*IGNORED)
    for name, (neutral, why) in _UNSUPPORTED.items():
        fields.only(name, *neutral, why=why)
