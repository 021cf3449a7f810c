"""Find, load and identify a language model, given as a directory, a GGUF file, a hub id, or the demo model."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from csattn.artifact import ModelGeometry
from csattn.build_options import AUTO
from csattn.cpu.heap import trim_heap
from csattn.cpus import multiplies_bfloat16
from csattn.errors import ConfigError, CsattnError, ModelError
from csattn.models import deepseek_files
from csattn.models.checkpoint_files import require_weights
from csattn.models.description import describe
from csattn.models.families import FAMILIES, unsupported
from csattn.models.gguf_file import config_of, find_converted
from csattn.models.gguf_tokenizer import end_ids
from csattn.models.hub import fetched, first_line
from csattn.models.identity import fingerprint_of, geometry_of, hash_tokenizer
from csattn.models.layer_offload import place
from csattn.models.mapped_files import ResultsToFiles, to_mapped_file
from csattn.models.positions import stretch_positions
from csattn.models.quantized import read_state
from csattn.models.quantized_model import attach_quantized, drop_stale_quantized, round_weights
from csattn.models.quantized_weight import QuantizedWeight, Rounding, rounding_named
from csattn.models.source import DEMO_MODEL, MERGE, gguf_of, model_name, source_of
from csattn.models.text_part import (
    TEXT_MODEL_AT,
    class_of,
    named_as_text,
    named_if_text,
    require_plain,
    require_whole,
    text_config,
    without_reports,
)
from csattn.models.unchanged import changed, require_original_forward
from csattn.models.weight_sizes import weight_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# MKL's vector functions detect the CPU in their first call. When two threads made it at once, cosines of RoPE had
# errors of 1e-4. This is the first call, from one thread.
torch.zeros(1).cos()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model with its tokenizer and the fingerprint that identifies it."""

    name: str
    model: Any  # transformers PreTrainedModel
    tokenizer: Any  # transformers PreTrainedTokenizerBase
    geometry: ModelGeometry
    fingerprint: str  # hash of the weights, in the dtype they were loaded in
    rounding: Rounding | None = None  # the format that weights were rounded to at loading

    def __repr__(self) -> str:
        """One line, without the repr of the model, which has a line for each kind of module."""
        rounded = "" if self.rounding is None else f", rounded to {self.rounding}"
        return f"<LoadedModel {self.name}: {str(self.dtype).removeprefix('torch.')}{rounded}, on {self.device}>"

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the present vocabulary and chat template: the template is often set after loading."""
        return hash_tokenizer(self.tokenizer)

    @property
    def stop_ids(self) -> set[int]:
        """The ids of tokens that end the model's turn.

        By its generation config and its tokenizer together, because fine-tunes often change only one of them.
        """
        ids = self.model.generation_config.eos_token_id
        ids = [*(ids if isinstance(ids, list) else [ids]), getattr(self.tokenizer, "eos_token_id", None)]
        return {i for i in ids if isinstance(i, int) and 0 <= i < self.geometry.vocab_size}  # others are never drawn

    def require_unchanged(self) -> None:
        """Raise ModelError if the model in memory is not the one that was loaded, or would compute something else.

        Not detected: replaced modules without weights (activations), other buffers, and modules' own settings.
        """
        if fingerprint_of(self.model) != self.fingerprint:
            raise changed(self.name)
        require_original_forward(self.model, self.name)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers while open; afterwards restore the process's setting."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


@_without_bars()
def load_model(
    name: str | Path | None = None,
    dtype: str = AUTO,
    device: str = "cpu",
    stretch: float = 1.0,
    weights: str | None = None,
    may_offload: bool = False,
) -> LoadedModel:
    """Load a model of a supported family onto a device.

    name: a directory, a `.gguf` file, a hub id, or None for the demo model. A GGUF file is converted once for
    each dtype, into the cache directory ($CSATTN_CACHE, else ~/.cache/csattn).
    dtype: float32, bfloat16 or float16; auto: see `dtype_for`.
    stretch: multiplies the number of positions (YaRN).
    weights: fp8 or int4, to round those of linear layers and experts to; this makes it a different model, with the
    rounded weights.
    may_offload: keep the layers on the host if the device has no room for them; see `csattn.models.layer_offload`.
    Raises ModelError if the model cannot be found or loaded, or is of an unsupported kind, and ConfigError for an empty
    name, an unknown dtype or rounding, or a device that does not exist.
    """
    name = model_name(name)
    _require_device(device)
    dtype = dtype_for(device, name, dtype, weights)
    rounding = require_dtype_and_rounding(dtype, weights)
    source = source_of(name, DTYPES[dtype])
    try:
        whole = _whole_config(source)
        config = text_config(whole)
        describe(config)
        _require_dtype(config, dtype)
        if config._attn_implementation != "eager":  # that of the machine which saved it may be a package or a hub id
            config._attn_implementation = None
        stretch_positions(config, stretch)
        tokenizer = load_tokenizer(source)
        model = _load_whole(source, config, DTYPES[dtype], rounding, is_part=config is not whole).eval()
        model = place(model, device) if may_offload else model.to(device)
    except ModelError as error:
        raise ModelError(f"{name} could not be loaded: {error}") from error
    except (CsattnError, MemoryError):
        raise
    except UnpicklingError as error:
        raise ModelError(
            f"{name} could not be loaded: its .bin files hold other things than tensors, which may run code, or are "
            "damaged; save it as safetensors where it can be loaded, or download it again"
        ) from error
    except Exception as error:  # for damaged files, libraries raise errors of any class
        raise ModelError(f"{name} could not be loaded as a causal language model: {first_line(error)}") from error
    if name != DEMO_MODEL and os.path.exists(path := os.path.expanduser(name)):
        name = os.path.abspath(path)  # artifacts note it, and are used from other directories, too
    trim_heap()  # returns the memory of casting and decoding to the system
    loaded = replace(wrap_model(model, tokenizer, name), rounding=rounding)
    stop_ids = loaded.stop_ids | (end_ids(tokenizer) if gguf_of(name) is not None else set())
    model.generation_config.eos_token_id = sorted(stop_ids) or None  # for `model.generate`, too
    return loaded


def require_loaded(loaded: object) -> None:
    """Raise ConfigError for anything that `load_model` did not return."""
    if not isinstance(loaded, LoadedModel):
        kind = type(loaded).__name__
        raise ConfigError(f"the model is what `load_model` returned, got a {kind}; give that, not its name or .model")


def _require_device(device: str) -> None:
    """Raise ConfigError, before anything is loaded, for a device that is unknown or does not exist."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be cpu or cuda, got {device!r}") from error
    if wanted.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no CUDA device, or torch is a build without CUDA; leave out the device to load the model "
            "on the CPU"
        )
    if (wanted.index or 0) >= (there := torch.cuda.device_count()):
        raise ConfigError(f"this machine has no {wanted}; the last of its CUDA devices is cuda:{there - 1}")


