"""Weights in unlinked memory-mapped files have the same values and take no anonymous memory."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from csattn.models import load_model, mapped_files
from csattn.models.mapped_files import ResultsToFiles, has_disk_space, to_mapped_file
from csattn.models.quantized import read_state
from csattn.models.quantized_model import drop_stale_quantized, experts_of_layers, round_weights
from tests.models.gguf_files import gguf_of, write_gguf
from tests.models.quantized_files import in_mxfp4, quantize
from tests.tiny import make_model, save


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped_files, "_MIN_BYTES", 1)
    monkeypatch.setattr(mapped_files, "_IN_MEMORY", set())  # temporary directories may be in memory
    return tmp_path / "cache"


def is_mapped(tensor: Tensor, cache: Path) -> bool:
    """Whether a tensor's data is mapped from an unlinked file in the cache directory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(cache) in line and line.endswith("(deleted)")
    return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
@pytest.mark.parametrize("shape", [(5, 7), (1,), (3, 1, 4099)])
def test_a_mapped_tensor_has_equal_values_and_is_writable(
    dtype: torch.dtype, shape: tuple[int, ...], cache: Path
) -> None:
    here = torch.randn(shape).mul(100).to(dtype)
    there = to_mapped_file(here.T.contiguous().T if here.ndim == 2 else here)  # also if not contiguous
    assert is_mapped(there, cache) and not is_mapped(here, cache) and not list(cache.iterdir())
    assert torch.equal(there, here) and there.dtype == dtype and there.is_contiguous()
    there += 1
    assert torch.equal(there, here + 1)


def test_a_tensor_stays_in_memory_if_no_file_can_be_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.arange(40)
    assert is_mapped(to_mapped_file(here), cache)

    class Full:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as of_test:
        of_test.setattr("tempfile.TemporaryFile", lambda **_: Full())
        assert to_mapped_file(here) is here
    with monkeypatch.context() as of_test:
        of_test.setattr(mapped_files, "_MIN_BYTES", here.nbytes + 1)
        assert to_mapped_file(here) is here
    nowhere = cache / "file"
    nowhere.write_text("no directory")
    monkeypatch.setenv("CSATTN_CACHE", str(nowhere))
    assert to_mapped_file(here) is here


def test_short_writes_are_continued(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = mapped_files.tempfile.TemporaryFile

    def short(**how: Any) -> Any:
        file = make(**how)
        whole = file.write

        class Short:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def write(self, data: memoryview) -> int:
                return int(whole(data[:100]))

            def fileno(self) -> int:
                return int(file.fileno())

        return Short()

    monkeypatch.setattr("tempfile.TemporaryFile", short)
    here = torch.randn(333)
    assert is_mapped(there := to_mapped_file(here), cache) and torch.equal(there, here)


@pytest.mark.parametrize(("free", "has_room"), [(None, False), (199, False), (200, True)])
def test_disk_space_counts_only_if_half_stays_free(
    free: int | None, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "available_bytes", lambda path: free)
    assert has_disk_space(100) == has_room


def test_an_unwritable_cache_has_no_disk_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_disk_space(1)
    cache.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != cache or not mode & os.W_OK)  # for root, too
    assert not has_disk_space(1)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system in memory is known here")
def test_a_cache_in_tmpfs_has_no_disk_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSATTN_CACHE", "/dev/shm/csattn")
    assert has_disk_space(1)
    monkeypatch.setattr(mapped_files, "_IN_MEMORY", {"tmpfs"})
    assert not has_disk_space(1)


def test_casts_inside_results_to_files_are_mapped(cache: Path) -> None:
    here = torch.randn(6, 8)
    with ResultsToFiles(Tensor.to):
        cast, added, module = here.to(torch.bfloat16), here + 1, torch.nn.Linear(3, 2).to(torch.bfloat16)
        with pytest.raises(RuntimeError):
            here.to("no device")
    assert is_mapped(cast, cache) and torch.equal(cast, here.bfloat16())
    assert not is_mapped(added, cache) and module.weight.dtype == torch.bfloat16
    assert not is_mapped(here.to(torch.bfloat16), cache)


