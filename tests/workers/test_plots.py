"""The picture of the rows attended to is written, has the promised size, and differs where the rows read differ."""

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from csattn.config import SearchConfig
from workers.plots import PICTURE_SIZE, AttentionPicture, draw_attention_map


def draw(path: Path, pictures: list[AttentionPicture], context_len: int = 1000) -> bytes:
    draw_attention_map(pictures, path, context_len, SearchConfig(window_len=64, keep=0.05))
    return path.read_bytes()


def make_picture(rng: np.random.Generator, num_layers: int, num_kv_heads: int, answer_at: int) -> AttentionPicture:
    return AttentionPicture(
        "Who keeps the light, and why is this question far longer than any title over a map should ever be?",
        "Nobody.",
        answer_at,
        rng.random((num_layers, num_kv_heads, 128)),
        rng.random((num_layers, num_kv_heads)),
    )


@pytest.mark.parametrize(("num_pictures", "num_layers", "num_kv_heads"), [(1, 1, 1), (3, 30, 3)])
def test_the_picture_is_a_png_of_the_documented_size(tmp_path, rng, num_pictures, num_layers, num_kv_heads):
    pictures = [make_picture(rng, num_layers, num_kv_heads, 100 + number) for number in range(num_pictures)]
    png = draw(tmp_path / "new" / "map.png", pictures)
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", png[16:24]) == PICTURE_SIZE


def test_a_picture_without_reads_can_be_drawn(tmp_path):
    nothing = AttentionPicture("?", "", 0, np.zeros((2, 2, 128)), np.zeros((2, 2)))
    assert draw(tmp_path / "map.png", [nothing, nothing])


@pytest.mark.parametrize("answer", ["It costs $x_{1 and $6.", r"a $\foo$ b"])
def test_dollars_in_an_answer_are_no_formula(tmp_path, answer):
    assert draw(tmp_path / "map.png", [AttentionPicture("?", answer, 0, np.zeros((2, 2, 128)), np.zeros((2, 2)))])


def test_the_picture_depends_on_reads_recall_and_answer_position(tmp_path):
    values = {"answer_at": 500, "reads": np.full((2, 2, 128), 0.1), "recall": np.full((2, 2), 0.5)}
    other = {"answer_at": 200, "reads": np.full((2, 2, 128), 0.2), "recall": np.full((2, 2), 0.9)}
    before, again = (draw(tmp_path / "same.png", [AttentionPicture("?", "!", **values)]) for _ in range(2))
    assert before == again
    for changed, value in other.items():
        picture = AttentionPicture("?", "!", **{**values, changed: value})
        assert draw(tmp_path / "other.png", [picture]) != before, changed


def test_no_axis_label_overlaps_the_line_to_the_window(tmp_path, monkeypatch):
    drawn = []

    class Kept(Figure):
        def savefig(self, *args, **options):
            drawn.append(self)
            super().savefig(*args, **options)

    monkeypatch.setattr("workers.plots.Figure", Kept)
    draw(tmp_path / "map.png", [make_picture(np.random.default_rng(1), 2, 2, 100)], context_len=6353)
    [numbered] = [axes for axes in drawn[0].axes if axes.get_xlabel().startswith("position in the document")]
    assert 5000 in numbered.get_xticks() and max(numbered.get_xticks()) < 6000
