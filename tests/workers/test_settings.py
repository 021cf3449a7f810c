"""Settings: sources and their precedence, origins of values, and errors with remedies."""

import os
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csattn.config import PRESET_NAMES, SearchConfig
from csattn.errors import ConfigError
from workers.settings import UNTIL_CHOSEN, Secret, ServerSettings, Settings, example, load_settings
from workers.settings.load import OTHER_VARIABLES, nearest, variable_of
from workers.settings.parts import KEYS, SEARCH_WORDS, SECTIONS, BuildSettings, EngineSettings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_settings_without_any_source_are_the_defaults() -> None:
    loaded = load_settings(None, {"PATH": "/bin", "CSATTN_CACHE": "/tmp"}, {"server.port": None})
    assert loaded.settings == Settings()
    assert {leaf.origin.kind for leaf in loaded.leaves.values()} == {"default"}


def test_files_with_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys", "\ufeffone\r\ntwo\r\n")
    file = written(tmp_path / "c.toml", f"\ufeff[server]\r\napi_key_file = '{keys}'\r\n")
    assert [load_settings(file, {}, {}).settings.server.admits(key) for key in ("one", "two", "three")] == [1, 1, 0]


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = written(tmp_path / "c.toml", "[server]\nport = 1\nhost = 'localhost'\n\n[search]\nkeep = 0.1\n")
    environment = {"CSATTN_SERVER_PORT": "2", "CSATTN_SEARCH_KEEP": "0.2"}
    loaded = load_settings(file, environment, {"server.port": "3"})
    assert loaded.settings.server.port == 3
    assert loaded.settings.search == SearchConfig(keep=0.2)
    assert loaded.settings.server.host == "localhost"
    said = {key: str(loaded.leaves[key].origin) for key in ("server.port", "search.keep", "server.host", "store.path")}
    assert said == {
        "server.port": "flag",
        "search.keep": "environment CSATTN_SEARCH_KEEP",
        "server.host": f"file {file}, line 3",
        "store.path": "default",
    }


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    named, given = written(tmp_path / "a.toml", "server.port = 1"), written(tmp_path / "b.toml", "server.port = 2")
    environment = {"CSATTN_CONFIG": str(named)}
    loaded = load_settings(None, environment, {})
    assert (loaded.settings.server.port, loaded.file) == (1, named)
    assert str(loaded.leaves["server.port"].origin) == f"file {named}, line 1"
    assert load_settings(given, environment, {}).settings.server.port == 2


