"""The prompts shipped for examples, tests and learning curves: one a line, in a fixed order.

They cover subject motion, camera motion and lengths from four to sixty words. A run's prompts for step s are
chosen by the caller; this module only reads the file. It knows no tokenizer and no model.
"""

from __future__ import annotations

from importlib.resources import files


def load_prompts() -> tuple[str, ...]:
    """All shipped prompts, in file order."""
    text = files("stagebreaker.executor.data").joinpath("prompts.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())