def require_dtype_and_rounding(dtype: str, weights: str | None) -> Rounding | None:
    """Return the format that `load_model` rounds weights to. Raises ConfigError for an unknown dtype or rounding."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return None if weights is None else rounding_named(weights)


def dtype_for(device: str, name: str | None, dtype: str, weights: str | None = None) -> str:
    """Return the dtype that `auto` stands for: that of the model's files if the device multiplies it fast, or float32.

    A GPU does so with all 16-bit ones, a CPU with bfloat16 if it has instructions for that. For weights in fewer bits,
    it is bfloat16. The demo model is always in float32. device: cpu or cuda. The other arguments are those of
    `load_model`. Raises ModelError if there is no config.
    """
    if dtype != AUTO:
        return dtype
    fast = set(DTYPES) if device != "cpu" else {"bfloat16"} if multiplies_bfloat16() else set[str]()
    name = model_name(name)
    if name == DEMO_MODEL or not fast:
        return "float32"
    if weights is not None or gguf_of(name) is not None:
        return "bfloat16"
    config = read_config(name)
    own = torch.bfloat16 if has_low_bit_weights(config, weights) else config.dtype
    return next((known for known in fast if DTYPES[known] == own), "float32")


def read_config(name: str | None, dtype: str = "float32") -> Any:
    """Return the `transformers` config of a model that `load_model` takes, without reading weights.

    The config of a GGUF file that is not converted yet has the `dtype` None. Raises ModelError if there is no config.
    """
    name = model_name(name)
    try:
        if (gguf := _to_convert(name, DTYPES[dtype])) is not None:
            return config_of(gguf)
        return text_config(_whole_config(source_of(name, DTYPES[dtype])))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} has no config that can be read: {first_line(error)}") from error


def is_to_be_converted(name: str | None, dtype: str) -> bool:
    """Whether `load_model` would have to convert a GGUF file first."""
    return _to_convert(model_name(name), DTYPES[dtype]) is not None


def _to_convert(name: str, dtype: torch.dtype) -> Path | None:
    gguf = gguf_of(name)
    return gguf if gguf is not None and find_converted(gguf, dtype) is None else None


def _whole_config(source: str) -> Any:
    """Return the config, that of a whole model with vision included.

    A family that `transformers` does not know is refused here by name: `transformers` would ask to run the checkpoint's
    own code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__

    given, _ = PreTrainedConfig.get_config_dict(source)
    if isinstance(given, dict) and (family := given.get("model_type")) and family not in CONFIG_MAPPING:
        if family not in FAMILIES:
            raise unsupported(family)
        raise ModelError(f"model family {family!r} is not in transformers {__version__}; install a newer one")
    for part in (given, given.get("text_config")) if isinstance(given, dict) else ():
        _require_known_dtype(part)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    quantized, of_experts = getattr(config, "quantization_config", None), getattr(config, "expert_dtype", None)
    if isinstance(quantized, dict) and of_experts is not None:  # newer transformers put it there
        config.quantization_config = {"expert_dtype": of_experts, **quantized}
    if isinstance(getattr(config, "quantization", None), dict):  # of MLX, which may write it under both names
        config.quantization_config = {"quant_method": "mlx", **config.quantization}
    return config