def test_every_setting_can_come_from_each_source(tmp_path: Path) -> None:
    values = {
        "server.access_log": True,
        "server.host": "::1", "server.port": 7, "server.api_keys": ["one", "two"], "limits.max_body_bytes": 4096,
        "limits.max_new_tokens": 8, "limits.max_concurrent_requests": 9, "limits.max_queued_requests": 0,
        "limits.request_timeout_s": 1.5, "limits.max_open_requests": 5, "limits.max_header_bytes": 2048,
        "limits.max_json_depth": 5, "limits.max_json_values": 500, "limits.max_question_chars": 77,
        "kept.memory_bytes": 78, "kept.disk_bytes": 79, "kept.context_bytes": 80, "kept.context_tokens": 81,
        "limits.body_timeout_s": 2.5, "limits.stall_timeout_s": 3.5, "model.name": "m", "model.weights": "int4",
        "build.preset": "lists", "build.dtype": "float16",
        "build.device": "cpu", "build.kmeans": "torch", "build.chat": False, "search.keep": 0.5, "search.sink_len": 0,
        "search.window_len": 9, "search.lookahead": 1, "search.search_period": 2,
        "search.rest": "moments", "engine.placement": "host", "engine.selector": "window",
        "engine.all_where_faster": True,
        "engine.draft_tokens": 3,
        "engine.slot_share": 0.5, "engine.tail_capacity": 7, "engine.num_threads": 3, "engine.num_devices": 2,
        "engine.num_search_workers": 2, "engine.num_contexts": 6, "engine.context_bytes": 5,
        "engine.max_context_len": 99,
        "engine.kv_codec": "k=q8_0,v=fp8",
        "ray.address": "auto", "ray.num_attention_workers": 2, "ray.num_ingress_replicas": 3, "store.path": "elsewhere",
    }  # fmt: skip
    values["server.allowed_origins"] = ["https://a.example", "http://localhost:3000"]
    key_file = written(tmp_path / "keys", "# ours\n\nthree # the third\n")
    values["server.api_key_file"] = str(key_file)
    assert values.keys() == KEYS.keys()
    as_text = {k: ",".join(v) if isinstance(v, list) else str(v) for k, v in values.items()}
    as_toml = "\n".join(
        f"{k} = {str(v).lower() if isinstance(v, bool) else v if isinstance(v, list | int | float) else repr(v)}"
        for k, v in values.items()
    )
    loads = [
        load_settings(written(tmp_path / "all.toml", as_toml), {}, {}),
        load_settings(None, {variable_of(key): text for key, text in as_text.items()}, {}),
        load_settings(None, {}, as_text),
        load_settings(None, {}, values),
    ]
    for kind, loaded in zip(("file", "environment", "flag", "flag"), loads, strict=True):
        assert loaded.settings == loads[0].settings
        assert {leaf.origin.kind for leaf in loaded.leaves.values()} == {kind}
    settings = loads[0].settings
    assert settings.server.api_keys == (Secret("one"), Secret("two"), Secret("three"))
    assert settings.server.allowed_origins == ("https://a.example", "http://localhost:3000")
    for key, value in values.items():
        section, name = key.split(".")
        if key not in ("server.api_keys", "server.allowed_origins"):
            assert str(getattr(getattr(settings, section), name)) == str(value)
            assert str(getattr(getattr(Settings(), section), name)) != str(value), f"{key} is what it is anyway"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", ["there is no setting server.prot", "c.toml, line 2", "did you mean server.port?"]),
        ("[servr]\nport = 1", ["no setting servr.port", "line 2", "did you mean server.port?"]),
        ("[servr]", ["no setting servr", "line 1"]),
        ("port = 1", ["no setting port", "line 1", "did you mean server.port?"]),
        ("server = 1", ["server (file", "is a section", "such as server.host"]),
        ("[server]\nzzz = 1", ["no setting server.zzz", "csattn config show"]),
        ("[server.tls]\ncert = 1", ["no setting server.tls"]),
        ("[server]\n\nport = '80'", ["server.port (file", "line 3", "is '80'", "wanted a whole number"]),
        ("[server]\nport = true", ["is True, wanted a whole number"]),
        ("[server]\nport = 65536", ["server.port must be at most 65535, got 65536 (file", "line 2"]),
        ("[server]\nhost = ''", ["server.host", "wanted text"]),
        ("[limits]\nrequest_timeout_s = nan", ["limits.request_timeout_s must be greater than 0, got nan (file"]),
        ("[limits]\nrequest_timeout_s = inf", ["must be at most 86400, got inf"]),
        ("[search]\nkeep = 2", ["search.keep must be more than 0 and at most 1, got 2.0 (file", "line 2"]),
        ("[search]\nlookahead = 3", ["search.lookahead must be one of 0, 1, got 3"]),
        ("[search]\nrest = 'codes'", ["search.rest", "is 'codes', wanted one of sketch, moments, none"]),
        ("[engine]\nplacement = 'gpu'", ["is 'gpu', wanted one of auto, cpu, device, hybrid, host"]),
        ("[engine]\nslot_share = 0.0", ["engine.slot_share must be greater than 0"]),
        (
            "[engine]\nkv_codec = 'q9'",
            ["engine.kv_codec", "'q9' is not a format of keys or values; choose from float32"],
        ),
        ("[engine]\nkv_codec = 'v=fp8'", ["engine.kv_codec", "give one for both, such as q8_0, or one for each"]),
        ("[server]\nallowed_origins = 'https://a'", ["server.allowed_origins", "wanted a list of texts"]),
        ("[server]\nallowed_origins = [5]", ["server.allowed_origins", "wanted a list of texts"]),
        ("[server]\nallowed_origins = ['a.org']", ["server.allowed_origins has 'a.org', wanted * or", "line 2"]),
        ("[server]\nallowed_origins = ['https://a.org/']", ["without a path"]),
        ("[store]\npath = 5", ["store.path", "is 5, wanted a path"]),
        ('[store]\npath = "a\\u0000b"', ["store.path", "wanted a path"]),
        ("[build]\nchat = 'yes'", ["build.chat", "wanted true or false"]),
        ("[model]\nname = '" + "x" * 500 + "'\ndtype = 1", ["no setting model.dtype", "did you mean build.dtype?"]),
        ("[build]\ndtype = '" + "x" * 500 + "'", ["xxx...", "wanted one of auto, float32"]),
        ("[server]\nport = ", ["is not TOML", "Invalid value"]),
        ("[server]\nport = " + "[" * 5000 + "]" * 5000, ["nests lists or tables too deep"]),
        ("[server]\nhost = '0.0.0.0'", ["server.host is '0.0.0.0'", "no API key", "line 2"]),
        ("[server]\nhost = 'my-machine'", ["server.host is 'my-machine'", "no API key", "line 2"]),
        ("[limits]\nmax_concurrent_requests = 65537", ["limits.max_concurrent_requests must be at most 65536"]),
        ("[server]\napi_key_file = '/no/such'", ["server.api_key_file (file", "cannot read /no/such"]),
    ],
)  # fmt: skip
def test_an_invalid_settings_file_is_refused_with_the_reason(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(written(tmp_path / "c.toml", text), {}, {})
    for word in words:
        assert word in str(refused.value)
    assert len(str(refused.value)) < 400


def test_an_empty_settings_file_gives_the_defaults(tmp_path: Path) -> None:
    for text in ("# nothing\n", "", "[server]\n"):
        assert load_settings(written(tmp_path / "c.toml", text), {}, {}).settings == Settings()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("c.yaml", b"{}", "got .*c.yaml; `csattn config example`"),
        ("c.toml", b"a = '\xe9'", "not UTF-8"),
        ("c.toml", b"a = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
        ("none.toml", None, "No such file"),
    ],
)
def test_an_unreadable_settings_file_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load_settings(tmp_path / name, {}, {})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CSATTN_SERVER_PROT": "1"}, "no setting CSATTN_SERVER_PROT (environment); did you mean CSATTN_SERVER_PORT?"),
        ({"CSATTN_PORT": "1"}, "did you mean CSATTN_SERVER_PORT?"),
        ({"CSATTN_SERVER_PORT": "x"}, "server.port (environment CSATTN_SERVER_PORT) is 'x', wanted a whole number"),
        ({"CSATTN_SERVER_PORT": ""}, "wanted a whole number"),
        ({"CSATTN_BUILD_CHAT": "perhaps"}, "wanted true or false"),
        (
            {"CSATTN_SEARCH_KEEP": "0"},
            "search.keep must be more than 0 and at most 1, got 0.0 (environment CSATTN_SEARCH_KEEP)",
        ),
    ],
)
def test_invalid_environment_variables_are_refused_with_the_reason(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(None, environment, {})
    assert words in str(refused.value)


def test_variables_that_kubernetes_sets_for_a_service_are_no_settings() -> None:
    """`docs/deploy` names the Service csattn, and KubeRay one csattn-...-head-svc: every pod gets these variables."""
    environment = {}
    for name in ("CSATTN", "CSATTN_SERVER", "CSATTN_X7K_HEAD_SVC"):
        environment |= {
            f"{name}_SERVICE_HOST": "10.0.0.11",
            f"{name}_SERVICE_PORT": "8000",
            f"{name}_SERVICE_PORT_HTTP": "8000",
            f"{name}_PORT": "tcp://10.0.0.11:8000",
            f"{name}_PORT_8000_TCP": "tcp://10.0.0.11:8000",
            f"{name}_PORT_8000_TCP_PROTO": "tcp",
            f"{name}_PORT_8000_TCP_PORT": "8000",
            f"{name}_PORT_8000_TCP_ADDR": "10.0.0.11",
        }
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert load_settings(None, environment | in_pod, {}).settings == Settings()
    for wrong in (environment, in_pod | {"CSATTN_PORT": "9000"}, in_pod | {"CSATTN_SERVER_PROT": "1"}):
        with pytest.raises(ConfigError, match=r"there is no setting CSATTN_|server\.port"):
            load_settings(None, wrong, {})
    assert load_settings(None, in_pod | {"CSATTN_SERVER_PORT": "9000"}, {}).settings.server.port == 9000


@pytest.mark.parametrize("url", ["s3://bucket/store", "memory://", "file:///data/store", "gs:/bucket"])
def test_a_store_url_is_refused_from_every_source(tmp_path: Path, url: str) -> None:
    file = written(tmp_path / "c.toml", f"[store]\npath = '{url}'")
    wanted = re.escape(
        f"store.path must be a directory, because a service writes into its store, got the URL {url[:2]}"
    )
    for sources, origin in [
        ((file, {}, {}), "c.toml"),
        ((None, {"CSATTN_STORE_PATH": url}, {}), "environment"),
        ((None, {}, {"store.path": url}), "flag"),
        ((None, {}, {"store.path": Path(url)}), "flag"),  # as the command line passes it
    ]:
        with pytest.raises(ConfigError, match=wanted + f".*{origin}"):
            load_settings(*sources)


@pytest.mark.parametrize("path", ["store", "/data/s3:/x", "./a:b/c", "c:/x"])
def test_a_path_with_a_colon_is_a_directory(path: str) -> None:
    assert load_settings(None, {}, {"store.path": path}).settings.store.path == Path(path)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no setting sever\.port \(flag\); did you mean server\.port\?"):
        load_settings(None, {}, {"sever.port": 1})


def test_an_empty_variable_counts_as_unset_for_optional_settings() -> None:
    settings = load_settings(None, {"CSATTN_ENGINE_NUM_THREADS": "", "CSATTN_SERVER_API_KEYS": ""}, {}).settings
    assert settings.engine.num_threads is None and settings.server.api_keys == ()


@pytest.mark.parametrize(
    ("part", "bad"),
    [
        (ServerSettings, {"port": -1}),
        (EngineSettings, {"placement": "gpu"}),
        *((EngineSettings, {"num_threads": n}) for n in (0, 10**6)),
        (EngineSettings, {"num_search_workers": 10**6}),
    ],
)
def test_settings_sections_are_validated_when_constructed(part: type, bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(bad))} must be"):
        part(**bad)


