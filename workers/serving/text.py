"""Incremental detokenisation: text is passed on as soon as no further token can change it."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_UNFINISHED = "\ufffd"  # what an incomplete character is decoded to
_WINDOW = 8  # tokens that are decoded again with a new one


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of an answer. Tokenisation spaces are not cleaned up, as that would change text passed on."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def special_ids(tokenizer: Any) -> set[int]:
    """Return the added tokens that are special, also those that `all_special_ids` does not list."""
    return {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


@lru_cache(4)  # for thousands of added tokens it takes tens of milliseconds
def _silent_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that `decode` skips: a fast tokenizer skips more than it lists in `all_special_ids`."""
    added = special_ids(tokenizer) if tokenizer.is_fast else set()
    return frozenset(added.union(tokenizer.all_special_ids))


class TextStream:
    """Decodes tokens to pieces of text as they come. Joined, the pieces are exactly `decode` of all tokens."""

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        """before: tokens that the text continues. One of them is decoded with it, because some decoders strip the
        space at the start of a text."""
        self._tokenizer, self._skipped = tokenizer, _silent_ids(tokenizer)
        whole = (token_id for token_id in reversed(before[-_WINDOW:]) if self._is_whole(token_id))
        # the first and the last tokens; those between no longer affect new text
        self._token_ids = list(islice(whole, 1))
        self._num_emitted = len(decode(tokenizer, self._token_ids))  # characters of their text that have been passed on

    def _is_whole(self, token_id: int) -> bool:
        """Whether the token has text that no other token changes."""
        text = decode(self._tokenizer, [token_id])
        return text != "" and _UNFINISHED not in text and not self._is_byte(token_id)

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(token_id) or "") is not None

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._token_ids.append(token_id)
        if self._is_byte(token_id):
            return ""  # decoders convert a run of byte tokens as a whole
        text = decode(self._tokenizer, self._token_ids)
        certain = len(text) - text.endswith(_UNFINISHED)
        piece, self._num_emitted = text[self._num_emitted : certain], certain
        if len(self._token_ids) >= 3 * _WINDOW:
            self._forget(text)
        return piece

    def skips(self, token_id: int) -> bool:
        """Whether the token adds nothing to the text."""
        return token_id in self._skipped

    def finish(self) -> str:
        """Return the rest of the text: what incomplete characters are decoded to."""
        text = decode(self._tokenizer, self._token_ids)
        piece, self._num_emitted = text[self._num_emitted :], len(text)
        return piece

    def _forget(self, text: str) -> None:
        """Drop the tokens between the first and the last ones, if the text of the last is the same without them.

        The first stay because a decoder may strip the start of a text. A character has at most four tokens, so one of
        four successive numbers of last tokens begins with a character.
        """
        first = self._token_ids[:_WINDOW]
        start, num_pending = decode(self._tokenizer, first), len(text) - self._num_emitted
        for num_last in range(_WINDOW, _WINDOW + 4):
            token_ids = first + self._token_ids[-num_last:]
            kept = decode(self._tokenizer, token_ids)
            end = kept[len(start) :]
            if kept.startswith(start) and text.endswith(end) and len(end) >= num_pending:
                self._token_ids, self._num_emitted = token_ids, len(kept) - num_pending
                return


class StopFinder:
    """Ends a text before the first complete stop string, and holds back what could become one.

    The first stop string is the one that ends first; of several that end together, the longest. The result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Return the text, with what was held back before, that can no longer be part of a stop string."""
        assert self.found is None, "the text has ended"
        seen = self._held + text
        if ends := [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]:
            end, at = min(ends)
            self.found, self._held = seen[at:end], ""
            return seen[:at]
        end = len(seen) - max((overlap(seen, stop) for stop in self._stops), default=0)
        self._held = seen[end:]
        return seen[:end]

    def finish(self) -> str:
        """Return what was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of the marker that the text ends with."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0 and not marker.startswith(text[at:]):
        at = text.find(marker[0], at + 1)
    return len(text) - at if at >= 0 else 0


@lru_cache(1 << 16)  # a token with 20 top logprobs needs 21 look-ups, on the thread that makes steps
def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return the bytes that a token stands for, or a special token's name."""
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:  # a model's vocabulary may be padded with ids that no token has
        return b""
    if token_id in tokenizer.all_special_ids:
        return str(token).encode()
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    alphabet = _byte_alphabet()
    if _is_byte_level(tokenizer) and all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return str(token).replace("\u2581", " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters for bytes: printable bytes stand for themselves, others are from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
