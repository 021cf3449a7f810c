"""Messages to clients name files by their paths within the store; other paths and words are unchanged."""

from pathlib import Path

import pytest

from workers.serving.names_in_store import by_names_in_store


@pytest.mark.parametrize(
    ("store", "why", "told"),
    [
        ("store", "cannot read store/a/b: check the store", "cannot read a/b: check the store"),
        ("store", "cannot read /srv/bookstore/x", "cannot read /srv/bookstore/x"),
        ("store", "cannot read a store/x and /srv/store/x", "cannot read a x and /srv/store/x"),
        ("store", "cannot make '{here}/store/x' in {here}/store: no", "cannot make 'x' in the store: no"),
        ("store", "the store {here}/store has 0 bytes", "the store has 0 bytes"),
        ("{tmp}/link", "a {tmp}/link/x, b {tmp}/real/y, c {tmp}/real.", "a x, b y, c the store."),
        ("{tmp}/link", same := "{tmp}/linked/x, {tmp}/link.old, /mnt{tmp}/link/x", same),
        ("../aside", "cannot make ../aside: ../aside/x is there", "cannot make the store: x is there"),
        ("/", "cannot read /x", "cannot read /x"),
    ],
)  # fmt: skip
def test_only_whole_store_paths_are_removed_from_messages(store, why, told, tmp_path, monkeypatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    store, why, told = (text.format(tmp=tmp_path, here=tmp_path / "here") for text in (store, why, told))
    assert by_names_in_store(why, Path(store)) == told