@pytest.mark.parametrize(("placement", "lookahead"), [("cpu", 0), ("device", 0), ("hybrid", 0), ("host", 1)])
def test_lookahead_defaults_by_placement_unless_set(placement: str, lookahead: int) -> None:
    loaded = load_settings(None, {"CSATTN_ENGINE_PLACEMENT": placement}, {})
    assert loaded.settings.search.lookahead == lookahead
    assert loaded.leaves["search.lookahead"].origin.kind == "default"
    said = load_settings(None, {"CSATTN_ENGINE_PLACEMENT": placement}, {"search.lookahead": 1 - lookahead})
    assert said.settings.search.lookahead == 1 - lookahead


def test_what_is_left_to_csattn_is_for_the_cpu_until_it_is_chosen() -> None:
    loaded = load_settings(None, {}, {"build.dtype": "auto"})
    assert (loaded.settings.engine.placement, loaded.settings.build.dtype) == ("cpu", "float32")
    assert loaded.left_to_csattn == ["engine.placement", "build.dtype"] == list(UNTIL_CHOSEN)
    assert {loaded.leaves[key].value for key in UNTIL_CHOSEN} == {"auto"}
    assert load_settings(None, {}, UNTIL_CHOSEN).left_to_csattn == []


def test_settings_can_be_pickled() -> None:
    settings = Settings(server=ServerSettings(api_keys=(Secret("k"),)))
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_example_file_holds_every_setting_at_its_default(tmp_path: Path) -> None:
    text = example()
    loaded = load_settings(written(tmp_path / "example.toml", text), {}, {})
    assert loaded.settings == Settings()
    for key, spec in KEYS.items():
        section, name = key.split(".")
        assert f"{'# ' if spec.default is None else ''}{name} =" in text.split(f"[{section}]")[1].split("\n[")[0]
        assert loaded.leaves[key].origin.kind == ("default" if spec.default is None else "file")


