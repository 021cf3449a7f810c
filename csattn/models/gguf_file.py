"""A GGUF file becomes a directory as `transformers` saves it, once: de-quantised, with all that the file says."""

import hashlib
import io
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
from csattn.models.aside import MadeAside
from csattn.models.families import describe, rope_parameters
from csattn.models.hub import first_line
from csattn.models.text_part import require_whole
from csattn.models.weight_sizes import is_converted_aside, weight_bytes

_SCRATCH = ".converting-"
_LLAMA_3_ROPE = {  # of all its releases from 3.1 on
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# at which any model's turn has ended; the file tells one of them, its model was often trained with several
_ENDS = {
    "</s>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|call|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eom|>",
    "<|eot_id|>", "<|eot|>", "<|im_end|>", "<|observation|>", "<|return|>", "<|user|>", "<end_of_turn>", "<turn|>",
    "[|endofturn|]",
}  # fmt: skip


def converted(gguf: Path, dtype: torch.dtype) -> Path:
    """A directory with the GGUF file's de-quantised weights, in that dtype or in float32, made on first use."""
    if (made := find_converted(gguf, dtype)) is not None:
        return made
    target = _directory(gguf, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=_SCRATCH))
    except OSError as error:
        raise ModelError(
            f"{gguf} is converted once into {target.parent}, which cannot be written ({error.strerror}); name a "
            "directory that can be with CSATTN_CACHE"
        ) from error
    try:
        with _read_once(), redirect_stderr(io.StringIO()):  # transformers draws a bar of its own here
            _convert(gguf, dtype, scratch)
        scratch.chmod(0o755)
        fsync_files(scratch)  # zeros in a file's place would be loaded as weights
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
        if "os error" in why:  # safetensors writes
            remedy = f"make room in {target.parent}, or name another directory with CSATTN_CACHE"
        raise ModelError(f"{gguf} could not be converted: {why}; {remedy}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _sweep(models: Path) -> None:
    """Remove what conversions left that were killed: nobody converts for a day."""
    for scratch in models.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if scratch.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(scratch, ignore_errors=True)


def find_converted(gguf: Path, dtype: torch.dtype) -> Path | None:
    """Where `converted` finds it already. Weights in float32 become those of any dtype."""
    made = (_directory(gguf, of) for of in (dtype, torch.float32))
    return next((directory for directory in made if directory.is_dir()), None)


def _directory(gguf: Path, dtype: torch.dtype) -> Path:
    # the number: of how it is converted
    return _named(gguf, "2 " if dtype == torch.float32 else f"2 {dtype} ")


def _first_directory(gguf: Path) -> Path:
    """As it was before conversions had a number."""
    return _named(gguf, "")


def _named(gguf: Path, how: str) -> Path:
    key = f"{how}{gguf.resolve()} {_version(gguf)}"
    return cache_dir() / "models" / f"{gguf.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _version(gguf: Path) -> str:
    """Another one once the file was written again."""
    stat = gguf.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


def end_ids(tokenizer: Any) -> set[int]:
    """The special tokens of a GGUF file's tokenizer at which its model's turn has ended, whatever the file says."""
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Phi's turns end with what ends gpt-oss's messages, several of which make a turn
    ends = _ENDS if "<|return|>" in special else _ENDS | {"<|end|>"}
    return {i for content, i in special.items() if content in ends}


def config_of(gguf: Path) -> Any:
    """The `transformers` config of a GGUF file, of which no weight is read. Raises ModelError for what is not read."""
    return deepcopy(_read_config(gguf.absolute(), _version(gguf)))


@lru_cache(maxsize=4)
def _read_config(gguf: Path, version: str) -> Any:
    """It takes seconds: every word of the vocabulary is looked at. version: of the file."""
    from transformers import AutoConfig

    with _read_once(), redirect_stderr(io.StringIO()):
        factors = _require_read(gguf)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _require_taken_over(gguf, config)
    describe(config)
    if factors is not None:
        _scale_positions(config, factors)
    return config


@contextmanager
def _read_once() -> Iterator[None]:
    """Meanwhile a file's `gguf.GGUFReader` is made once. transformers makes one for each thing that it asks of a file,
    and each takes seconds: it looks at every word of the vocabulary, one by one."""
    import gguf

    reader: Any = gguf.GGUFReader
    if not isinstance(reader, type):  # it is shared already
        yield
        return

    class Reader(reader):  # type: ignore[misc]  # of a package that has no types
        def __setattr__(self, name: str, value: Any) -> None:  # a numpy.memmap's parts take four times as long to make
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    made = lru_cache(Reader)
    gguf.GGUFReader = lambda path: made(os.path.abspath(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _convert(gguf: Path, dtype: torch.dtype, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    config = config_of(gguf)
    needed, free = weight_bytes(config, dtype.itemsize).decoded, available_bytes(target)
    if free is not None and free < needed:
        raise ModelError(
            f"it is converted once, to {str(dtype).removeprefix('torch.')}: {needed / 2**30:.2f} GiB, and "
            f"{target.parent} has {free / 2**30:.2f} GiB free; make room there, or name another directory with "
            "CSATTN_CACHE"
        )
    # transformers refuses to save a model that it de-quantised, so its weights move into a plain one
    with MadeAside(Tensor.to) if is_converted_aside(needed) else nullcontext():
        dequantised, found = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=dtype,
            output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True),  # else Hugging Face's `kernels`, if there, keeps blocks
        )
    require_whole(found, is_part=False)
    with torch.device("meta"):
        plain = type(dequantised)(config)
    plain.load_state_dict(dequantised.state_dict(), assign=True)  # not copied
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _require_read(gguf: Path) -> Tensor | None:
    """What frequencies of positions are divided by, [head_dim / 2], where the file has it and `transformers` passes
    over it. Raises ModelError for all else that it passes over, and would make another model of the file."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    values = {name: field.parts[-1] for name, field in reader.fields.items()}
    if "split.count" in values and (count := int(values["split.count"][0])) > 1:
        raise ModelError(f"it is one of {count} parts; join them with llama.cpp's llama-gguf-split --merge")
    family = bytes(values["general.architecture"]).decode()
    by_name = (values.get(f"{family}.rope.{name}", [0.0])[0] for name in ("scaling.factor", "scale_linear"))
    is_scaled = next((factor for factor in by_name if factor), 1.0) != 1.0
    scaling = bytes(values.get(f"{family}.rope.scaling.type", b"linear")).decode()
    if scaling == "linear" and not is_scaled:
        scaling = "none"
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    freqs = None if family == "gemma4" else factors.pop("rope_freqs.weight", None)
    if (scaling != "none" and family != "gpt-oss") or (factors and family != "gemma4"):  # which are read
        raise _scaled(next(iter(factors), scaling))
    return None if freqs is None else torch.tensor(freqs)


def _require_taken_over(gguf: Path, config: Any) -> None:
    """Raise ModelError where `transformers` makes a config without the window that layers attend through, or with
    another number of dimensions that turn: of some families it passes over these."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    family = bytes(fields["general.architecture"].parts[-1]).decode()

    def told(name: str) -> int:
        return int(fields[f"{family}.{name}"].parts[-1][0]) if f"{family}.{name}" in fields else 0

    window, turned = told("attention.sliding_window"), told("rope.dimension_count")
    if 0 < window < config.max_position_embeddings and window != getattr(config, "sliding_window", None):
        raise _passed_over(f"its layers attend through a window of {window} rows (attention.sliding_window), a field")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_all = rope_parameters(config).get("")  # of layers that turn differently, the file tells of some
    if turned and of_all and turned != int(head_dim * of_all.get("partial_rotary_factor", 1.0)):
        raise _passed_over(f"positions turn {turned} of a head's {head_dim} dimensions (rope.dimension_count), a field")


def _scale_positions(config: Any, factors: Tensor) -> None:
    """Have the model divide its frequencies by these, which are Llama 3.1's. Raises ModelError where they are not."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters
    config.rope_parameters = {**plain, **_LLAMA_3_ROPE, "factor": float(factors.max())}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = plain["rope_theta"] ** (-torch.arange(len(frequencies)) / len(frequencies))
    if factors.shape != frequencies.shape or not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise _scaled("rope_freqs.weight")


def _scaled(how: str) -> ModelError:
    return _passed_over(f"its positions are scaled ({how}) in a way")


def _passed_over(what: str) -> ModelError:
    return ModelError(
        f"{what} that is not read from GGUF files here; give the model as a directory that transformers saved"
    )
