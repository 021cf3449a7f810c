"""Convert a GGUF file once into a directory as `transformers` saves it, de-quantised."""

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
from csattn.models.checkpoint_files import require_fetched, require_weights
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.gguf_checks import positions_not_read, read_rope_factors, require_fields_read, require_tensors_read
from csattn.models.gguf_tokenizer import named_ends, read_tokenizer
from csattn.models.hub import first_line
from csattn.models.mapped_files import ResultsToFiles
from csattn.models.positions import rope_parameters
from csattn.models.text_part import require_whole, without_reports
from csattn.models.weight_sizes import is_converted_on_disk, weight_bytes

_SCRATCH = ".converting-"
_SAMPLE = "csattn_source"  # a file that names the contents a conversion was made from
_WRITTEN = ("config.json", "tokenizer.json", "tokenizer_config.json", _SAMPLE)  # beside the weights
_SAMPLED_BLOCKS, _BLOCK_BYTES = 64, 4096
_LLAMA_3_ROPE = {  # of all Llama releases from 3.1 on
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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
        shutil.rmtree(_named(gguf, ""), ignore_errors=True)  # a conversion of the first version, which had no number
    except MemoryError:
        raise
    except ModelError as error:
        raise ModelError(f"{gguf} could not be converted: {error}") from error
    except Exception as error:
        why = first_line(error).replace(f"{gguf}", "it")
        remedy = "give a whole .gguf file, or a directory"
        if isinstance(error, KeyError):  # of one of transformers' tables
            why, remedy = f"transformers does not know its {why}", "install a newer transformers, or give a directory"
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


def config_of(gguf: Path) -> Any:
    """Return the `transformers` config of a GGUF file, without reading weights. Raises ModelError if unsupported."""
    return deepcopy(_read_config(gguf.absolute(), f"{_version(gguf)} {_sample(gguf)}"))


@lru_cache(maxsize=4)
def _read_config(gguf: Path, version: str) -> Any:
    """Read the config, cached: looking at every word of the vocabulary takes seconds. version: of the file."""
    from transformers import AutoConfig

    require_fetched(gguf)
    with _cached_reader(), redirect_stderr(io.StringIO()):
        factors = read_rope_factors(gguf)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if config.model_type in FAMILIES:  # else `describe` says why it is refused
            require_fields_read(gguf, config)
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
    tokenizer = read_tokenizer(gguf)
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
    require_tensors_read(gguf, dequantised)
    with torch.device("meta"):
        plain = type(dequantised)(config)
    plain.load_state_dict(dequantised.state_dict(), assign=True)  # without a copy
    plain.tie_weights()
    plain.generation_config.eos_token_id = named_ends(gguf, plain.generation_config.eos_token_id)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _scale_positions(config: Any, factors: Tensor) -> None:
    """Set Llama 3.1's RoPE in the config. Raises ModelError if these divisors of frequencies are not Llama 3.1's."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if (plain := rope_parameters(config).get("")) is None:  # layers have different ones
        raise positions_not_read("rope_freqs.weight")
    config.rope_parameters = {**plain, **_LLAMA_3_ROPE, "factor": float(factors.max())}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = plain["rope_theta"] ** (-torch.arange(len(frequencies)) / len(frequencies))
    if factors.shape != frequencies.shape or not torch.allclose(unscaled / frequencies, factors, rtol=1e-3):
        raise positions_not_read("rope_freqs.weight")
