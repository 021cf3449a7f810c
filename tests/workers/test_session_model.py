"""A model within a session. A changed model is refused: requests would continue from the unchanged model's context."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from csattn.config import preset
from csattn.errors import ModelError
from csattn.models import LoadedModel
from csattn.models.attending_cache import CACHE
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from tests.tiny import byte_tokenizer, loaded, make_model, token_ids
from workers.session import csattn_session

CONTEXT_LEN = 400
SENTENCE = "mine is not the model that was loaded: an adapter, .* its weights or its config; .* build its contexts"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    return build_artifact(loaded(), token_ids(CONTEXT_LEN), preset("default"), tmp_path_factory.mktemp("store")).path


@pytest.fixture
def mine() -> LoadedModel:
    """The model that built the artifact; a test may change it."""
    return wrap_model(make_model(), byte_tokenizer(), "mine")


class Adapted(nn.Module):
    """A wrapper around a layer, as adapters have it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


def put_adapter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)


def merge_adapter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data += 0.1


def edit_one(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[77, 3] += 1


CHANGES: list[Callable[[Any], Any]] = [put_adapter, merge_adapter, lambda model: model.half()]


@pytest.mark.parametrize("change", [*CHANGES, edit_one])
def test_a_model_that_changes_within_a_session_is_refused(artifact, mine, change) -> None:
    model = mine.model
    with csattn_session(mine, artifact) as session:
        inputs = session.continue_with(token_ids(9))
        half = model.generate(**inputs, max_new_tokens=2)
        change(model)
        going_on = {**inputs, "input_ids": half, "attention_mask": torch.ones_like(half)}
        for call, given in ((model, session.continue_with(token_ids(9))), (model.generate, going_on)):
            with pytest.raises(ModelError, match=SENTENCE):
                call(**given)
        model(half)  # without a request, the model's own forward runs


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_for_sessions_and_builds(artifact, mine, tmp_path, change) -> None:
    change(mine.model)
    with pytest.raises(ModelError, match=SENTENCE), csattn_session(mine, artifact):
        pass
    with pytest.raises(ModelError, match=SENTENCE):
        build_artifact(mine, token_ids(CONTEXT_LEN), preset("default"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_in_memory_is_refused(artifact, mine) -> None:
    with csattn_session(mine, artifact) as session:
        inputs = session.continue_with(token_ids(9))
        mine.model.to("meta")
        with pytest.raises(ModelError, match=SENTENCE):
            mine.model(**inputs)
    with pytest.raises(ModelError, match=r"some weights, such as model.embed_tokens.weight, are not in memory"):
        wrap_model(mine.model, byte_tokenizer(), "away")


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layers_hook_is_refused_and_a_hook_of_the_model_is_called(artifact, mine, kind) -> None:
    model, calls = mine.model, []
    with csattn_session(mine, artifact) as session:
        model(torch.ones(1, 2, dtype=torch.long), output_hidden_states=True)  # leaves hooks of transformers on layers
        model.register_forward_hook(lambda module, given, got: calls.append(module))
        inputs = session.continue_with(token_ids(9))
        hook = getattr(model.model.layers[1].mlp, kind)(lambda *given: None)
        with pytest.raises(ModelError, match=r"model.layers.1.mlp of mine has a forward hook, .*; remove it"):
            model(**inputs)
        hook.remove()
        model(**inputs)
    assert calls == [model]


def put_hook(mlp: Any) -> Callable[[], None]:
    hook: Callable[[], None] = mlp.register_forward_hook(lambda module, given, got: 2 * got).remove
    return hook


def put_forward(mlp: Any) -> Callable[[], None]:
    own = mlp.forward
    mlp.forward = wraps(own)(lambda x: 2 * own(x))
    return lambda: setattr(mlp, "forward", own)


def put_another(mlp: Any) -> Callable[[], None]:
    """Put in the forward of another module of the same class."""
    mlp.forward = type(mlp)(mlp.config).forward
    return lambda: delattr(mlp, "forward")


class _Doubles(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return 2 * output


def put_hook_by_accelerate(mlp: Any) -> Callable[[], None]:
    add_hook_to_module(mlp, _Doubles())
    return lambda: remove_hook_from_module(mlp)


ANOTHER = "put in the place of its own"


@pytest.mark.parametrize(
    ("put", "what"),
    [(put_hook, "hook"), (put_forward, ANOTHER), (put_another, ANOTHER), (put_hook_by_accelerate, ANOTHER)],
)
def test_added_hooks_and_forwards_are_refused_for_sessions_and_builds(artifact, mine, tmp_path, put, what) -> None:
    """Otherwise the artifact would be stored as that of the model without the addition."""
    sentence = f"model.layers.1.mlp of mine has a forward {what}, which contexts are not built with"
    mlp = mine.model.model.layers[1].mlp
    with csattn_session(mine, artifact) as session:
        remove = put(mlp)
        with pytest.raises(ModelError, match=sentence):
            mine.model(**session.continue_with(token_ids(9)))
        with pytest.raises(ModelError, match=sentence):
            build_artifact(mine, token_ids(CONTEXT_LEN), preset("default"), tmp_path)
        with pytest.raises(ModelError, match=sentence), csattn_session(mine, artifact):
            pass
        assert not list(tmp_path.iterdir())
        remove()
        mine.model(**session.continue_with(token_ids(9)))


def test_wrapped_forwards_that_compute_the_same_are_accepted(artifact, mine) -> None:
    """Forwards wrapped by accelerate, and compiled ones."""
    first, second = mine.model.model.layers[:2]
    add_hook_to_module(first.mlp, ModelHook())
    second.mlp.forward = torch.compile(second.mlp.forward, backend="eager")
    with csattn_session(mine, artifact) as session:
        mine.model(**session.continue_with(token_ids(9)))


def test_weights_that_move_in_memory_within_a_session_are_refused(artifact, mine) -> None:
    """Its engine would read freed memory."""
    with csattn_session(mine, artifact) as session:
        inputs = session.continue_with(token_ids(9))
        want = mine.model(**inputs).logits
        mine.model.model.layers[1].mlp.share_memory()
        with pytest.raises(ModelError, match=r"the weights of mine have moved to shared memory .*; open a new one"):
            mine.model(**session.continue_with(token_ids(9)))
    with csattn_session(mine, artifact) as session:
        assert torch.equal(mine.model(**session.continue_with(token_ids(9))).logits, want)


def test_a_model_whose_change_was_undone_needs_a_new_session(artifact, mine) -> None:
    weight = mine.model.model.layers[1].mlp.up_proj.weight
    with csattn_session(mine, artifact) as session, torch.no_grad():
        before = weight.clone()
        weight.add_(1)
        weight.copy_(before)
        with pytest.raises(ModelError, match="undo that and open a new session"):
            mine.model(**session.continue_with(token_ids(9)))
    with csattn_session(mine, artifact) as session:
        mine.model(**session.continue_with(token_ids(9)))


class Copies(TorchDispatchMode):
    """Records the shapes of tensors that are cloned."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_checking_a_transposed_weight_makes_no_copy(artifact, mine) -> None:
    weight = mine.model.lm_head.weight
    with csattn_session(mine, artifact) as session:
        weight.data = weight.data.t().contiguous().t()
        with Copies() as copies:
            session.require_unchanged()
    assert not copies.shapes


def test_results_are_tuples_where_the_config_has_return_dict_false(artifact, mine) -> None:
    mine.model.config.return_dict = False
    with csattn_session(mine, artifact) as session:
        logits, cache = mine.model(**session.continue_with(token_ids(9)))
        as_dict = mine.model(**session.continue_with(token_ids(9)), return_dict=True)
    assert torch.equal(logits, as_dict.logits) and type(cache) is type(as_dict[CACHE])


def test_a_compiled_models_requests_are_not_compiled(artifact, mine) -> None:
    """Requests would be compiled anew for each length, until torch gives up compiling the model."""
    graphs = []

    def backend(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with csattn_session(mine, artifact) as session:
        want = mine.model.generate(**session.continue_with(token_ids(9)), max_new_tokens=4)
        mine.model.compile(backend=backend)
        got = mine.model.generate(**session.continue_with(token_ids(9)), max_new_tokens=4)
    assert torch.equal(got, want)
    assert not graphs
