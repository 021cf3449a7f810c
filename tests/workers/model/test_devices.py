"""A process that waits too long for other devices ends itself: torch would wait for very long, holding the GIL."""

import io
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from csattn.models.quantized_model import round_weights
from csattn.models.quantized_weight import Rounding
from csattn.models.weights import Linear
from csattn.share import Share
from offload.budget import AvailableMemory
from offload.errors import NoDeviceError
from tests.tiny import byte_tokenizer, loaded, make_model
from workers.engine.gpu import step_model
from workers.engine.gpu.step_model import handed_share
from workers.model import devices, take_weights
from workers.model.deadline import ends_within
from workers.model.devices import Devices, _Pickler, _Unpickler, require_device, require_devices

ALONE = """
import torch; from pathlib import Path
from csattn.share import Share; from workers.model import devices
devices.MEET_S = 0.5
devices.Devices(Share(0, 2), torch.device("cpu"), Path({meeting!r}))
"""
LOCKED = """
import ctypes; from workers.model.deadline import ends_within
with ends_within(0.5, "another device has not reached"):
    ctypes.PyDLL(None).sleep(600)  # with Python's lock
"""


@pytest.mark.parametrize("code", [ALONE, LOCKED])
def test_a_process_that_waits_too_long_for_others_kills_itself_with_a_message(tmp_path: Path, code: str) -> None:
    command = [sys.executable, "-c", code.format(meeting=str(tmp_path / "meeting"))]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert "another device has not reached" in done.stderr and "ends: start it again" in done.stderr


def test_tensors_that_share_memory_are_sent_once_and_still_share_it_when_received() -> None:
    both = torch.arange(24, dtype=torch.bfloat16).view(2, 6, 2)
    sent = Linear(both[0], torch.ones(3)), *both.chunk(2, dim=1), both, torch.empty(0), None
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(sent)
    assert sorted(memory.nbytes for memory in pickler.memories) == [0, 12, 48]
    waiting = iter(pickler.memories)
    got = _Unpickler(io.BytesIO(file.getvalue()), lambda size: next(waiting).clone()).load()
    assert torch.equal(got[0].weight, both[0]) and torch.equal(got[0].bias, torch.ones(3))
    for there, here in zip(got[1:5], sent[1:5], strict=True):
        assert torch.equal(there, here) and there.stride() == here.stride()
    assert got[2].data_ptr() - got[1].data_ptr() == got[1][0].nbytes and got[3].data_ptr() == got[1].data_ptr()
    assert got[1].data_ptr() != both.data_ptr() and got[5] is None


@pytest.mark.parametrize("family", ["llama", "qwen2_moe", "glm4_moe", "gpt_oss", "granite"])
@pytest.mark.parametrize(("num_devices", "vocab_size"), [(2, 256), (4, 513)])
def test_a_share_takes_no_more_memory_than_predicted(family: str, num_devices: int, vocab_size: int) -> None:
    sizes = {"vocab_size": vocab_size, "num_key_value_heads": 4}
    require_predicted_bytes(wrap_model(make_model(family, **sizes), byte_tokenizer(), family), num_devices)


@pytest.mark.parametrize(
    ("family", "rounding", "sizes"),
    [
        ("qwen3_moe", "fp8", {"moe_intermediate_size": 384}),  # half of it ends within a run
        ("qwen3_moe", "int4", {"moe_intermediate_size": 256}),
        ("llama", "fp8", {"intermediate_size": 640}),
    ],
)
def test_a_share_of_quantized_weights_takes_no_more_memory_than_predicted(
    family: str, rounding: Rounding, sizes: dict[str, int]
) -> None:
    whole = make_model(family, head_dim=64, initializer_range=0.1, dtype=torch.bfloat16, **sizes)
    round_weights(whole, rounding)
    require_predicted_bytes(wrap_model(whole, byte_tokenizer(), family), 2)


def require_predicted_bytes(model: LoadedModel, num_devices: int) -> None:
    """Check that a share takes at most the predicted bytes, and at most one float32 vocabulary matrix less."""
    said, config = handed_share(model, num_devices).num_bytes, model.model.config
    for rank in range(num_devices):
        pickler = _Pickler(io.BytesIO())
        pickler.dump(take_weights(model.model, "cpu", share=Share(rank, num_devices)))
        held = sum(memory.nbytes for memory in pickler.memories)
        assert held <= said <= held + 4 * config.vocab_size * config.hidden_size


def test_host_memory_is_divided_among_devices_before_and_after_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    have = AvailableMemory(device_bytes=70, host_bytes=90)
    monkeypatch.setattr(step_model, "available_memory", lambda device: have)
    share = handed_share(loaded("llama"), 3)
    assert share.available(torch.device("cpu")) == AvailableMemory(device_bytes=70, host_bytes=30)
    least = cast(Devices, SimpleNamespace(least=lambda number: number - 60))
    met = replace(share, devices=least)
    assert met.available(torch.device("cpu")) == AvailableMemory(device_bytes=10, host_bytes=10)


def test_a_deadline_does_nothing_to_work_that_finishes_in_time() -> None:
    with ends_within(0.3, "too late"):
        pass
    with pytest.raises(ValueError, match="as it was"), ends_within(0.3, "too late"):
        raise ValueError("as it was")
    time.sleep(0.5)


def test_a_second_start_with_several_gpus_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(2)
    monkeypatch.setattr(Devices, "_have_met", True)
    with pytest.raises(ConfigError, match=r"computed with several GPUs already, .* once; start another"):
        require_devices(2)


@pytest.mark.parametrize(
    ("capability", "hip", "says"),
    [
        ((7, 5), None, r"need compute capability 8.0 or more, and It has 7.5; .* to decode on the CPU"),
        ((9, 4), "7.0", "need CUDA, and It is an AMD GPU; decode on another GPU"),
        ((8, 0), None, None),
        ((12, 0), None, None),
    ],
)
def test_a_gpu_below_compute_capability_8_or_without_cuda_is_refused(
    capability: tuple[int, int], hip: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    major, minor = capability
    it = SimpleNamespace(name="It", major=major, minor=minor)
    monkeypatch.setattr(devices, "find_spec", lambda name: "there is CuPy")
    for name, said in {"is_available": True, "current_device": 0, "get_device_properties": it}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, said=said: said)
    if says is None:
        require_device()
        return
    with pytest.raises(NoDeviceError, match=says):
        require_device()
