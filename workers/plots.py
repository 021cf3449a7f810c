"""Pictures of what each head attended to."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from csattn.config import SearchConfig

PICTURE_SIZE = (1600, 960)  # pixels
_DPI = 100
_COLORS = "inferno"  # perceptually uniform, and safe for colour-blind readers
_BLUE = "#1f9ed1"  # not in the colour map
_RED = "#b3261e"
_TITLE_WIDTH = 38  # characters over one map
_TICKS = [0.0, 0.01, 0.05, 0.2, 0.5, 1.0]  # shares on the colour bar
_NUMBERED = 0.85  # share of a map's width, from its left, in which ticks have numbers
_LEAST = 1e-4  # lower bound of the shares that are compared between questions


@dataclass(frozen=True, slots=True)
class AttentionPicture:
    """What every head read while one question was answered."""

    question: str
    answer: str  # as the model gave it
    answer_at: int  # row of the context where the document states it
    reads: NDArray[np.float64]  # [num_layers, num_kv_heads, num_stretches], share of a stretch's rows read per step
    recall: NDArray[np.float64]  # [num_layers, num_kv_heads], share of the exact Top-K rows that were read


def draw_attention_map(
    pictures: Sequence[AttentionPicture], path: Path, context_len: int, config: SearchConfig
) -> None:
    """Write a PNG of `PICTURE_SIZE`: for each question a map of reads by head and position; at the right the recall."""
    assert pictures, "there is nothing to draw"
    num_layers, num_kv_heads, num_stretches = pictures[0].reads.shape
    figure = Figure(figsize=(PICTURE_SIZE[0] / _DPI, PICTURE_SIZE[1] / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    keep_text = f"{100 * config.keep:g} %"
    subtitle = (
        f"What each of {num_layers * num_kv_heads} KV heads read of {context_len} tokens, in {num_stretches} stretches,"
        f" per token of the answer. Besides the {keep_text}, always the first {config.sink_len} and the last "
        f"{config.window_len}."
    )
    figure.text(0.058, 0.955, f"Answered by reading {keep_text} of the document", fontsize=22, weight="bold")
    figure.text(0.058, 0.922, subtitle, fontsize=13, color="#444444")
    grid = figure.add_gridspec(
        2, len(pictures) + 1, left=0.058, right=0.985, top=0.77, bottom=0.19, wspace=0.09, hspace=0.06,
        height_ratios=[1, 4.6], width_ratios=[*[1.0] * len(pictures), 0.62],
    )  # fmt: skip
    mean_reads = [np.maximum(picture.reads.mean((0, 1)), _LEAST) for picture in pictures]
    usual = np.mean(mean_reads, axis=0)
    image, maps = None, []
    for column, picture in enumerate(pictures):
        above = figure.add_subplot(grid[0, column])
        _draw_profile(above, picture, mean_reads[column] / usual, context_len, is_first=column == 0)
        below = figure.add_subplot(grid[1, column])
        image = _draw_map(below, picture, context_len, is_first=column == 0)
        _mark_resident(below, context_len, config)
        maps.append(below)
    _draw_recall(figure.add_subplot(grid[1, len(pictures)]), np.mean([p.recall for p in pictures], axis=0), maps[0])
    _draw_color_bar(figure, image)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, pil_kwargs={"optimize": True})


def _draw_profile(
    axes: Any, picture: AttentionPicture, compared: NDArray[np.float64], context_len: int, is_first: bool
) -> None:
    """compared: [num_stretches], how many times as often a stretch was read as on average over the questions."""
    place = axes.get_xaxis_transform()
    texts = [(2.2, "top", "bold", picture.question), (1.18, "bottom", "normal", f"“{picture.answer}”")]
    for height, side, weight, text in texts:
        folded = "\n".join(textwrap.wrap(text, _TITLE_WIDTH, max_lines=2, placeholder=" …"))
        plain = {"parse_math": False, "weight": weight, "linespacing": 1.35}  # dollars in an answer are no formula
        axes.annotate(folded, (0, height), xycoords="axes fraction", fontsize=12, va=side, **plain)
    middles = (np.arange(len(compared)) + 0.5) * context_len / len(compared)
    axes.fill_between(middles, 1, compared, where=compared >= 1, color=_RED, interpolate=True, linewidth=0)
    axes.fill_between(middles, 1, compared, where=compared <= 1, color="#bdbdbd", interpolate=True, linewidth=0)
    axes.axvline(picture.answer_at, color=_BLUE, linewidth=1.4)
    axes.plot(picture.answer_at, 1.07, "v", color=_BLUE, markersize=10, clip_on=False, transform=place)
    is_left = picture.answer_at < context_len / 2
    axes.annotate(
        "the answer is here", (picture.answer_at, 1.07), xycoords=place, fontsize=11, va="center", color=_BLUE,
        ha="left" if is_left else "right", xytext=(9 if is_left else -9, 0), textcoords="offset points",
    )  # fmt: skip
    axes.set_xlim(0, context_len)
    axes.set_yscale("log")
    axes.set_ylim(1 / 3, 3)
    axes.set_yticks([0.5, 1, 2], ["half", "mean", "twice"] if is_first else ["", "", ""])
    axes.yaxis.minorticks_off()
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(labelsize=11)
    if is_first:
        axes.set_ylabel("against the\nquestions' mean", fontsize=11, labelpad=2)


def _draw_map(axes: Any, picture: AttentionPicture, context_len: int, is_first: bool) -> Any:
    num_layers, num_kv_heads, num_stretches = picture.reads.shape
    rows = picture.reads.reshape(num_layers * num_kv_heads, num_stretches)
    image = axes.imshow(
        rows, aspect="auto", interpolation="nearest", cmap=_COLORS, norm=PowerNorm(0.35, 0, 1),
        extent=(0, context_len, num_layers, 0),
    )  # fmt: skip
    axes.axvline(picture.answer_at, color=_BLUE, linewidth=1.4)
    axes.set_xlabel("position in the document (tokens)", fontsize=12, labelpad=22)
    shown = range(0, num_layers, max(1, num_layers // 6))
    axes.set_yticks([layer + 0.5 for layer in shown], [str(layer + 1) for layer in shown] if is_first else [])
    # no number where the line to the window's label goes down
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= _NUMBERED * context_len])
    if is_first:
        axes.set_ylabel(f"layer, {num_kv_heads} heads each", fontsize=12)
    axes.tick_params(labelsize=11)
    return image


def _mark_resident(axes: Any, context_len: int, config: SearchConfig) -> None:
    """Name the rows that are always read, under the map's two ends."""
    sinks = config.sink_len / 2, f"{config.sink_len} sinks", "left"
    window = context_len - config.window_len / 2, f"window, {config.window_len}", "right"
    for place, name, side in (sinks, window):
        axes.annotate(
            name, (place, 0), xycoords=axes.get_xaxis_transform(), xytext=(0, -36), textcoords="offset points",
            ha=side, va="center", fontsize=11, color="#444444", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#444444", "linewidth": 1},
        )  # fmt: skip


