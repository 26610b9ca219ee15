"""How each kind of task is drawn: the Okabe-Ito palette and its tints, safe for colour-blind readers.

Fills differ in lightness where the same GPU does one kind after the other, and every longer kind has a hatch
of its own, so that a picture survives grey print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stagebreaker.sim.dataflow import REQUEST
from stagebreaker.sim.timeline import Row


@dataclass(frozen=True, slots=True)
class Style:
    """Fill and outline colour, and matplotlib's hatch pattern."""

    fill: str
    line: str
    hatch: str


STYLES: dict[str, Style] = {
    "encode_prompt": Style("#4D4D4D", "#1A1A1A", ""),
    "generate": Style("#56B4E9", "#2B7CAB", ""),
    "vae_decode": Style("#E69F00", "#9C6B00", "////"),
    "score": Style("#CC79A7", "#8E3F6B", "...."),
    REQUEST: Style("#EBC9DB", "#8E3F6B", ""),
    "old_replay": Style("#F0E442", "#A39A12", "----"),
    "ref_replay": Style("#F7F2B0", "#A39A12", "||||"),
    "loss_replay": Style("#99D8C4", "#2F8F73", "\\\\\\\\"),
    "grad_replay": Style("#009E73", "#00573F", "xxxx"),
    "fold": Style("#0072B2", "#003E61", ""),
    "update": Style("#D55E00", "#7A3600", "++++"),
    "switch": Style("#BDBDBD", "#6E6E6E", "oo"),
}
"""Kinds in the order of the legend."""

WAITS: dict[str, Style] = {
    "waits for rewards": Style("#FBF1F6", "#8E3F6B", "..."),
    "other waiting": Style("#EFEFEF", "#8A8A8A", ""),
}
"""Idle time before a lane's last task; after it the lane is white."""


def waiting(cause: str) -> str | None:
    """Which of ``WAITS`` a cause of idle time is drawn as; None is not drawn."""
    if cause == "tail":
        return None
    return "waits for rewards" if cause == "wait:reward" else "other waiting"


BASELINE_FILL, BAR_FILL, INK = "#BDBDBD", "#56B4E9", "#333333"


def labels(row: Row) -> list[str]:
    """What a bar may say, best first: its candidate and steps, or who is in the batch, or how many."""
    if row.kind == REQUEST:
        return []
    if row.candidate is not None:
        steps = row.steps.replace(" ", ",")
        return [f"{row.candidate} k{steps}", str(row.candidate)] if steps else [str(row.candidate)]
    if row.members:
        members = row.members.split()
        return [", ".join(members), f"{len(members)} requests"]
    name = row.task.partition(":")[2]
    if name.startswith("anchor"):
        return [name, name.replace("anchor", "a")]
    return []


def text_points(text: str, size: float) -> float:
    """Width of a label in points: a digit of DejaVu Sans is 0.64 em, a mark about half of that."""
    marks = sum(not c.isalnum() for c in text)
    return size * (0.64 * (len(text) - marks) + 0.36 * marks)


@dataclass(frozen=True, slots=True)
class Series:
    """Look of one bar or line among several: they differ in lightness, hatch, marker and dashes, not only in hue."""

    colour: str
    hatch: str
    marker: str
    dashes: Literal["-"] | tuple[float, tuple[float, ...]]


SERIES = (
    Series("#000000", "", "o", "-"),
    Series("#E69F00", "////", "s", (0, (5, 2))),
    Series("#56B4E9", "....", "^", (0, (1, 1))),
    Series("#009E73", "xxxx", "D", (0, (4, 1, 1, 1))),
    Series("#D55E00", "\\\\\\\\", "v", (0, (3, 1, 1, 1, 1, 1))),
    Series("#0072B2", "++++", "P", (0, (7, 1))),
    Series("#CC79A7", "oo", "X", (0, (2, 2))),
    Series("#7F7F7F", "----", "*", (0, (1, 3))),
)
