"""A store shared by services of several models: each lists as ready what it can answer from, and changes nothing."""

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from csattn.artifact import Artifact
from csattn.artifact.layout import file_layout, index_file, state_file
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from tests.tiny import byte_tokenizer, loaded, make_model
from tests.workers.serving.artifacts import build, text_of
from tests.workers.serving.full_engine import FullEngine
from tests.workers.serving.test_local import answer, ask, settings_of, until
from workers.serving import examiner, residency, resident
from workers.serving.context_file import FILE_NAME, ContextFile
from workers.serving.contexts import name_artifact
from workers.serving.local import LocalBackend
from workers.serving.messages import ContextInfo, ContextNotReadyError

TEXT = text_of("heron")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    name_artifact(tmp_path, "heron", build(tmp_path, TEXT), "float32")
    return tmp_path


@pytest.fixture(scope="module")
def other() -> LoadedModel:
    """A model of the same shape, with other weights."""
    return wrap_model(make_model(seed=1), byte_tokenizer(), "another")


def backend_of(store: Path, model: LoadedModel) -> LocalBackend:
    return LocalBackend(FullEngine(model), model, settings_of(store))


async def only(backend: LocalBackend) -> ContextInfo:
    (info,) = await backend.contexts()
    return info


def test_a_context_built_with_another_model_is_reported_as_failed(store: Path, other: LoadedModel, monkeypatch) -> None:
    opened: Counter[Path] = Counter()
    real = examiner.open_artifact

    def count(path: Path):
        opened[path] += 1
        return real(path)

    async def main() -> None:
        before = (store / FILE_NAME).read_bytes()
        async with backend_of(store, other) as theirs, backend_of(store, loaded()) as ours:
            assert (await only(ours)).state == "ready"
            with monkeypatch.context() as patch:
                patch.setattr(examiner, "open_artifact", count)
                for _ in range(3):
                    info = await only(theirs)
                    assert info.state == "failed" and "tiny-llama" in info.what and "built with" in info.what
                assert (await theirs.register("heron", TEXT)).state == "failed"
                assert list(opened.values()) == [1], "a poll does not read what is known"
            with pytest.raises(ContextNotReadyError) as refused:
                await answer(theirs, ask("heron"))
            assert "'heron' cannot be used" in str(refused.value) and str(store) not in str(refused.value)
            told = refused.value.detail
            assert str(store) in told and "--weights" in told and str(store) not in info.what, "only the log says where"
            assert info.what.endswith("; only the service's operator can mend that")
            assert (await answer(ours, ask("heron")))[1].reason == "length"
            assert (store / FILE_NAME).read_bytes() == before

    asyncio.run(main())