def _require_known_dtype(given: Any) -> None:
    for key in ("dtype", "torch_dtype"):
        named = given.get(key) if isinstance(given, dict) else None
        if isinstance(named, str) and not isinstance(getattr(torch, named, None), torch.dtype):
            raise ModelError(
                f"its config.json has {key} {named!r}, which is no dtype; write one of {', '.join(DTYPES)}"
            )


def _require_dtype(config: Any, dtype: str) -> None:
    """Refuse, before weights are loaded, a dtype that `transformers` would give to only some of them."""
    if config.model_type == "deepseek_v4" and dtype == "float16":
        raise ModelError(
            "some of its weights would be in float32 and the others in float16, and neither csattn nor transformers "
            "multiplies the two; load it in bfloat16 or float32"
        )


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of a directory or hub id. Raises ModelError if it is missing or damaged."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, clean_up_tokenization_spaces=False)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processors_template(source, tokenizer)
        return tokenizer
    except MemoryError:
        raise
    except Exception as error:  # for damaged or missing files, libraries raise errors of any class
        raise ModelError(
            f"its tokenizer could not be read: {first_line(error)}; put tokenizer.json and tokenizer_config.json "
            "there or, if it has only a tokenizer.model, install sentencepiece (a checkpoint's own code is not run)"
        ) from error


def _processors_template(source: str, tokenizer: Any) -> str | None:
    """Return the chat template beside the tokenizer of a model that sees images; None if it writes no plain texts."""
    from transformers.utils import cached_file

    if (found := cached_file(source, "chat_template.json", _raise_exceptions_for_missing_entries=False)) is None:
        return None
    template: str = json.loads(Path(found).read_text())["chat_template"]
    with suppress(Exception):  # a template's own
        chat = [{"role": "user", "content": "⟨text⟩"}]
        written = tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        return template if "⟨text⟩" in written else None
    return None


def are_copied(config: Any, dtype: str, weights: str | None = None) -> bool:
    """Whether weights in memory are copies, decoded or cast, instead of memory maps of their files.

    If the config does not name the dtype of the files, weights count as mapped, so that nothing is refused for it.
    """
    return has_low_bit_weights(config, weights) or getattr(config, "dtype", None) not in (None, DTYPES[dtype])


