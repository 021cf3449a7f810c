"""Other methods in `bench.decode`: their kernels, compiled for the CPU, choose as `csattn.selectors` define it."""

from inspect import signature

import numpy as np
import pytest
import torch

from bench.decode import other_methods, sampled
from bench.decode.baselines import relative_error
from bench.decode.options import Options
from bench.decode.other_methods import pqcache_index
from bench.decode.other_steps import by_other_method
from bench.decode.results import Results
from bench.decode.workload import Workload
from bench.timing import GateError
from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.selectors.base import ContextLayer, ContextView
from csattn.selectors.magicpig import PreparedMagicpig
from csattn.selectors.pqcache import PreparedPqcache
from csattn.selectors.quest import PreparedQuest
from csattn.selectors.sparq import PreparedSparq
from tests.cuda_on_cpu.emulated import DEVICE
from tests.test_bench_decode import FEW, FEW_HEADS, GROUP_SIZE, kernels, recording, whole_step_options  # noqa: F401
from workers.engine.on_device import SearchOnDevice

METHODS = [("quest", PreparedQuest), ("sparq", PreparedSparq), ("pqcache", PreparedPqcache)]
MISSED = {"quest": 0, "sparq": 1, "pqcache": 1}  # rows at most: sums are rounded in another order
SEARCH = SearchConfig(keep=0.1, sink_len=16, window_len=32)


def test_they_are_those_that_are_defined():
    assert signature(PreparedQuest).parameters["page_size"].default == other_methods.PAGE_LEN
    pqcache = signature(PreparedPqcache).parameters
    sizes = [pqcache[name].default for name in ("num_subspaces", "num_centroids", "num_iterations")]
    assert sizes == [other_methods.SUBSPACES, other_methods.CENTROIDS, other_methods.ITERATIONS]


@pytest.mark.parametrize(
    ("method", "prepare", "crowded"),
    [
        *((*method, 512) for method in METHODS),
        # all choices look closer, which is the same for all methods
        *(pytest.param(*method, 1, marks=[] if method[0] == "sparq" else pytest.mark.gpu) for method in METHODS),
    ],
)
def test_they_choose_as_they_are_defined(kernels, recording, monkeypatch, method, prepare, crowded):  # noqa: F811
    monkeypatch.setattr(other_methods, "CROWDED", crowded)
    context_len = 4112  # of several blocks
    work, options = Workload(recording, FEW_HEADS, context_len, 2, DEVICE), whole_step_options(monkeypatch, None)
    steps, rows = by_other_method(work, options, method, "device", SEARCH).attention, work.step_rows(64)
    assert isinstance(steps, SearchOnDevice)
    kv = work.rows(1).float().cpu()
    keys, values = (part.contiguous() for part in kv.unbind(2))
    defined = prepare(ContextLayer(keys, values, FEW.num_q_heads, lambda: torch.zeros(0)))
    if method == "pqcache":  # whose centroids are of some of the keys here, and as wide as these
        codes, centroids, _ = pqcache_index(work.keys(1)).parts
        defined.codes, defined.centroids = codes.cpu(), centroids.float().cpu()
    view, num_rows = ContextView(context_len, FEW.softmax_scale, SEARCH), SEARCH.top_k(context_len)
    if method == "quest":  # which chooses whole pages
        num_rows = num_rows // 16 * 16
    for step in (3, 4):  # the second finds what the first has left
        q = work.queries(1)[step].contiguous()
        out = torch.zeros_like(q)
        steps.begin_step(rows)
        steps.attend(1, q, rows, out)
        chosen = steps.chosen(1, rows)
        for request in range(2):
            wanted = defined.selector(view).select(q[request].float().cpu().numpy(), kv[:, :0])
            for head in range(2):
                got = chosen.kv_indices[request, head].cpu().long()
                assert int(chosen.valid_len[request, head]) == num_rows and bool((got[num_rows:] == -1).all())
                got = got[:num_rows]
                assert bool((got.diff() > 0).all()) and got[0] >= 16 and got[-1] < context_len - 32
                missed = num_rows - np.isin(got.numpy(), wanted.kv_indices[head]).sum()
                # sums are rounded in another order, and the definition of Quest takes a part of one page more
                assert missed <= MISSED[method], f"{missed} rows of {num_rows} are others"
                tail = steps.tails[1, request, head, :64].float().cpu()
                seen = torch.cat([kv[head, :16], kv[head, got], kv[head, -32:], tail])
                weights = (seen[:, 0] @ q[request, head * GROUP_SIZE].float().cpu() * FEW.softmax_scale).softmax(0)
                assert relative_error(out[request, head * GROUP_SIZE].float().cpu(), weights @ seen[:, 1]) < 0.02


