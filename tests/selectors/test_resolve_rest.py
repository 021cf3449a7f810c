"""How `rest` is resolved: the default for each index, the requested setting, and combinations that are refused."""

import pytest

from csattn.config import SearchConfig
from csattn.errors import ConfigError
from csattn.selector_names import SELECTOR_NAMES
from csattn.selectors import resolve_rest

PUBLISHED = [name for name in SELECTOR_NAMES if name not in ("csattn", "exact", "full")]


@pytest.mark.parametrize(("layout", "by_csattn"), [("sketch", "sketch"), ("lists", "none")])
@pytest.mark.parametrize("name", SELECTOR_NAMES)
def test_by_default_only_csattn_with_a_sketch_index_has_a_rest(name, layout, by_csattn) -> None:
    assert resolve_rest(SearchConfig(), name, layout) == (by_csattn if name == "csattn" else "none")


@pytest.mark.parametrize("name", ["csattn", "exact"])
def test_csattn_and_exact_accept_every_rest_that_their_index_supports(name) -> None:
    for rest in ("sketch", "moments", "none"):
        assert resolve_rest(SearchConfig(rest=rest), name, "sketch") == rest
    for rest in ("moments", "none"):
        assert resolve_rest(SearchConfig(rest=rest), name, "lists") == rest
    with pytest.raises(ConfigError, match="needs an index that is a sketch, and this context's has lists; build it"):
        resolve_rest(SearchConfig(rest="sketch"), name, "lists")


@pytest.mark.parametrize("rest", ["sketch", "moments"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_selectors_accept_no_rest(name, rest) -> None:
    with pytest.raises(
        ConfigError, match=f"rest {rest} works only with the selectors csattn and exact, and {name} works"
    ):
        resolve_rest(SearchConfig(rest=rest), name, "sketch")
    assert resolve_rest(SearchConfig(rest="none"), name, "sketch") == "none"


@pytest.mark.parametrize("rest", ["sketch", "moments", "none", None])
def test_full_attention_has_no_rest(rest) -> None:
    assert resolve_rest(SearchConfig(rest=rest), "full", "lists") == "none"


def test_an_unknown_rest_is_refused() -> None:
    with pytest.raises(ConfigError, match="rest must be one of sketch, moments, none"):
        SearchConfig(rest="codes")
