"""Every supported family, read from its config, agrees with transformers in all its kinds of layers, on all engines.

The lists of families in the README and docs/models.md are checked against these tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from csattn.artifact import Artifact, open_artifact, verify_artifact
from csattn.config import SearchConfig, preset
from csattn.errors import ConfigError
from csattn.models import LoadedModel
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.loader import wrap_model
from csattn.models.module_weights import weights_of
from csattn.models.recurrent_spec import ConvSpec, ScanSpec
from index_build.board import BuildProgress
from index_build.pipeline import build_artifact
from tests.cuda_on_cpu.emulated import DEVICE, Emulator
from tests.tiny import ALL_FAMILIES, EVERY_FAMILY, byte_tokenizer, loaded, make_model, tiny_config, token_ids
from tests.workers.engine.emulated_engine import emulate
from tests.workers.engine.talks import Talk, alone, assert_same, reading_of, run_together, with_drafts
from tests.workers.model.decoding import decode, prefill
from tests.workers.model.full_context import CONTEXT_LENS, assert_greedy, logits_after, make_runner
from workers.engine.cpu.engine import CpuEngine
from workers.engine.gpu.engine import GpuEngine
from workers.engine.model_choice import model_selects_rows
from workers.serving.step_engine import StepEngine, StepRow
from workers.session import csattn_session

CONTEXT = token_ids(300)
NUM_TOKENS, FEW_TOKENS = 40, 14  # the first leave a window, and reach into the next chunk of a model with chunks
QUESTION = token_ids(5, seed=5).tolist()
EMULATED = [
    "afmoe",
    "gemma2",
    "gemma4_text",
    "gemma4_text, experts",
    "gemma4_text, inputs",
    "gpt_oss",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_next",
]  # families whose layers all have kernels for the device
MODEL_CHOICE = ["deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "mistral4"]  # these have other kernels


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, and an artifact built with it."""

    loaded: LoadedModel
    artifact: Artifact

    @property
    def chooses(self) -> bool:
        """Whether the model itself chooses the rows that it attends to, whatever `keep` is."""
        return model_selects_rows(describe(self.loaded.model.config))

    @property
    def is_on_device(self) -> bool:
        """Whether the model chooses its rows, and on a GPU all that it attends to is in device memory."""
        latent = describe(self.loaded.model.config).layers[0].latent
        return self.chooses and (latent is None or latent.top_k is None)

    def logits(self, following: list[int], num_tokens: int) -> Tensor:
        """Return transformers' logits [num_tokens, vocab_size] of the last of context, question and `following`."""
        ids = torch.from_numpy(np.concatenate([CONTEXT, QUESTION, following]).astype(np.int64))[None]
        with torch.no_grad():
            wanted: Tensor = self.loaded.model(ids.to(self.loaded.device)).logits[0, -num_tokens:].float().cpu()
        return wanted

    def divergence(self, logits: list[np.ndarray], following: list[int]) -> float:
        """Return the mean KL divergence of `logits` from transformers' logits after each of `following`, in nats."""
        want = self.logits(following, len(following)).log_softmax(-1)
        got = torch.from_numpy(np.stack(logits)).log_softmax(-1)
        return float((want.exp() * (want - got)).sum(-1).mean())


def attends_within_reach(model: torch.nn.Module) -> bool:
    """Whether some layers see only a window or a chunk."""
    layers = describe(model.config).layers
    return any(layer.attention is not None and layer.attention.reach is not None for layer in layers)


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    model = loaded(request.param)
    built = build_artifact(model, CONTEXT, preset("default"), tmp_path_factory.mktemp(request.param))
    with open_artifact(built.path) as artifact:
        yield Family(model, artifact)


def test_all_families_are_tested() -> None:
    newer = EVERY_FAMILY.keys() - ALL_FAMILIES.keys()
    assert {tiny_config(name).model_type for name in ALL_FAMILIES} == FAMILIES.keys() - newer


