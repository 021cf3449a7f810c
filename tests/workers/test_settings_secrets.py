"""API keys are read from a file, compared, and never shown."""

from pathlib import Path

import pytest

from csattn.errors import ConfigError
from workers.settings import Secret, ServerSettings, describe, load_settings


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    key_file = written(tmp_path / "keys", "hush-2\n")
    environment = {"CSATTN_SERVER_API_KEYS": "hush-1", "CSATTN_SERVER_API_KEY_FILE": str(key_file)}
    loaded = load_settings(None, environment, {})
    assert loaded.settings.server.api_keys == (Secret("hush-1"), Secret("hush-2"))
    for shown in (repr(loaded), str(loaded.settings), repr(describe(loaded)), f"{loaded.settings.server.api_keys[0]}"):
        assert "hush" not in shown
        assert "***" in shown
    described = describe(loaded)["server.api_keys"]
    assert described == {"value": ["***", "***"], "origin": f"environment CSATTN_SERVER_API_KEYS and {key_file}"}


@pytest.mark.parametrize(
    "text", ["server.api_keys = 'hush'", "server.api_keys = ['hush hush']", "server.api_keys = ['hush', 1]"]
)
def test_a_refused_secret_is_not_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys \(file .*, line 1\)") as refused:
        load_settings(written(tmp_path / "c.toml", text), {}, {})
    assert "hush" not in str(refused.value)
    with pytest.raises(ConfigError, match="line 1") as refused:
        load_settings(written(tmp_path / "c.toml", "server.api_keys = [hush"), {}, {})
    assert "hush" not in str(refused.value)


def test_a_number_sign_within_a_key_is_no_comment(tmp_path: Path) -> None:
    keys = written(tmp_path / "keys", "#none\nhush#1 # the first\n\t# none\n")
    server = load_settings(None, {}, {"server.api_key_file": keys}).settings.server
    assert server.admits("hush#1") and not server.admits("hush")


@pytest.mark.parametrize(("content", "words"), [("# none\n", "holds no key"), ("a b\n", "line 1 of"), ("é\n", "ASCII")])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(None, {}, {"server.api_key_file": written(tmp_path / "keys", content)})


def test_only_a_configured_key_is_admitted() -> None:
    assert ServerSettings().admits(None)
    server = ServerSettings(host="0.0.0.0", api_keys=(Secret("a-key"), Secret("b-key")))
    assert server.admits("a-key") and server.admits("b-key")
    assert not any(server.admits(key) for key in (None, "", "a-ke", "a-keyy", "A-KEY", "é"))
