"""Convert a GGUF file once into a directory as `transformers` saves it, de-quantised."""

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from csattn.artifact.durable import available_bytes, fsync_dir, fsync_files
from csattn.cache import cache_dir
from csattn.errors import ModelError
from csattn.models.checkpoint_files import require_fetched, require_weights
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.hub import first_line
from csattn.models.mapped_files import ResultsToFiles
from csattn.models.positions import rope_parameters
from csattn.models.text_part import require_whole, without_reports
from csattn.models.weight_sizes import is_converted_on_disk, weight_bytes

_SCRATCH = ".converting-"
_SAMPLE = "csattn_source"  # a file that names the contents a conversion was made from
_WRITTEN = ("config.json", "tokenizer.json", "tokenizer_config.json", _SAMPLE)  # beside the weights
_SAMPLED_BLOCKS, _BLOCK_BYTES = 64, 4096
# by name, the config's attributes that equal a file's fields if `transformers` has read them
_SAME_FIELDS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
# fields that `transformers` never reads, with the values that change nothing
_NO_EFFECT: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (1,),
}
# names of rules by which text is split before byte-pair merges (tokenizer.ggml.pre)
_WHOLE_WORDS = {  # words that are tokens stay whole, and BOS comes first unless the file says otherwise
    "falcon3", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken"
}  # fmt: skip
_AS_GPT_2 = {  # some of them cut digits apart, too: then no token has two
    "", "a.x-4.0", "codeshell", "command-r", "default", "exaone", "exaone4", "gigachat", "gpt-2", "granite-docling",
    "jais", "jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "mellum", "minerva-7b",
    "modern-bert", "mpt", "olmo", "phi-2", "refact", "roberta-bpe", "smollm", "starcoder", "trillion",
}  # fmt: skip
_LLAMA_3_ROPE = {  # of all Llama releases from 3.1 on
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Tokens that end the turn of some model. A file names one of them; its model was often trained with several.
_END_TOKENS = {
    "</s>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|call|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eom|>",
    "<|eot_id|>", "<|eot|>", "<|im_end|>", "<|observation|>", "<|return|>", "<|user|>", "<end_of_turn>", "<turn|>",
    "[|endofturn|]",
}  # fmt: skip


def converted(gguf: Path, dtype: torch.dtype) -> Path:
    """Return a directory with the de-quantised weights of a GGUF file, in `dtype` or float32; make it on first use.

    Raises ModelError if the file cannot be converted.
    """
    if (made := find_converted(gguf, dtype)) is not None:
        return made
    target = _directory(gguf, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=_SCRATCH))
    except OSError as error:
        raise ModelError(
            f"{gguf} is converted once into {target.parent}, which cannot be written ({error.strerror}); set "
            "CSATTN_CACHE to a directory that can be written"
        ) from error
    try:
        with _cached_reader(), redirect_stderr(io.StringIO()):  # hides a progress bar of transformers
            sample = _sample(gguf)
            _convert(gguf, dtype, scratch)
        (scratch / _SAMPLE).write_text(sample)
        scratch.chmod(0o755)
        fsync_files(scratch)  # after a power loss, zeros would be loaded as weights
        if target.is_dir() and not _is_whole(target, gguf):
            shutil.rmtree(target)
        try:
            scratch.rename(target)
        except OSError:  # another process converted the same file first
            if not target.is_dir():
                raise
        fsync_dir(target.parent)
        shutil.rmtree(_first_directory(gguf), ignore_errors=True)
    except MemoryError:
        raise
    except ModelError as error:
        raise ModelError(f"{gguf} could not be converted: {error}") from error
    except Exception as error:
        why = first_line(error).replace(f"{gguf}", "it")
        remedy = "give a whole .gguf file, or a directory"
        in_cache = isinstance(error, OSError) and str(target.parent) in (error.filename or f"{target.parent}")
        if in_cache or "os error" in why:  # safetensors and tokenizers write this
            remedy = f"free some space in {target.parent}, or set CSATTN_CACHE to another directory"
        raise ModelError(f"{gguf} could not be converted: {why}; {remedy}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(models: Path) -> None:
    """Remove what killed conversions left: directories older than a day, longer than any conversion takes."""
    for scratch in models.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if scratch.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(scratch, ignore_errors=True)


def find_converted(gguf: Path, dtype: torch.dtype) -> Path | None:
    """Return the directory if the file is converted already, to `dtype` or to float32 (cast when loaded); else None.

    A conversion that lacks files, which something else removed from the cache, does not count, nor does one of a file
    that was replaced by another of the same size and time.
    """
    made = (_directory(gguf, of) for of in (dtype, torch.float32))
    return next((directory for directory in made if _is_whole(directory, gguf)), None)


def _is_whole(directory: Path, gguf: Path) -> bool:
    """Whether a conversion has all files, is of this file's contents, and has weights as long as their headers tell."""
    if not all((directory / name).is_file() for name in _WRITTEN):
        return False
    try:
        require_weights(directory, is_quantized=False)
        return (directory / _SAMPLE).read_text() == _sample(gguf)
    except (ModelError, OSError):
        return False


def _directory(gguf: Path, dtype: torch.dtype) -> Path:
    # 2: the version of the conversion
    return _named(gguf, "2 " if dtype == torch.float32 else f"2 {dtype} ")


def _first_directory(gguf: Path) -> Path:
    """The directory of conversions of the first version, which had no number."""
    return _named(gguf, "")


def _named(gguf: Path, how: str) -> Path:
    key = f"{how}{gguf.resolve()} {_version(gguf)}"
    return cache_dir() / "models" / f"{gguf.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _version(gguf: Path) -> str:
    """A string that changes when the file is written again."""
    stat = gguf.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _sample(gguf: Path) -> str:
    """A hash of blocks of the file, evenly spaced: images and archives set the times of all files to the same."""
    digest, size = hashlib.sha256(), gguf.stat().st_size
    with gguf.open("rb", buffering=0) as file:
        for number in range(_SAMPLED_BLOCKS):
            file.seek(size * number // _SAMPLED_BLOCKS)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def end_ids(tokenizer: Any) -> set[int]:
    """Return the special tokens of a GGUF file's tokenizer that end its model's turn, whatever the file says."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # <|end|> ends Phi's turns, but in gpt-oss only a message, of which a turn has several
    ends = _END_TOKENS if "<|return|>" in special else _END_TOKENS | {"<|end|>"}
    return {i for content, i in special.items() if content in ends}


def config_of(gguf: Path) -> Any:
    """Return the `transformers` config of a GGUF file, without reading weights. Raises ModelError if unsupported."""
    return deepcopy(_read_config(gguf.absolute(), f"{_version(gguf)} {_sample(gguf)}"))


@lru_cache(maxsize=4)
def _read_config(gguf: Path, version: str) -> Any:
    """Read the config, cached: looking at every word of the vocabulary takes seconds. version: of the file."""
    from transformers import AutoConfig

    require_fetched(gguf)
    with _cached_reader(), redirect_stderr(io.StringIO()):
        factors = _require_read(gguf)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if config.model_type in FAMILIES:  # else `describe` says why it is refused
            _require_fields_read(gguf, config)
    describe(config)
    if factors is not None:
        _scale_positions(config, factors)
    return config


@contextmanager
def _cached_reader() -> Iterator[None]:
    """While open, `gguf.GGUFReader` is cached by file, and `gguf.get_tensor_name_map` by architecture and depth.

    transformers makes a reader for each thing that it reads of a file, and each takes seconds: it looks at every word
    of the vocabulary, one by one. It makes a map of all names for each module of the model.
    """
    import gguf

    reader: Any = gguf.GGUFReader
    names: Any = gguf.get_tensor_name_map
    if not isinstance(reader, type):  # it is cached already
        yield
        return

    class Reader(reader):  # type: ignore[misc]  # of a package that has no types
        def __setattr__(self, name: str, value: Any) -> None:  # slices of a numpy.memmap take four times as long
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    made = lru_cache(Reader)
    gguf.GGUFReader = lambda path: made(os.path.abspath(path))
    gguf.get_tensor_name_map = lru_cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _convert(gguf: Path, dtype: torch.dtype, target: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    config = config_of(gguf)
    needed, free = weight_bytes(config, dtype.itemsize).decoded, available_bytes(target)
    if free is not None and free < needed:
        raise ModelError(
            f"it is converted once, to {str(dtype).removeprefix('torch.')}: {needed / 2**30:.2f} GiB, and "
            f"{target.parent} has {free / 2**30:.2f} GiB free; free some space there, or set CSATTN_CACHE to another "
            "directory"
        )
    tokenizer = _read_tokenizer(gguf)
    # transformers refuses to save a model that it de-quantised, so its weights move into a plain one
    with without_reports(), ResultsToFiles(Tensor.to) if is_converted_on_disk(needed) else nullcontext():
        dequantised, found = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `require_whole` refuses them
            quantization_config=GgufConfig(dequantize=True),  # else `kernels`, if installed, keeps blocks
        )
    require_whole(found, is_part=False)
    _require_tensors_read(gguf, dequantised)
    with torch.device("meta"):
        plain = type(dequantised)(config)
    plain.load_state_dict(dequantised.state_dict(), assign=True)  # without a copy
    plain.tie_weights()
    plain.generation_config.eos_token_id = _named_ends(gguf, plain.generation_config.eos_token_id)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _read_tokenizer(gguf: Path) -> Any:
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
            raise _not_read(f"its text is split by the rules {pre!r} (tokenizer.ggml.pre), a kind of rules")
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


def _named_ends(gguf: Path, read: Any) -> list[int] | int | None:
    """Return all tokens that the file says end a turn. read: those that `transformers` takes."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = {int(fields[name].contents()) for name in names if name in fields}
    return sorted(ends.union(read if isinstance(read, list) else ())) or None


def _require_read(gguf: Path) -> Tensor | None:
    """Return the divisors of RoPE's frequencies, [head_dim / 2], or None; `transformers` ignores them.

    Raises ModelError for other contents that `transformers` ignores although they change the model.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    values = {name: field.parts[-1] for name, field in reader.fields.items()}
    if "split.count" in values and (count := int(values["split.count"][0])) > 1:
        raise ModelError(f"it is one of {count} parts; join them with llama.cpp's llama-gguf-split --merge")
    family = bytes(values["general.architecture"]).decode()
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        field = reader.fields.get(f"{family}.{name}")
        if field is not None and len(field.data) > 1 and family != "lfm2":  # which is refused for its convolutions
            raise _not_read(f"its layers have one {name} each, a field")
    by_name = (values.get(f"{family}.rope.{name}", [0.0])[0] for name in ("scaling.factor", "scale_linear"))
    is_scaled = next((factor for factor in by_name if factor), 1.0) != 1.0
    scaling = bytes(values.get(f"{family}.rope.scaling.type", b"linear")).decode()
    if scaling == "linear" and not is_scaled:
        scaling = "none"
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    freqs = None if family == "gemma4" else factors.pop("rope_freqs.weight", None)
    if scaling != "none" or (factors and family != "gemma4"):  # Gemma 4's are read
        raise _scaled(next(iter(factors), scaling))
    return None if freqs is None else torch.tensor(freqs)


def _require_fields_read(gguf: Path, config: Any) -> None:
    """Raise ModelError if the config of `transformers` differs from the file's fields.

    It ignores windows, rotated dimensions and those of _SAME_FIELDS in some families. Files lack the softmax scale: it
    follows from the width of heads, except in Gemma 2 27B and Gemma 3 27B.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    family = bytes(fields["general.architecture"].parts[-1]).decode()

    def number_at(name: str) -> int:
        return int(fields[f"{family}.{name}"].parts[-1][0]) if f"{family}.{name}" in fields else 0

    types, needed = getattr(config, "layer_types", None) or (), ["context_length", "attention.layer_norm_rms_epsilon"]
    if "sliding_attention" in types and family != "gemma2":  # whose window llama.cpp knows
        needed.append("attention.sliding_window")
    if f"{family}.expert_count" in fields:
        needed.append("expert_used_count")
    if lacking := [name for name in needed if f"{family}.{name}" not in fields]:
        raise ModelError(f"it lacks the field {family}.{lacking[0]}; convert its model to GGUF again, with llama.cpp")
    gates = {"expert_gating_func": (0, 2 if config.model_type == "minimax_m2" else 1)}  # sigmoid, softmax
    for name, neutral in {**_NO_EFFECT, **gates}.items():
        if f"{family}.{name}" in fields and (there := fields[f"{family}.{name}"].contents()) not in neutral:
            raise _not_read(f"it has {name} {there:g}, a field")
    for name, attribute in _SAME_FIELDS.items():
        if hasattr(config, attribute) and f"{family}.{name}" in fields:
            there, read = fields[f"{family}.{name}"].contents(), getattr(config, attribute)
            if there != (read or 0):
                raise _not_read(f"it has {name} {there:g}, for which transformers takes {read}, a field")
    pattern = f"{family}.attention.sliding_window_pattern"
    if (
        pattern in fields
        and types
        and _local_layers(fields[pattern].contents(), len(types))
        != [of_type == "sliding_attention" for of_type in types]
    ):
        raise _not_read("its layers with a window are others than transformers takes (sliding_window_pattern), a field")
    window, num_rotated = number_at("attention.sliding_window"), number_at("rope.dimension_count")
    if 0 < window < config.max_position_embeddings and window != getattr(config, "sliding_window", None):
        raise _not_read(f"its layers attend through a window of {window} rows (attention.sliding_window), a field")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "query_pre_attn_scalar", head_dim) != head_dim:
        raise _not_read(f"its heads have {head_dim} dimensions and logits scaled by a number (query_pre_attn_scalar)")
    for of_type, rope in rope_parameters(config).items():
        name = "rope.freq_base_swa" if of_type == "sliding_attention" else "rope.freq_base"
        there, read = fields.get(f"{family}.{name}"), rope["rope_theta"]
        if (base := 10000.0 if there is None else there.contents()) != read:
            raise _not_read(f"it has {name} {base:g}, for which transformers takes {read:g}, a field")
    of_all = rope_parameters(config).get("")  # with several RoPEs, the file's number is of some layers only
    if num_rotated and of_all and num_rotated != int(head_dim * of_all.get("partial_rotary_factor", 1.0)):
        raise _not_read(f"RoPE rotates {num_rotated} of a head's {head_dim} dimensions (rope.dimension_count), a field")


def _local_layers(pattern: Any, num_layers: int) -> list[bool]:
    """Which layers attend through a window: told one by one, or all but every pattern-th."""
    if isinstance(pattern, list):
        return [bool(is_local) for is_local in pattern]
    return [not pattern or (layer_idx + 1) % pattern > 0 for layer_idx in range(num_layers)]


def _require_tensors_read(gguf: Path, model: Any) -> None:
    """Raise ModelError if the file's tensors have more numbers than the model of `transformers`, which ignores those.

    Not counted: divisors of RoPE's frequencies, and layers that predict further tokens (MTP), which csattn never loads.
    """
    from gguf import GGUFReader

    reader, family = GGUFReader(gguf), model.config.model_type
    has_mtp = any(name.endswith(".nextn_predict_layers") for name in reader.fields)
    further = f"blk.{model.config.num_hidden_layers}." if has_mtp else "rope_f"
    there = {
        tensor.name: int(tensor.n_elements)
        for tensor in reader.tensors
        if not tensor.name.startswith(("rope_f", further))
    }
    # tied weights are there once
    read = {tensor.data_ptr(): (name, tensor.numel()) for name, tensor in model.state_dict().items()}
    num_there = sum(number for name, number in there.items() if name.endswith(".bias"))
    if num_there > sum(number for name, number in read.values() if name.endswith("bias")):
        raise _not_read(f"it has biases where a {family} of transformers has none, a kind of tensor")
    more = sum(there.values()) - sum(number for _, number in read.values())
    if more < 0:  # `transformers` takes zeros for experts' matrices that are not there
        raise ModelError(f"it lacks {-more} of its model's numbers; convert its model to GGUF again, with llama.cpp")
    if more > 0:
        raise _not_read(f"it has tensors beyond those of a {family} of transformers ({more} numbers), a kind")


def _scale_positions(config: Any, factors: Tensor) -> None:
    """Set Llama 3.1's RoPE in the config. Raises ModelError if these divisors of frequencies are not Llama 3.1's."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if (plain := rope_parameters(config).get("")) is None:  # layers have different ones
        raise _scaled("rope_freqs.weight")
    config.rope_parameters = {**plain, **_LLAMA_3_ROPE, "factor": float(factors.max())}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = plain["rope_theta"] ** (-torch.arange(len(frequencies)) / len(frequencies))
    if factors.shape != frequencies.shape or not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise _scaled("rope_freqs.weight")


def _scaled(how: str) -> ModelError:
    return _not_read(f"its positions are scaled ({how}) in a way")


def _not_read(what: str) -> ModelError:
    return ModelError(
        f"{what} that is not read from GGUF files here; give the model as a directory that transformers saved"
    )