def test_setting_keys_are_unambiguous_and_documented() -> None:
    variables = [variable_of(key) for key in KEYS]
    assert len(set(variables)) == len(variables) and not OTHER_VARIABLES & set(variables)
    assert set(SEARCH_WORDS) == {item.name for item in fields(SearchConfig)}
    assert all(spec.words.endswith(".") for spec in KEYS.values())
    assert all(part.__doc__ for part in SECTIONS.values())


def test_setting_choices_equal_those_of_the_code() -> None:
    from workers.engine.gpu.engine import SLOT_SHARE
    from workers.engine.gpu.memory import PLACEMENTS
    from workers.engine.gpu.sizing import LEAST_OWN_ROWS

    assert get_args(get_type_hints(EngineSettings)["placement"]) == ("cpu", *PLACEMENTS)
    assert set(get_args(get_type_hints(BuildSettings)["preset"])) == set(PRESET_NAMES)
    assert EngineSettings().slot_share == SLOT_SHARE
    assert (
        EngineSettings().tail_capacity is None
        and f"but at least {LEAST_OWN_ROWS}" in KEYS["engine.tail_capacity"].words
    )


@given(st.sampled_from(sorted(KEYS)), st.data())
def test_a_key_with_a_missing_letter_is_recognised(key: str, data: st.DataObject) -> None:
    name = key.split(".")[1]
    gone = data.draw(st.integers(len(key) - len(name), len(key) - 1))
    meant = nearest(key[:gone] + key[gone + 1 :])
    assert meant is not None and (meant == key or meant.split(".")[0] == key.split(".")[0])


@given(st.sampled_from(sorted(KEYS)), st.text(max_size=20))
def test_any_text_is_accepted_or_refused_with_the_settings_name(key: str, text: str) -> None:
    environment = {variable_of(key): text}
    refused = None
    try:
        loaded = load_settings(None, environment, {})
    except ConfigError as error:
        refused = str(error)
    assert loaded.leaves[key].origin.where == variable_of(key) if refused is None else key in refused


def test_the_process_environment_is_accepted() -> None:
    load_settings(None, os.environ, {})