@pytest.mark.parametrize("how", ["rounded", "published"])
def test_decoded_weights_are_mapped_if_matrix_products_read_the_quantized_ones(
    how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    folder, given = tmp_path / "plain", {"weights": "int4"} if how == "rounded" else {}
    save(folder, "llama")
    if how == "published":
        quantize(folder, tmp_path / "quantized", "gptq", rng)
        folder = tmp_path / "quantized"
    loaded = load_model(folder, "bfloat16", **given)
    coded = {name: x.weight for name, x in loaded.model.named_modules() if hasattr(x, "quantized")}
    assert coded and all(is_mapped(weight, cache) for weight in coded.values())
    others = [x for name, x in loaded.model.named_parameters() if name.removesuffix(".weight") not in coded]
    assert not any(is_mapped(parameter, cache) for parameter in others)
    wide = load_model(folder, **given)
    assert not any(is_mapped(parameter, cache) for parameter in wide.model.parameters())
    monkeypatch.setattr("csattn.models.weight_sizes.has_disk_space", lambda num_bytes: False)
    full = load_model(folder, "bfloat16", **given)
    assert not any(is_mapped(parameter, cache) for parameter in full.model.parameters())
    assert full.fingerprint == loaded.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(full.model.parameters(), loaded.model.parameters(), strict=True))
    down = loaded.model.model.layers[0].mlp.down_proj
    down.weight.data[::2] += 1
    assert torch.equal(down.weight[::2], full.model.model.layers[0].mlp.down_proj.weight[::2] + 1)


@pytest.mark.parametrize(("family", "how"), [("gpt_oss", "mxfp4"), ("mixtral", "awq"), ("mixtral", "int4")])
def test_decoded_experts_are_mapped_for_every_checkpoint_layout(
    family: str, how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Experts come in one tensor, or as one matrix each: then a layer's matrices share a file until they are joined."""
    folder, given = tmp_path / "quantized", {"weights": how} if how == "int4" else {}
    plain = save(tmp_path / "plain", family, **({"intermediate_size": 96} if family == "gpt_oss" else {}))
    if how == "mxfp4":
        in_mxfp4(plain, folder, rng)
    elif how == "awq":
        quantize(plain, folder, "awq", rng)
    loaded = load_model(plain if given else folder, "bfloat16", **given)
    modules = [module for _, module, _ in experts_of_layers(loaded.model)]
    assert all(hasattr(module, "quantized") for module in modules)
    assert all(is_mapped(x, cache) for module in modules for x in (module.gate_up_proj, module.down_proj))
    monkeypatch.setattr("csattn.models.weight_sizes.has_disk_space", lambda num_bytes: False)
    full = load_model(plain if given else folder, "bfloat16", **given)
    assert not any(is_mapped(parameter, cache) for parameter in full.model.parameters())
    assert full.fingerprint == loaded.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(full.model.parameters(), loaded.model.parameters(), strict=True))
    if how == "awq":
        config, made = json.loads((folder / "config.json").read_text())["quantization_config"], list[Tensor]()
        _, kept = read_state(
            folder, config, torch.bfloat16, store_decoded=lambda decoded: made.append(decoded) or decoded
        )
        layers = {name.partition(".experts.")[0] for name in kept if ".experts." in name}
        others = [name for name in kept if ".experts." not in name]
        assert len(made) == len(layers) + len(others)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_stale_quantized_experts_are_dropped_after_their_weights_change(family: str, part: str) -> None:
    model = make_model(family).bfloat16()
    round_weights(model, "int4")
    (_, module, spec), *_ = experts_of_layers(model)
    drop_stale_quantized(model)
    assert hasattr(module, "quantized")
    getattr(module, part).data[spec.num_experts - 1] += 1
    drop_stale_quantized(model)
    assert not hasattr(module, "quantized")
    assert all(hasattr(x, "quantized") for _, x, _ in experts_of_layers(model)[1:])
    model.float()
    drop_stale_quantized(model)
    assert not any(hasattr(x, "quantized") for x in model.modules())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gguf_conversion_maps_the_tensors_that_it_makes(
    dtype: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, its = gguf_of(make_model("llama"))
    file, made = write_gguf(tmp_path / "model.gguf", tensors, **its), []
    monkeypatch.setattr(
        mapped_files, "to_mapped_file", lambda tensor: made.append(tensor.nbytes) or to_mapped_file(tensor)
    )
    trims = list[None]()
    monkeypatch.setattr(mapped_files, "trim_heap", lambda: trims.append(None))
    there = load_model(file, dtype)
    assert len(trims) == len(made), "else the heap keeps what tensors were made of"
    parameters = sum(parameter.nbytes for parameter in there.model.parameters())
    assert sum(made) >= parameters, "every weight is cast once by transformers' loader"
    made.clear()
    cache.rename(tmp_path / "before")
    monkeypatch.setattr("csattn.models.gguf_file.is_converted_on_disk", lambda num_bytes: False)
    full = load_model(file, dtype)
    assert not made and full.fingerprint == there.fingerprint
