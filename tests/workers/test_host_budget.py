"""A context within a host budget decodes bit for bit like one in memory; unsupported cases are refused."""

import errno
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.process_memory import mapped_bytes
from csattn.artifact import open_artifact
from csattn.artifact.layout import file_layout, index_file
from csattn.config import SearchConfig, preset
from csattn.errors import ArtifactCorruptError, ConfigError
from csattn.models.attending_cache import CACHE
from index_build.pipeline import build_artifact
from offload.errors import DiskError, TierError
from offload.host_store import HostStore
from offload.kv_store import STREAM_ROWS
from offload.tiered_store import TieredStore
from tests.offload.soundness import check
from tests.tiny import loaded, token_ids
from workers.engine.cpu import row_by_row
from workers.engine.cpu.context import HostBudget, open_context
from workers.session import csattn_session

CONTEXT_LEN = 700


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("store")).path


def least_budget(artifact: Path, selector: str, config: SearchConfig) -> int:
    """Return the least host budget in bytes, which the error about a budget of one byte names."""
    with (
        pytest.raises(TierError) as refused,
        csattn_session(loaded(), artifact, config, selector, host_budget_bytes=1),
    ):
        pass
    return int(re.search(r"need ([\d,]+) bytes", str(refused.value))[1].replace(",", ""))


def logits(session, num_tokens: int = 24) -> torch.Tensor:
    """Return the logits [num_tokens, vocab_size] of a question in one piece, then token by token."""
    ids, request = torch.from_numpy(token_ids(num_tokens, seed=1)).long()[None], session.request()
    with torch.inference_mode():
        parts = [session.loaded.model(part, **{CACHE: request}).logits[0] for part in ids.split([9] + [1] * 15, 1)]
    return torch.cat(parts)


@pytest.mark.parametrize("selector", ["csattn", "full", "window"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_logits_within_a_host_budget_equal_those_in_memory(artifact, selector, lookahead) -> None:
    config = SearchConfig(keep=0.1, window_len=8, lookahead=lookahead)
    budget = least_budget(artifact, selector, config) + 20_000
    with csattn_session(loaded(), artifact, config, selector, host_budget_bytes=budget) as session:
        store = session.engine.context(0).store
        assert isinstance(store, TieredStore)
        assert store.plan.num_slots < store.plan.num_pages
        got = logits(session)
        store._ahead.submit(int).result()
        check(store)
    with open_artifact(artifact) as opened, csattn_session(loaded(), opened, config, selector) as session:
        # read rows in pieces as large as within a budget; a store in memory otherwise has one piece
        kv = [opened.layer_kv(layer_idx) for layer_idx in range(3)]
        contexts, context = session.engine._contexts, session.engine.context(0)
        at_once = logits(session)
        contexts[0] = replace(context, store=HostStore(kv, stream_rows=STREAM_ROWS), in_place=False)
        want = logits(session)
    assert torch.equal(got, want)
    torch.testing.assert_close(got, at_once, rtol=1e-4, atol=1e-4)


def test_within_a_host_budget_no_kv_is_mapped_into_memory(artifact, tmp_path) -> None:
    """Opening an artifact maps its files, which takes no memory until a row is touched; within a budget, none is."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("no /proc/self/smaps here")
    own = shutil.copytree(artifact, tmp_path / artifact.name)  # a copy that nothing else still has mapped
    for budget, some in ((4_000_000, False), (None, True)):
        with csattn_session(loaded(), own, SearchConfig(keep=0.1), host_budget_bytes=budget) as session:
            logits(session)
            assert bool(mapped_bytes(own, ".kv.safetensors")) == some


@pytest.mark.parametrize("selector", ["exact", "quest", "h2o"])
def test_a_host_budget_refuses_selectors_that_read_all_keys(artifact, selector) -> None:
    with (
        pytest.raises(ConfigError, match=f"selector '{selector}' reads all keys from host memory"),
        csattn_session(loaded(), artifact, SearchConfig(), selector, host_budget_bytes=1 << 24),
    ):
        pass


def test_a_too_small_host_budget_is_refused_with_the_least_sufficient_one(artifact) -> None:
    with (
        pytest.raises(
            TierError, match=r"a host budget of 1,000 bytes is too small .* need [\d,]+ bytes; give at least"
        ),
        csattn_session(loaded(), artifact, SearchConfig(), host_budget_bytes=1000),
    ):
        pass


def test_a_damaged_index_leaves_no_file_open(artifact, tmp_path) -> None:
    own = shutil.copytree(artifact, tmp_path / artifact.name)
    with open_artifact(own) as opened:
        _, start = next(iter(file_layout(opened.spec, index_file(1)).tensors))
    with (own / index_file(1)).open("r+b") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(start)
        file.write(b"\xff" * (num_bytes - start))
    budget = HostBudget(4_000_000, SearchConfig(), "csattn")
    with open_artifact(own) as opened:
        before = os.listdir("/dev/fd")
        for _ in range(3):
            with pytest.raises(ArtifactCorruptError):
                open_context(opened, None, budget)
        assert os.listdir("/dev/fd") == before


def test_a_disk_error_while_decoding_ends_the_answer_with_the_reason(artifact, monkeypatch) -> None:
    threads = set(threading.enumerate())
    with csattn_session(
        loaded(), artifact, SearchConfig(keep=0.1, lookahead=1), host_budget_bytes=4_000_000
    ) as session:

        def fail(*args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(DiskError, match="Input/output error; check its disk"):
            logits(session)
        store = session.engine.context(0).store
        store._ahead.submit(int).result()
        check(store)
    assert set(threading.enumerate()) <= threads


def test_a_step_that_fails_within_a_piece_does_not_block_the_next_one(artifact, monkeypatch) -> None:
    """The error, which is still referenced here, refers to the stream that the step did not read to its end."""

    def fail(*args, **options):
        raise MemoryError("no memory for a piece")

    with csattn_session(loaded(), artifact, SearchConfig(), "full", host_budget_bytes=4_000_000) as session:
        want, store = logits(session), session.engine.context(0).store
        with monkeypatch.context() as patch:
            patch.setattr(row_by_row, "_attend", fail)
            with pytest.raises(MemoryError, match="no memory for a piece") as kept:
                logits(session)
        assert store._buffers.qsize() == 1, f"{kept.value} keeps the buffers that the next stream waits for"
        assert torch.equal(logits(session), want)
