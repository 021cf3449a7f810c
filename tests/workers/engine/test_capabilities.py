"""Every cell of docs/capabilities.md: the engine decodes as it says, or refuses with a message."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from csattn.artifact import Artifact, open_artifact
from csattn.config import ListConfig, SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from offload.codecs.formats import KvFormat
from tests import tiny
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.tiny import byte_tokenizer, make_model, token_ids
from tests.workers.engine.emulated_engine import emulate, ignore
from tests.workers.searchers.searching import Threads
from workers.engine import opening
from workers.engine.gpu import engine as gpu_engine
from workers.engine.gpu.memory import PLACEMENTS
from workers.engine.opening import open_engine
from workers.searchers.worker_searcher import WorkerSearcher
from workers.service import making
from workers.serving.step_engine import StepEngine, StepRow
from workers.settings import EngineSettings, Settings

DOCUMENT = Path(__file__).parents[3] / "docs" / "capabilities.md"
EVERYWHERE = ("cpu", "host", "hybrid", "device")
CONTEXT_LENS = 300, 260
QUESTION, NUM_STEPS = token_ids(4, seed=1).tolist(), 3
ALL = SearchConfig(keep=1.0, sink_len=2, window_len=8)
PART = replace(ALL, keep=0.2)


# used in place of a preset: families whose models choose rows by their own indexer
CHOOSING = {"latents": "deepseek_v32", "compressed": "deepseek_v4"}


@cache
def loaded(of_preset: str = "default") -> LoadedModel:
    """Return a model with heads wide enough for all codecs, or, for a key of CHOOSING, one with its own indexer."""
    if of_preset in CHOOSING:
        return tiny.loaded(CHOOSING[of_preset])
    return wrap_model(make_model(num_attention_heads=4, num_key_value_heads=2, head_dim=32), byte_tokenizer(), "wide")


@dataclass(frozen=True)
class Capability:
    """The options of an engine and its requests, except the placement."""

    preset: str = "default"
    search: dict[str, Any] = field(default_factory=dict)
    selector: str = "csattn"
    codec: str | None = None
    budget_bytes: int | None = None
    num_workers: int = 0
    num_requests: int = 1
    own_keep: float = 1.0


CAPABILITIES = {
    "preset `default`: the sketch": Capability(),
    "preset `lists`": Capability("lists"),
    "preset `paper`": Capability("paper"),
    "chosen a layer ahead": Capability(search={"lookahead": 1}),
    "searched for at every fourth token": Capability(search={"search_period": 4}),
    "the rest by moments": Capability(search={"rest": "moments"}),
    "several contexts and requests in one step": Capability(num_requests=2),
    "a request's own `keep`": Capability(own_keep=0.2),
    "KV in Q8_0": Capability(codec="q8_0"),
    "KV in Q4_0": Capability(codec="q4_0"),
    "KV in FP8": Capability(codec="fp8"),
    "full attention": Capability(selector="full"),
    "a model that keeps latents and chooses among them, several requests": Capability("latents", num_requests=2),
    "a model of compressed rows, several requests": Capability("compressed", num_requests=2),
    "search workers": Capability(num_workers=2),
    "a context partly on disk, within a budget of host memory": Capability(budget_bytes=1 << 21),
    "exact Top-K": Capability(selector="exact"),
    "exact Top-K, the rest by codes": Capability(selector="exact", search={"rest": "sketch"}),
    "other selectors over the same artifact": Capability(selector="quest"),
}
REFUSALS = {
    1: "where the GPU searches; search workers are for",
    2: "a host budget is for decoding",
    3: "a GPU decodes with",
    4: "a GPU that attends to them also scores their index keys",
    5: "on a GPU all of them are on the device",
}


def cells() -> dict[tuple[str, str], str]:
    """Return the document's cells, by capability and placement."""
    rows = re.findall(r"^\| (.+?) \|" + 4 * r" (yes|no \(\d\)) \|" + "$", DOCUMENT.read_text(), re.MULTILINE)
    return {(name, placement): said for name, *told in rows for placement, said in zip(EVERYWHERE, told, strict=True)}


def test_the_capabilities_table_has_every_cell() -> None:
    assert set(cells()) == {(name, placement) for name in CAPABILITIES for placement in EVERYWHERE}


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(emulator, monkeypatch)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(making, "require_device", ignore)
        monkeypatch.setattr(opening, "GpuEngine", partial(gpu_engine.GpuEngine, device=DEVICE))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Artifact]]]:
    """Return two contexts for each preset."""
    store = tmp_path_factory.mktemp("store")
    configs = {name: preset("default") for name in ("default", *CHOOSING)}
    for name in ("lists", "paper"):
        of_lists = preset(name)
        assert isinstance(of_lists, ListConfig)
        configs[name] = replace(of_lists, num_centroids=8, num_iterations=2)
    with ExitStack() as stack:
        yield {
            name: [
                stack.enter_context(
                    open_artifact(build_artifact(loaded(name), token_ids(n, seed=n), config, store).path)
                )
                for n in CONTEXT_LENS
            ]
            for name, config in configs.items()
        }