@pytest.mark.parametrize(("context_len", "keep", "what"), [(300, 0.1, "whole pages"), (304, 0.04, "less than a page")])
def test_what_kernels_do_not_take_is_refused(recording, monkeypatch, context_len, keep, what):  # noqa: F811
    work, options = Workload(recording, FEW_HEADS, context_len, 1, DEVICE), whole_step_options(monkeypatch, None)
    with pytest.raises(ConfigError, match=what):
        by_other_method(work, options, "quest", "device", SearchConfig(keep=keep, window_len=32))


def test_rows_that_are_kept_stay_the_same(kernels, recording, monkeypatch):  # noqa: F811
    work, options = Workload(recording, FEW_HEADS, 320, 1, DEVICE), whole_step_options(monkeypatch, None)
    search = SearchConfig(keep=0.05, window_len=32)
    steps, rows = by_other_method(work, options, "h2o", "hybrid", search).attention, work.step_rows(64)
    assert isinstance(steps, SearchOnDevice)
    for layer_idx in range(2):
        q = work.queries(0)[0].contiguous()
        steps.attend(layer_idx, q, rows, torch.zeros_like(q))
        assert steps.chosen(layer_idx, rows).kv_indices[0, 0].tolist() == list(range(4, 20))
    with pytest.raises(ConfigError, match="measured in device and hybrid"):
        by_other_method(work, options, "h2o", "host", search)


def test_a_bound_counts_the_rows_that_magicpig_samples(recording, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sampled, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(sampled, "NUM_WIDE_LAYERS", 1)
    work = Workload(recording, FEW_HEADS, 300, 1, torch.device("cpu"))
    options = Options(shape=FEW, search=SearchConfig(window_len=32), ceilings={}, seconds=0.0)
    found = sampled.sample(work, sampled.TABLES["magicpig"], options.search)
    kv, q = work.rows(0).float(), work.queries(0)
    keys, values = (part.contiguous() for part in kv.unbind(2))
    of_context = PreparedMagicpig(ContextLayer(keys, values, FEW.num_q_heads, lambda: torch.zeros(0)))
    rows, met = [], []
    for step in (0, 3, 6, 9):
        selector = of_context.selector(ContextView(300, FEW.softmax_scale, options.search))
        chosen = selector.select(q[step, 0].float().numpy(), kv[:, :0])
        of_heads = [set(of[:n]) for of, n in zip(chosen.kv_indices.tolist(), chosen.valid_len, strict=True)]
        rows += [len(set().union(*of_heads[h * GROUP_SIZE : (h + 1) * GROUP_SIZE])) for h in range(2)]
        met.append((selector.search_bytes - of_context.projections.nbytes) / 4 / 2)
    assert found.rows == pytest.approx(np.mean(rows), abs=0.5) and found.met == pytest.approx(np.mean(met), rel=0.02)
    results = Results(None, {})
    key = {"kind": "e2e", "context_len": 300, "batch_size": 1}
    with pytest.raises(GateError, match="ask for the variant window"):
        sampled.add_bounds(results, work, options, ["magicpig"], key)
    for more in ({}, {"weights": "int4"}, {"shape": "another"}):
        window = 1000.0 + 100 * len(results.cases)
        results.add({**key, **more, "variant": "window", "p50_us": window, "attention_us": 5.0})
    sampled.add_bounds(results, work, options, ["magicpig", "default"], {**key, "weights": "int4"})
    *_, case = results.cases
    assert case["variant"] == "magicpig" and case["weights"] == "int4" and len(results.cases) == 4
    assert case["host_bytes_read"] == pytest.approx(2 * FEW.num_layers * (512 * found.rows + 4 * found.met), rel=1e-6)
    alone = 1100 - 5 * FEW.num_layers
    assert case["p50_us"] == pytest.approx(alone + case["host_bytes_read"] / case["host_gbps"] / 1e3, rel=0.01)
    assert case["index_bytes"] == 2 * FEW.num_layers * 300 * 600
