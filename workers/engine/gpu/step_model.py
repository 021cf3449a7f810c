"""What an engine on a GPU knows of its model: all of it, or one device's share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from csattn.artifact import Artifact, ModelGeometry
from csattn.artifact.share import ArtifactShare
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.models.module_weights import weights_of
from csattn.models.share import padding_bytes, replicated_params, share_of_spec
from csattn.models.spec import ModelSpec
from csattn.models.weight_sizes import device_bytes
from csattn.models.weights import ModelWeights
from csattn.share import Share
from offload.budget import AvailableMemory, available_memory
from workers.model import take_weights
from workers.model.devices import Devices


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """What steps need of a model. It is small, except for what `take` references."""

    name: str
    fingerprint: str
    geometry: ModelGeometry  # of the whole
    tokenizer_hash: str
    spec: ModelSpec
    dtype: torch.dtype
    num_bytes: int  # device memory that its weights will take, in addition to what they take already
    take: Callable[[torch.device], ModelWeights]  # moves the weights to the device
    devices: Devices | None = None  # that have the other shares
    num_shares: int = 1  # of the model; known before the devices are connected
    is_quantized: bool = False  # some of its weights are

    def open(self, artifact: Artifact) -> Artifact:
        """Return what this share reads of an artifact."""
        return artifact if self.devices is None else ArtifactShare(artifact, self.devices.share)

    def available(self, device: torch.device) -> AvailableMemory:
        """Return the memory that is free for one share: the least of all devices, and an equal part of the host's."""
        found = available_memory(device)
        device_bytes, host_bytes = found.device_bytes, found.host_bytes
        if self.devices is not None:
            device_bytes, host_bytes = self.devices.least(device_bytes), self.devices.least(host_bytes)
        return AvailableMemory(device_bytes=device_bytes, host_bytes=host_bytes // self.num_shares)


def step_model(loaded: LoadedModel) -> StepModel:
    spec, num_bytes = describe(loaded.model.config), device_bytes(loaded.model)
    return StepModel(
        name=loaded.name,
        fingerprint=loaded.fingerprint,
        geometry=loaded.geometry,
        tokenizer_hash=loaded.tokenizer_hash,
        spec=spec,
        dtype=loaded.dtype,
        num_bytes=num_bytes if loaded.device.type == "cpu" else 0,
        take=partial(take_weights, loaded.model),
        is_quantized=any(hasattr(module, "quantized") for module in loaded.model.modules()),
    )


def handed_share(loaded: LoadedModel, num_devices: int) -> StepModel:
    """Return one device's share of the model, without weights: the process that has the model sends them."""
    whole = step_model(loaded)
    num_bytes = whole.num_bytes // num_devices + replicated_params(whole.spec, num_devices) * whole.dtype.itemsize
    num_bytes += padding_bytes(weights_of(loaded.model), num_devices)
    spec = share_of_spec(whole.spec, num_devices)
    return replace(whole, spec=spec, num_bytes=num_bytes, take=_not_here, num_shares=num_devices)


def first_share(handed: StepModel, loaded: LoadedModel, devices: Devices) -> StepModel:
    """Return the first device's share: its `take` also sends the others their weights. handed: from `handed_share`."""
    num_devices = devices.share.num_devices

    def take(device: torch.device) -> ModelWeights:
        for rank in range(1, num_devices):
            devices.send(take_weights(loaded.model, "cpu", share=Share(rank, num_devices)), rank)
        return take_weights(loaded.model, device, share=devices.share)

    return replace(handed, take=take, devices=devices)


def _not_here(device: torch.device) -> ModelWeights:
    raise AssertionError("another process has the weights")