@contextmanager
def opened(
    artifacts: list[Artifact], placement: str, asked: Capability, like: SearchConfig = ALL
) -> Iterator[StepEngine]:
    """Open an engine and its requests. Raises ConfigError if the placement does not support the capability."""
    if asked.num_workers:
        engine = EngineSettings(placement=placement, num_search_workers=asked.num_workers)
        making._require_engine(Settings(engine=engine))
    config = replace(like, **asked.search)
    options: dict[str, Any] = {"max_requests": 2, "tail_capacity": 16, "num_threads": 2}
    if asked.num_workers:
        options["searcher"] = WorkerSearcher(asked.num_workers, launch=Threads())
    if placement != "cpu":
        options |= {"batch_sizes": (1, 2), "num_contexts": 2, "max_context_len": max(CONTEXT_LENS)}
    codec = None if asked.codec is None else KvFormat.parse(asked.codec)
    where = {"placement": placement, "kv_format": codec, "host_budget_bytes": asked.budget_bytes}
    with open_engine(loaded(asked.preset), artifacts[0], config, asked.selector, **where, **options) as engine:
        if asked.num_requests > 1:
            engine.add_context(1, artifacts[1])
        for request_slot in range(asked.num_requests):
            engine.open(
                request_slot, request_slot, replace(config, keep=min(config.keep, asked.own_keep)), asked.selector
            )
        yield engine


def decoded(engine: StepEngine, num_requests: int) -> np.ndarray:
    """Return the logits after each request's question, then after its greedy tokens: [steps, requests, vocab_size]."""
    tokens = [[token] * num_requests for token in QUESTION]
    logits = []
    for step in range(len(QUESTION) + NUM_STEPS):
        of_step = tokens[step] if step < len(QUESTION) else logits[-1].argmax(-1).tolist()
        result = engine.step(
            [StepRow(request_slot, token) for request_slot, token in enumerate(of_step)], want_logits=True
        )
        assert result.logits is not None
        logits.append(result.logits.copy())
    return np.stack(logits[len(QUESTION) - 1 :])


@pytest.fixture(scope="module")
def expected_logits(artifacts: dict[str, list[Artifact]]) -> Callable[[Capability], np.ndarray]:
    """Logits on the CPU over rows in that codec: full attention's, or csattn's if the request has its own `keep`."""

    @cache
    def decode(of_preset: str, codec: str | None, num_requests: int, own_keep: float) -> np.ndarray:
        selector = "full" if own_keep == 1 else "csattn"
        asked = Capability(of_preset, selector=selector, codec=codec, num_requests=num_requests, own_keep=own_keep)
        with opened(artifacts[of_preset], "cpu", asked) as engine:
            return decoded(engine, num_requests)

    return lambda asked: decode(asked.preset, asked.codec, asked.num_requests, asked.own_keep)


def cell_parameters(cells: Iterable[tuple[str, str]]) -> list[ParameterSet]:
    """Make test parameters of cells; those of latents on a GPU are marked `large_gpu`."""
    large = [pytest.mark.large_gpu]
    return [
        pytest.param(
            name, placement, marks=large if CAPABILITIES[name].preset == "latents" and placement in PLACEMENTS else []
        )
        for name, placement in cells
    ]


@pytest.mark.parametrize(("name", "placement"), cell_parameters(product(CAPABILITIES, EVERYWHERE)))
def test_each_capability_decodes_or_is_refused_as_documented(
    artifacts, expected_logits, name: str, placement: str
) -> None:
    asked, said = CAPABILITIES[name], cells()[name, placement]
    if said != "yes":
        number = int(said[-2])
        with pytest.raises(ConfigError, match=REFUSALS[number]), opened(artifacts[asked.preset], placement, asked):
            pass
        return
    if placement in PLACEMENTS and DEVICE.type == "cpu":
        pytest.skip("this machine has no CUDA device")
    with opened(artifacts[asked.preset], placement, asked) as engine:
        np.testing.assert_allclose(decoded(engine, asked.num_requests), expected_logits(asked), rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def expected_sparse_logits(artifacts: dict[str, list[Artifact]]) -> Callable[[str], np.ndarray]:
    """Logits on the CPU with `keep` below 1."""

    @cache
    def decode(name: str) -> np.ndarray:
        asked = CAPABILITIES[name]
        with opened(artifacts[asked.preset], "cpu", asked, PART) as engine:
            return decoded(engine, asked.num_requests)

    return decode


@pytest.mark.parametrize(
    ("name", "placement"), cell_parameters(cell for cell, said in cells().items() if said == "yes")
)
def test_each_supported_capability_with_keep_below_1_reads_part_of_the_context(
    artifacts, expected_sparse_logits, name: str, placement: str
) -> None:
    """Needed besides the test above: with `keep` 1, the CPU, and a GPU over lists, attend to all rows in any case."""
    if placement in PLACEMENTS and DEVICE.type == "cpu":
        pytest.skip("this machine has no CUDA device")
    asked = CAPABILITIES[name]
    with opened(artifacts[asked.preset], placement, asked, PART) as engine:
        logits = decoded(engine, asked.num_requests)
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits, expected_sparse_logits(name), rtol=2e-2, atol=2e-2)
        for request_slot in range(asked.num_requests):
            reading = engine.reading(request_slot)
            assert reading.selector == ("model" if asked.preset in CHOOSING else asked.selector)
            assert (reading.rows > CONTEXT_LENS[request_slot]) == (asked.selector == "full")
