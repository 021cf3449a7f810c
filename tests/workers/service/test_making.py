"""Settings become an engine, or are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from csattn.config import SearchConfig
from csattn.errors import ConfigError
from offload.errors import NoDeviceError
from tests.tiny import loaded, save
from tests.workers.searchers.searching import Threads
from workers.capacity import context_bytes, spec_of
from workers.engine.cpu.engine import QUESTION_ROWS
from workers.searchers.worker import choose_cpus
from workers.service import making
from workers.service.making import make_backend, make_engine, make_searcher
from workers.service.ray_app import bundles
from workers.settings import BuildSettings, EngineSettings, LimitSettings, ModelSettings, RaySettings, Settings


@pytest.mark.parametrize(("num_requests", "max_rows"), [(1, QUESTION_ROWS), (QUESTION_ROWS + 4, QUESTION_ROWS + 4)])
def test_max_rows_is_at_least_question_rows(num_requests: int, max_rows: int) -> None:
    settings = Settings(
        limits=LimitSettings(max_concurrent_requests=num_requests), engine=EngineSettings(num_threads=1)
    )
    engine = make_engine(settings, loaded(), None)
    try:
        assert (engine.max_rows, engine.max_requests) == (max_rows, num_requests)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("placement", "selector", "where"),
    [
        ("device", "csattn", "where the GPU searches"),
        ("hybrid", "csattn", "where the GPU searches"),
        ("host", "full", "where nothing is searched"),
    ],
)
def test_search_workers_without_a_cpu_search_are_refused(
    placement: str, selector: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "require_device", lambda: None)
    settings = Settings(engine=EngineSettings(placement=placement, selector=selector, num_search_workers=2))
    with pytest.raises(ConfigError, match=f"num_search_workers is 2, engine.placement {placement} and .*, {where}"):
        make_backend(settings, Threads())


def test_an_unsupported_rest_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(making, "load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    settings = Settings(engine=EngineSettings(selector="quest"), search=SearchConfig(rest="sketch"))
    with pytest.raises(ConfigError, match="rest sketch works only with the selectors csattn and exact"):
        make_backend(settings, Threads())


@pytest.mark.parametrize("preset_name", ["default", "lists"])
def test_room_for_no_context_is_refused_before_the_model_is_loaded(
    preset_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    least = sum(context_bytes(spec_of(loaded().geometry, 256, "float32", preset_name)))
    settings = Settings(model=ModelSettings(name=str(save(tmp_path))), build=BuildSettings(preset=preset_name))
    with pytest.raises(ConfigError, match=rf"{least - 1:,}, and a .* takes at least {least:,} bytes .*256 tok"):
        make_backend(replace(settings, engine=EngineSettings(context_bytes=least - 1)), Threads())
    with pytest.raises(pytest.fail.Exception, match="the model is loaded"):
        make_backend(replace(settings, engine=EngineSettings(context_bytes=least)), Threads())


def test_a_selector_unsupported_on_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "require_device", lambda: None)
    with pytest.raises(ConfigError, match="selector is 'quest', but a GPU decodes with csattn or full"):
        make_backend(Settings(engine=EngineSettings(placement="hybrid", selector="quest")), Threads())


def test_more_devices_than_available_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = Settings(engine=EngineSettings(num_devices=2))
    with pytest.raises(ConfigError, match="2 GPUs were given, and the placement is cpu; choose one device"):
        make_backend(on_cpu, Threads())
    monkeypatch.setattr(making, "require_device", lambda: None)
    too_many = Settings(engine=EngineSettings(placement="hybrid", num_devices=99))
    with pytest.raises(NoDeviceError, match="99 devices were requested, and this process sees"):
        make_backend(too_many, Threads())


def test_search_workers_for_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("require_device", "require_devices"):
        monkeypatch.setattr(making, name, lambda *_: None)
    engine = EngineSettings(placement="host", num_devices=2, num_search_workers=3)
    with pytest.raises(ConfigError, match=r"num_search_workers is 3, engine\.num_devices 2: search workers"):
        make_backend(Settings(engine=engine), Threads())


@pytest.mark.parametrize(
    ("engine", "search", "message"),
    [
        ({"placement": "cpu"}, {}, "not with placement cpu and selector csattn;"),
        ({"placement": "device"}, {"lookahead": 1}, "but lookahead is 1"),
    ],
)
def test_all_where_faster_is_refused_where_it_has_no_effect(engine, search, message) -> None:
    settings = Settings(engine=EngineSettings(**engine, all_where_faster=True), search=SearchConfig(**search))
    with pytest.raises(ConfigError, match=message):
        make_backend(settings, Threads())


def test_all_where_faster_refuses_unsupported_heads_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    engine = EngineSettings(placement="device", all_where_faster=True)
    settings = Settings(engine=engine, model=ModelSettings(name=str(save(tmp_path))))
    with pytest.raises(ConfigError, match=r"this model has 4 over 2 heads of 16 in torch\.float32;"):
        make_backend(settings, Threads())


def test_all_where_faster_is_passed_to_the_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = dict[str, object]()
    monkeypatch.setattr(making, "gpu_engine", lambda *_, **options: passed.update(options))
    for is_set in (False, True):
        make_engine(Settings(engine=EngineSettings(placement="device", all_where_faster=is_set)), loaded(), None)
        assert passed["all_where_faster"] is is_set


def test_an_attention_worker_requests_all_its_devices_from_ray() -> None:
    settings = Settings(engine=EngineSettings(placement="hybrid", num_devices=4, num_threads=3))
    assert bundles(settings) == [{"CPU": 3, "GPU": 4}]


@pytest.mark.parametrize("num_attention_workers", [1, 2])
def test_search_workers_are_pinned_only_with_a_single_attention_worker(num_attention_workers: int) -> None:
    launch = Threads()
    settings = Settings(
        engine=EngineSettings(num_search_workers=1, num_threads=1),
        ray=RaySettings(num_attention_workers=num_attention_workers),
    )
    searcher = make_searcher(settings, launch)
    assert searcher is not None
    searcher.close()
    [worker] = launch.started
    assert worker.worker.spec.cpus == (choose_cpus(1) if num_attention_workers == 1 else None)