def test_session_logits_equal_transformers(family: Family) -> None:
    model = family.loaded.model
    num_tokens = NUM_TOKENS if attends_within_reach(model) else FEW_TOKENS
    with csattn_session(family.loaded, family.artifact, SearchConfig(keep=1.0), num_threads=2) as session:
        asked = session.continue_with(np.array(QUESTION, np.int32))
        wanted = {"max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
        got = model.generate(**asked, **wanted, output_logits=True)
    tokens = got.sequences[0, len(CONTEXT) + len(QUESTION) :].tolist()
    want = family.logits(tokens[:-1], num_tokens)
    torch.testing.assert_close(torch.cat(got.logits), want, rtol=0, atol=1e-3)
    assert tokens == want.argmax(1).tolist() and len(tokens) == num_tokens


def test_divergence_from_full_attention_falls_with_keep(family: Family) -> None:
    following = token_ids(40, seed=6).tolist()
    by_keep = []
    with CpuEngine(family.loaded, num_threads=2) as engine:
        engine.add_context(0, family.artifact)
        for keep in (0.02, 0.6, 1.0):
            logits = read(engine, SearchConfig(keep=keep, window_len=16), following, at_once=8)
            by_keep.append(family.divergence(logits, following))
    assert np.isfinite(by_keep).all()
    if family.chooses:
        assert by_keep[0] == by_keep[1] == by_keep[2] < 1e-5
        return
    assert by_keep[0] > by_keep[1] > by_keep[2] - 1e-6 and by_keep[2] < 1e-5


def read(
    engine: StepEngine, config: SearchConfig, following: list[int], selector: str = "csattn", at_once: int = 1
) -> list[np.ndarray]:
    """Return the logits [vocab_size] after each of `following`, fed `at_once` in a step after the question."""
    engine.open(0, 0, config, selector)  # type: ignore[arg-type]
    engine.step([StepRow(0, token) for token in QUESTION])
    logits: list[np.ndarray] = []
    for start in range(0, len(following), at_once):
        result = engine.step([StepRow(0, token) for token in following[start : start + at_once]], want_logits=True)
        assert result.logits is not None
        logits.extend(result.logits.copy())
    engine.close_request(0)
    return logits


def test_an_interrupted_build_resumes_to_the_same_bytes(family: Family, tmp_path: Path) -> None:
    class Cut(Exception):
        """Interrupts a build."""

    def cut(progress: BuildProgress) -> None:
        if progress.layer_idx == 2:
            raise Cut

    with pytest.raises(Cut):
        build_artifact(family.loaded, CONTEXT, preset("default"), tmp_path, on_progress=cut)
    again = build_artifact(family.loaded, CONTEXT, preset("default"), tmp_path)
    assert again.resumed_at == 2
    assert verify_artifact(again.path).files == family.artifact.manifest.files
    model = family.artifact.spec.model
    for layer_idx in [i for i in range(model.num_layers) if not model.has_state(i)]:
        assert family.artifact.layer_kv(layer_idx).shape[1] == model.num_kept(layer_idx, len(CONTEXT))


def test_concurrent_requests_equal_each_alone(family: Family, rng: np.random.Generator) -> None:
    configs = [
        SearchConfig(keep=keep, window_len=16, lookahead=ahead) for keep, ahead in ((0.1, 1), (0.2, 0), (1.0, 0))
    ]
    talks = [Talk(0, config, "csattn", token_ids(3 + i, seed=i).tolist(), 4) for i, config in enumerate(configs)]
    with CpuEngine(family.loaded, num_threads=2, max_requests=3, max_rows=6) as engine:
        engine.add_context(0, family.artifact)
        run_together(engine, talks, rng)
        for talk in talks:
            assert_same(talk, alone(engine, talk))


def test_drafts_change_no_bit(family: Family, rng: np.random.Generator) -> None:
    config = SearchConfig(keep=0.1, window_len=16)
    with CpuEngine(family.loaded, num_threads=2, max_requests=1) as engine:
        engine.add_context(0, family.artifact)
        if not engine.takes_drafts(family.artifact, config, "csattn"):
            assert family.loaded.geometry.kinds & {"state", "compressed"}
            return
        want = alone(engine, Talk(0, config, "csattn", QUESTION, NUM_TOKENS))
        got, reading = with_drafts(engine, want, rng)
        assert_same(got, want)
        assert reading == reading_of(engine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "hybrid"])
def test_gpu_logits_equal_transformers(family: Family, placement: str) -> None:
    following = token_ids(NUM_TOKENS, seed=6).tolist()
    if family.is_on_device and placement != "device":
        with pytest.raises(ConfigError, match="choose placement device"):
            compare_on_gpu(family, placement, following)
    elif not family.chooses and family.loaded.geometry.head_dim % 16:
        with pytest.raises(ConfigError, match="multiples of 16"):
            compare_on_gpu(family, placement, following)
    else:
        compare_on_gpu(family, placement, following)