def _draw_recall(axes: Any, recall: NDArray[np.float64], aligned: Any) -> None:
    num_layers, num_kv_heads = recall.shape
    heights = (np.arange(recall.size) + 0.5) / num_kv_heads
    axes.hlines(heights, 0, recall.ravel(), color="#d5d5d5", linewidth=1.5)
    axes.scatter(recall.ravel(), heights, s=16, color=_RED, zorder=3)
    axes.axvline(recall.mean(), color="#444444", linewidth=1, linestyle="--")
    title = f"Recall of the exact Top-K rows\nmean {recall.mean():.2f}"
    axes.set_title(title, fontsize=12, loc="left", linespacing=1.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(num_layers, 0)
    axes.set_yticks(aligned.get_yticks(), [])
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.set_xlabel("share found, per layer and head", fontsize=12, labelpad=22)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11)


def _draw_color_bar(figure: Any, image: Any) -> None:
    bar = figure.colorbar(image, cax=figure.add_axes((0.30, 0.065, 0.32, 0.018)), orientation="horizontal")
    bar.set_ticks(_TICKS, labels=[f"{100 * share:g} %" for share in _TICKS])
    bar.ax.tick_params(labelsize=11)
    bar.ax.set_title("share of a stretch's rows that the head read", fontsize=12, pad=6)