def has_low_bit_weights(config: Any, weights: str | None) -> bool:
    """Whether weights are quantized, as published or by rounding: quantized weights are not rounded again."""
    return weights is not None or getattr(config, "quantization_config", None) is not None


def require_unrounded(config: Any, weights: str | None) -> None:
    """Raise ModelError for weights that are quantized already and are to be rounded."""
    if weights is not None and getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"its weights are already published in 8 or 4 bits; load it without rounding them to {weights}"
        )


def wrap_model(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Identify a model that is already in memory.

    Raises ModelError if its family is not supported, or if an adapter wraps its layers.
    """
    if any(".base_layer." in parameter for parameter, _ in model.named_parameters()):
        raise ModelError(f"{name} has an adapter in its layers, {MERGE}")
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        geometry=geometry_of(describe(model.config)),
        fingerprint=fingerprint_of(model),
    )
    drop_stale_quantized(model)
    return loaded


def _load_whole(source: str, config: Any, dtype: torch.dtype, weights: Rounding | None, is_part: bool) -> Any:
    """Load the model of a directory or hub id: decode quantized weights, or round weights if asked to.

    is_part: it is the text model of a vision-language model. Raises ModelError for a tensor that is missing, unexpected
    or of another shape: `transformers` would go on with random numbers in its place.
    """
    from transformers import GenerationConfig

    how: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "key_mapping": TEXT_MODEL_AT if is_part else None,
    }
    folder, quantized = Path(source), dict[str, QuantizedWeight]()
    with without_reports():
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None and not folder.is_dir():
            folder = Path(fetched(source))
        if folder.is_dir():
            require_weights(folder, is_quantized=quantization is not None)
        if quantization is None:
            store_decoded = None if weights is None else _decoded_store(config, dtype, weights)
            with _joined_to_files(store_decoded):
                model, found = class_of(config).from_pretrained(source, **how)
            require_plain(found)
        else:
            require_unrounded(config, weights)
            is_deepseek = config.model_type == "deepseek_v4"
            named = named_if_text if is_part or is_deepseek else str
            store_decoded = _decoded_store(config, dtype)
            state, quantized = read_state(folder, quantization, dtype, named, store_decoded)
            in_model = deepseek_files.in_model if is_deepseek else named_as_text
            quantized = {in_model(name): kept for name, kept in quantized.items()}
            del config.quantization_config
            with _joined_to_files(store_decoded):
                model, found = class_of(config).from_pretrained(None, state_dict=state, **how | {"key_mapping": None})
            # AutoGPTQ writes biases of zeros that models do not have
            zeros = {x for x, tensor in state.items() if x.endswith(".bias") and not tensor.any()}
            found["unexpected_keys"] = set(found["unexpected_keys"]) - zeros
        if (folder / "generation_config.json").is_file():  # `transformers` ignores a damaged one
            model.generation_config = GenerationConfig.from_pretrained(folder)
    require_whole(found, is_part)
    # a session is the cache; models saved in training have it switched off
    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = None
    attach_quantized(model, quantized)
    if weights is not None:
        round_weights(model, weights, store_decoded)
    return model


def _decoded_store(
    config: Any, dtype: torch.dtype, weights: Rounding | None = None
) -> Callable[[Tensor], Tensor] | None:
    """How to store the decoded weights of quantized matrices; None: in memory.

    `to_mapped_file`, in files, if steps read the quantized ones (models in bfloat16) and the disk has room.
    """
    is_seldom_read = dtype == torch.bfloat16
    return to_mapped_file if is_seldom_read and weight_bytes(config, dtype.itemsize, weights).mapped else None


def _joined_to_files(store_decoded: Callable[[Tensor], Tensor] | None) -> AbstractContextManager[Any]:
    """While open, the experts' matrices that `transformers` joins go into files as well, if decoded weights do."""
    return nullcontext() if store_decoded is None else ResultsToFiles(torch.stack, torch.cat)