@pytest.mark.parametrize("family", [*EMULATED, *MODEL_CHOICE], indirect=True)
def test_emulated_gpu_kernels_equal_transformers(
    family: Family, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are emulated on the CPU, for a few tokens of the families with the most kinds of layers."""
    emulate(emulator, monkeypatch)
    compare_on_gpu(family, "device", token_ids(3, seed=6).tolist(), batch_sizes=(1, 5))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """A model with heads as wide as those of Gemma 4, up to 512 dimensions."""
    sizes = {"num_attention_heads": 8, "num_global_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}
    model = wrap_model(make_model("gemma4_text", **sizes), byte_tokenizer(), "wide")
    store = tmp_path_factory.mktemp("wide")
    with open_artifact(build_artifact(model, CONTEXT, preset("default"), store).path) as artifact:
        yield Family(model, artifact)


def test_wide_heads_equal_transformers(wide: Family) -> None:
    following = token_ids(5, seed=6).tolist()
    assert [wide.artifact.layer_kv(i).shape[2:].numel() for i in range(4)] == [512, 1024, 512, 1024]
    with CpuEngine(wide.loaded, num_threads=2) as engine:
        engine.add_context(0, wide.artifact)
        whole = read(engine, SearchConfig(keep=1.0), following)
        sparse = read(engine, SearchConfig(keep=0.1, window_len=16), following)
    np.testing.assert_allclose(np.stack(whole), wide.logits(following, 5).numpy(), rtol=0, atol=1e-3)
    assert 1e-6 < wide.divergence(sparse, following) < 0.1


@pytest.mark.parametrize("placement", ["device", "hybrid"])
def test_emulated_gpu_kernels_equal_transformers_with_wide_heads(
    wide: Family, placement: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(emulator, monkeypatch)
    compare_on_gpu(wide, placement, token_ids(3, seed=6).tolist(), batch_sizes=(1, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["device", "hybrid", "host"])
def test_gpu_logits_equal_transformers_with_wide_heads(wide: Family, placement: str) -> None:
    compare_on_gpu(wide, placement, token_ids(NUM_TOKENS, seed=6).tolist())


def compare_on_gpu(family: Family, placement: str, following: list[int], **options: object) -> None:
    divergences = []
    for keep, selector in ((1.0, "full"), (0.3, "csattn")):
        config = SearchConfig(keep=keep, window_len=16)
        with GpuEngine(family.loaded, config, placement, selector=selector, device=DEVICE, **options) as engine:  # type: ignore[arg-type]
            engine.add_context(0, family.artifact)
            placed = engine._placing.placed
            assert placed is not None
            planned = {part.name: part.device_bytes for part in placed.plan.parts}.get("the layers without an index", 0)
            assert planned == (0 if placed.local is None else placed.local.nbytes), "planned for what is there"
            logits = read(engine, config, following, selector)
            divergences.append(family.divergence(logits, following))
            if selector == "full":
                want = family.logits(following, len(following)).numpy()
                np.testing.assert_allclose(np.stack(logits), want, rtol=0, atol=1e-3)
    if family.chooses:
        assert divergences[0] == divergences[1] < 1e-5
        return
    assert np.isfinite(divergences).all() and divergences[0] < divergences[1] + 1e-6


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_weights_match_the_models_description_and_cover_all_matrices(name: str) -> None:
    """The weights found in a model are all of its matrices, each once."""
    model = loaded(name).model
    weights = weights_of(model)
    for spec, layer in zip(weights.spec.layers, weights.layers, strict=True):
        is_state = spec.recurrent is not None
        assert all((linear.bias is not None) == spec.attention.qkv_bias for linear in layer.qkv)
        assert all((linear.bias is not None) == spec.attention.gate_bias for linear in layer.gates)
        assert (layer.latent is None) == (spec.latent is None)
        assert (layer.compressed is None) == (spec.compressed is None)
        assert (layer.recurrent is not None) == is_state
        assert bool(layer.gates) == (spec.attention.gated and not is_state)
        assert (layer.out is None) == spec.mlp_only
        out_bias = getattr(spec.recurrent, "bias", False) if is_state else spec.attention.out_bias
        assert layer.out is None or (layer.out.bias is not None) == out_bias
        recurrent = spec.recurrent
        conv_bias = (
            recurrent.bias
            if isinstance(recurrent, ConvSpec)
            else isinstance(recurrent, ScanSpec) and recurrent.conv_bias
        )
        assert not is_state or (layer.recurrent.conv_bias is not None) == conv_bias
        mlp = spec.mlp
        assert [linear.bias is not None for linear in layer.gate_up] == ([mlp.bias] * (1 + mlp.gated) if mlp else [])
        assert (layer.down is None) == (mlp is None) and (mlp is None or (layer.down.bias is not None) == mlp.bias)
        for experts, of in zip(spec.experts, layer.experts, strict=True):
            assert of.down.shape == (experts.num_experts, weights.spec.hidden_size, experts.intermediate_size)
            assert (of.choice_bias is not None) == experts.has_choice_bias
            assert (of.by_token is not None) == experts.by_token
            biases = of.router.bias, of.gate_bias, of.up_bias, of.down_bias
            assert [bias is not None for bias in biases] == [experts.bias] * 4
            assert (of.scales is not None) == experts.has_scales and (of.norms is not None) == experts.has_own_norms
        assert (layer.input_norm is None) == (not spec.pre_norm)
        shares_norm = spec.parallel or spec.mlp_only or not spec.has_mlp
        assert (layer.pre_mlp_norm is None) == (not spec.pre_norm or shares_norm)
        assert (layer.post_attention_norm is None) == (layer.post_mlp_norm is None) == (not spec.post_norm)
        assert (layer.sinks is None) == (not spec.attention.sinks or spec.compressed is not None)
        assert (layer.head_norms is not None and layer.head_norms.v is not None) == spec.attention.v_norm
        assert (layer.scale != 1.0) == spec.scaled
    assert (weights.head.bias is not None) == weights.spec.head_bias
    attention = FAMILIES[model.config.model_type].part(model.model.layers[1], "self_attn")
    assert weights.spec.softmax_scale == pytest.approx(attention.scaling)
    read = [weights.embedding] + ([] if weights.spec.tied_embedding else [weights.head.weight])
    for spec, layer in zip(weights.spec.layers, weights.layers, strict=True):
        if (state := layer.recurrent) is not None:
            read += [*(linear.weight for linear in state.inputs), state.conv]
        qkv = layer.qkv
        if spec.attention.k_is_v:
            *qkv, v = layer.qkv
            assert v.weight.data_ptr() == qkv[1].weight.data_ptr()
        read += [x.weight for x in (*qkv, *layer.gates, *layer.gate_up, *filter(None, [layer.out, layer.down]))]
        if (latent := layer.latent) is not None:
            read += [linear.weight for linear in (*latent.inputs, *latent.queries)]
            read += [latent.up_k, latent.up_v]
        if (of_rows := layer.compressed) is not None:
            read += [x.weight for x in (of_rows.latents, *of_rows.queries, *of_rows.inputs, of_rows.groups)]
        read += [mix.matrix for mix in (layer.attention_mix, layer.mlp_mix) if mix is not None]
        for of in layer.experts:
            read += [of.router.weight, of.gates, *([] if of.ups is None else [of.ups]), of.down]
        if (taken := layer.layer_input) is not None:
            read += [taken.gate.weight, taken.projection.weight]
    if weights.join is not None:
        read.append(weights.join.matrix)
    if (inputs := weights.inputs) is not None:
        read += [inputs.projection.weight, inputs.table]
    assert sum(matrix.numel() for matrix in read) == sum(p.numel() for p in matrices_of(model))


def matrices_of(model: torch.nn.Module) -> list[Tensor]:
    """All matrices except experts' biases, which are matrices with a row per expert."""
    return [p for name, p in model.named_parameters() if p.dim() > 1 and not name.endswith("bias")]


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2, "prefix_dense_sliding_window_pattern": 2, "prefix_dense_intermediate_size": None},
        {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "softmax"},
        {"num_shared_experts": 0, "norm_topk_prob": False},
    ],
)
def test_other_norms_and_experts_of_command_a_plus_equal_transformers(changes: dict[str, object]) -> None:
    model = make_model("cohere2_moe", **changes)
    output = prefill(make_runner(model), QUESTION, 0, CONTEXT_LENS[0], 0)
    torch.testing.assert_close(output.logits, logits_after(model, 0, QUESTION)[-1:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_model_runner_on_cpu_equals_transformers(name: str) -> None:
    """The decode loop runs on a CPU: the same description of layers, over the operations in torch."""
    model = loaded(name).model
    runner, context_len = make_runner(model), CONTEXT_LENS[0]
    output = prefill(runner, QUESTION, 0, context_len, 0)
    torch.testing.assert_close(output.logits, logits_after(model, 0, QUESTION)[-1:], rtol=0, atol=1e-3)
    first = int(output.next_ids)
    runner.fill(1, [first], [context_len + len(QUESTION)], [0], [0], [len(QUESTION) + 1])
    num_tokens = 34 if attends_within_reach(model) else FEW_TOKENS  # 34 fit the tail, and reach into the next chunk
    assert_greedy([first, *decode(runner, 1, num_tokens - 1)[:, 0].tolist()], model, 0, QUESTION)
