"""The tokenizer of a GGUF file, as llama.cpp reads it, and the tokens that end a turn."""

import json
from pathlib import Path
from typing import Any

from csattn.models.gguf_checks import not_read

# names of rules by which text is split before byte-pair merges (tokenizer.ggml.pre)
_WHOLE_WORDS = {  # words that are tokens stay whole, and BOS comes first unless the file says otherwise
    "falcon3", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken"
}  # fmt: skip
_AS_GPT_2 = {  # some of them cut digits apart, too: then no token has two
    "", "a.x-4.0", "codeshell", "command-r", "default", "exaone", "exaone4", "gigachat", "gpt-2", "granite-docling",
    "jais", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "mellum", "minerva-7b",
    "modern-bert", "mpt", "olmo", "phi-2", "refact", "roberta-bpe", "smollm", "starcoder", "trillion",
}  # fmt: skip
# Tokens that end the turn of some model. A file names one of them; its model was often trained with several.
_END_TOKENS = {
    "</s>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|call|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eom|>",
    "<|eot_id|>", "<|eot|>", "<|im_end|>", "<|observation|>", "<|return|>", "<|user|>", "<end_of_turn>", "<turn|>",
    "[|endofturn|]",
}  # fmt: skip


def read_tokenizer(gguf: Path) -> Any:
    """Return the tokenizer, with what `transformers` leaves out. Raises ModelError if that is how text is split."""
    from gguf import GGUFReader
    from tokenizers import decoders, normalizers, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    given = {name: field for name, field in GGUFReader(gguf).fields.items() if name.startswith("tokenizer.ggml.")}
    kind, pre, prefix, tokens, kinds = (
        given[f"tokenizer.ggml.{name}"].contents() if f"tokenizer.ggml.{name}" in given else ""
        for name in ("model", "pre", "add_space_prefix", "tokens", "token_type")
    )
    if kind == "gpt2":
        _spell_added_tokens(tokenizer, tokens, kinds)
        backend = tokenizer.backend_tokenizer
        if pre not in _AS_GPT_2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            raise not_read(f"its text is split by the rules {pre!r} (tokenizer.ggml.pre), a kind of rules")
        if pre in _WHOLE_WORDS:
            backend.model.ignore_merges = True
            if tokenizer.bos_token and "tokenizer.ggml.add_bos_token" not in given:
                tokenizer.add_bos_token = True
    elif kind == "llama" and prefix is False:
        backend = tokenizer.backend_tokenizer
        backend.normalizer, backend.pre_tokenizer = normalizers.Replace(" ", "▁"), None
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _spell_added_tokens(tokenizer: Any, tokens: Any, kinds: Any) -> None:
    """Let the tokenizer find control and user-defined tokens with letters that stand for no byte (`<｜User｜>`).

    `transformers` spells them in bytes, as if they were parts of words, and gives new ids to BOS and EOS among them.
    """
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers

    added, letters = (TokenType.CONTROL, TokenType.USER_DEFINED), set(pre_tokenizers.ByteLevel.alphabet())
    missed = {i: tokens[i] for i, kind in enumerate(kinds) if kind in added and not letters.issuperset(tokens[i])}
    if not missed:
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    spelled = dict(enumerate(tokens)) | {i: token for token, i in state["model"]["vocab"].items()} | missed
    state["model"]["vocab"] = {token: i for i, token in spelled.items()}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(tokens)]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state | {"post_processor": None}))
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=kinds[i] == TokenType.CONTROL) for i, token in missed.items()]
    )
    tokenizer.update_post_processor()


def named_ends(gguf: Path, read: Any) -> list[int] | None:
    """Return all tokens that the file says end a turn. read: those that `transformers` takes."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = {int(fields[name].contents()) for name in names if name in fields}
    return sorted(ends.union(read if isinstance(read, list) else ())) or None


def end_ids(tokenizer: Any) -> set[int]:
    """Return the special tokens of a GGUF file's tokenizer that end its model's turn, whatever the file says."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # <|end|> ends Phi's turns, but in gpt-oss only a message, of which a turn has several
    ends = _END_TOKENS if "<|return|>" in special else _END_TOKENS | {"<|end|>"}
    return {i for content, i in special.items() if content in ends}