def test_prompts_pass_over_contexts_of_another_model_without_touching_the_disk(
    store: Path, other: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (path for path in store.iterdir() if (path / "manifest.json").exists())
    examines = examiner.Examiner(other)
    first = examines.recall(path)
    assert first.is_foreign and not first.is_lost
    monkeypatch.setattr(examiner, "_stamp", lambda path: pytest.fail("its files are looked at again"))
    assert examines.recall(path) is first


def test_asking_for_one_context_does_not_examine_the_others(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_artifact(store, "otter", build(store, text_of("otter")), "float32")
    looked: list[Path] = []
    real = examiner.Examiner.examine

    def examine(self: examiner.Examiner, path: Path) -> examiner.Examination:
        looked.append(path)
        return real(self, path)

    monkeypatch.setattr(examiner.Examiner, "examine", examine)

    async def main() -> None:
        async with backend_of(store, loaded()) as backend:
            assert [info.name for info in await backend.contexts()] == ["heron", "otter"]
            looked.clear()
            (info,) = await backend.contexts("otter")
            assert info.name == "otter" and await backend.contexts("none") == []
            await backend.delete("otter")
            assert {path.name for path in looked} == {info.artifact_id}

    asyncio.run(main())


def test_a_missing_artifact_that_returns_is_ready_again(store: Path) -> None:
    async def main() -> None:
        (artifact,) = (path for path in store.iterdir() if (path / "manifest.json").exists())
        away = shutil.move(artifact, store / "away")
        async with backend_of(store, loaded()) as backend:
            info = await only(backend)
            assert info.state == "failed" and "there is no artifact" in info.what
            told = [info.what]
            remedy = "; DELETE /v1/contexts/heron, then POST /v1/contexts builds one of that name from a text"
            assert told[0].endswith(remedy)
            built = replace(ContextFile(store).read()["heron"], text_sha256="0" * 64)
            ContextFile(store).change(lambda records: records.update(heron=built))
            told.append((await only(backend)).what)
            assert told[1].endswith("; send its text again with POST /v1/contexts, and it is built again")
            with pytest.raises(ContextNotReadyError, match="GET /v1/contexts/heron says what to do") as refused:
                await answer(backend, ask("heron"))
            assert "STORE/ID" in refused.value.detail and "STORE" not in "".join((*told, refused.value.message))
            shutil.move(away, artifact)
            assert (await only(backend)).state == "ready"

    asyncio.run(main())


def test_a_truncated_file_is_reported_until_it_is_restored(store: Path) -> None:
    index = next(store.glob("*/layer-001.index.safetensors"))
    whole = index.read_bytes()
    index.chmod(0o644)

    async def main() -> None:
        async with backend_of(store, loaded()) as backend:
            assert (await only(backend)).state == "ready"
            index.write_bytes(whole[:-1])
            info = await only(backend)
            assert info.state == "failed" and f"{index.name} has" in info.what
            index.write_bytes(whole)
            assert (await only(backend)).state == "ready"

    asyncio.run(main())


class Copying(FullEngine):
    """Copies contexts out of their files, so that a file that loses bytes kills no process."""

    def add_context(self, context_id, artifact, meanwhile=lambda: None):
        super().add_context(context_id, artifact, meanwhile)
        self.contexts[context_id] = [layer.copy() for layer in self.contexts[context_id]]


def test_a_truncated_loaded_context_is_refused_before_any_row_is_read(store: Path, monkeypatch) -> None:
    """Its rows are memory-mapped: reading a lost one would kill the process. A running request does not keep the
    context for others, and a repaired one is loaded anew, because its bytes may lie in other files."""
    monkeypatch.setattr(residency, "_CHECK_S", 0.0)
    rows = next(store.glob("*/layer-001.kv.safetensors"))
    whole = rows.read_bytes()
    rows.chmod(0o644)

    async def main() -> None:
        engine = Copying(loaded())
        async with LocalBackend(engine, loaded(), settings_of(store)) as backend:
            want = await answer(backend, ask("heron"))
            going = backend.generate(ask("heron", max_new_tokens=200))
            await anext(going)
            rows.write_bytes(whole[:1000])
            for _ in range(2):
                with pytest.raises(ContextNotReadyError) as refused:
                    await answer(backend, ask("heron"))
                assert f"{rows.name} has" in refused.value.detail
            assert (await only(backend)).state == "failed"
            rows.write_bytes(whole)
            with pytest.raises(ContextNotReadyError) as refused:
                await answer(backend, ask("heron"))
            assert f"{rows.name} has" in refused.value.detail
            await going.aclose()
            await until(lambda: not engine.contexts)
            assert await answer(backend, ask("heron")) == want

    asyncio.run(main())


def test_a_loaded_context_stays_usable_while_its_path_is_missing(store: Path, monkeypatch) -> None:
    """A mapped file stays readable after its path is gone."""
    monkeypatch.setattr(residency, "_CHECK_S", 0.0)
    rows = next(store.glob("*/layer-001.kv.safetensors"))

    async def main() -> None:
        async with LocalBackend(FullEngine(loaded()), loaded(), settings_of(store)) as backend:
            want = await answer(backend, ask("heron"))
            place = rows.parent
            place.rename(store / "elsewhere")
            moved = backend._residency._residents[place]
            assert resident.lost_bytes(moved.files) == ""
            (store / "elsewhere").rename(place)
            assert await answer(backend, ask("heron")) == want and backend._residency._residents[place] is moved

    asyncio.run(main())


def test_damage_found_on_load_is_reported_until_the_file_changes(store: Path, monkeypatch) -> None:
    """File sizes do not show the damage: the index holds NaN."""
    index = next(store.glob("*/layer-001.index.safetensors"))
    whole = index.read_bytes()
    header_len = int.from_bytes(whole[:8], "little")
    start, stop = json.loads(whole[8 : 8 + header_len])["key_mean"]["data_offsets"]
    damaged = bytearray(whole)
    damaged[8 + header_len + start : 8 + header_len + stop] = b"\xff" * (stop - start)
    index.chmod(0o644)
    index.write_bytes(damaged)
    loads, real = [], examiner.Examiner.require_sound

    def count(self: examiner.Examiner, artifact: Artifact) -> None:
        loads.append(artifact)
        real(self, artifact)

    monkeypatch.setattr(examiner.Examiner, "require_sound", count)

    async def main() -> None:
        async with backend_of(store, loaded()) as backend:
            assert (await only(backend)).state == "ready", "nobody has read it yet"
            for _ in range(2):
                with pytest.raises(ContextNotReadyError) as refused:
                    await answer(backend, ask("heron"))
                assert "key_mean holds NaN" in refused.value.detail
                info = await only(backend)
                assert info.state == "failed" and "key_mean holds NaN" in info.what
                assert info.what.endswith("; only the service's operator can mend that")
            assert len(loads) == 1
            index.write_bytes(whole)
            assert (await only(backend)).state == "ready"
            await answer(backend, ask("heron"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("file", "name"), [(state_file(0), "memory"), (state_file(2), "conv"), (index_file(3), "next_query_scale")]
)
def test_states_and_scales_with_nan_are_refused(tmp_path: Path, file: str, name: str) -> None:
    """In a model with linear attention, they would spoil every answer."""
    model = loaded("qwen3_5_text")
    path = tmp_path / build(tmp_path, text_of("heron"), model=model)
    found = examiner.Examiner(model)
    with found.open(path) as artifact:
        found.require_sound(artifact)
        [(spec, offset)] = [of for of in file_layout(artifact.spec, file).tensors if of[0].name == name]
    (path / file).chmod(0o644)
    np.memmap(path / file, np.float32, "r+", offset, spec.shape)[...] = np.nan
    with (
        found.open(path) as artifact,
        pytest.raises(ContextNotReadyError, match="holds NaN"),
    ):
        found.require_sound(artifact)
    assert "holds NaN" in found.examine(path).fault
