"""A GGUF file becomes a directory as `transformers` saves it, once: de-quantised, with all that the file says."""

import hashlib
import io
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csattn.artifact.durable import available_bytes
from csattn.errors import ModelError
from csattn.models.families import describe
from csattn.models.hub import first_line
from csattn.models.text_part import require_whole
from csattn.models.weight_sizes import weight_bytes

_LLAMA_3_ROPE = {  # of all its releases from 3.1 on
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def converted(gguf: Path) -> Path:
    """A directory with the GGUF file's de-quantised weights, made on first use."""
    stat = gguf.stat()
    file = f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    cache = Path(os.environ.get("CSATTN_CACHE", "~/.cache/csattn")).expanduser()
    # the number: of how it is converted; without one it was the first time
    target, before = (
        cache / "models" / f"{gguf.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}" for key in (f"2 {file}", file)
    )
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    except OSError as error:
        raise ModelError(
            f"{gguf} is converted once into {target.parent}, which cannot be written ({error.strerror}); name a "
            "directory that can be with CSATTN_CACHE"
        ) from error
    try:
        with redirect_stderr(io.StringIO()):  # transformers draws a bar of its own here
            _convert(gguf, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:  # another process converted the same file first
            if not target.is_dir():
                raise
        shutil.rmtree(before, ignore_errors=True)
    except MemoryError:
        raise
    except ModelError as error:
        raise ModelError(f"{gguf} could not be converted: {error}") from error
    except Exception as error:
        why = first_line(error).replace(f"{gguf}", "it")
        raise ModelError(f"{gguf} could not be converted: {why}; give a whole .gguf file, or a directory") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    factors = _require_read(gguf)
    # transformers refuses to save a model that it de-quantised, so its weights move into a plain one
    describe(config := AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name))
    needed, free = weight_bytes(config, torch.float32.itemsize)[0], available_bytes(target)
    if free is not None and free < needed:
        raise ModelError(
            f"it is converted once, to float32: {needed / 2**30:.2f} GiB, and {target.parent} has "
            f"{free / 2**30:.2f} GiB free; make room there, or name another directory with CSATTN_CACHE"
        )
    dequantised, found = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    require_whole(found, is_part=False)
    config = dequantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if factors is not None:
        _scale_positions(config, factors)
    with torch.device("meta"):
        plain = type(dequantised)(config)
    plain.load_state_dict(dequantised.state_dict(), assign=True)  # not copied: all of it is in memory once
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
    return ModelError(
        f"its positions are scaled ({how}) in a way that is not read from GGUF files here; give the model as a "
        "directory that transformers saved"
    )
