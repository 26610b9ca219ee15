"""Checkpoints: adapter, optimizer moments and step count, written whole or not at all.

A checkpoint folder is filled under another name and renamed into place, so a reader sees all of it or none. Noise is
counter-based, so these three are everything an exact resume needs. The adapter lies in PEFT's own format.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from stagebreaker.executor.kernels.update import FlatAdamW
from stagebreaker.executor.models.lora import FlatAdapter
from stagebreaker.profiles.document import InputError, read_mapping

KEEP = 2


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` finished steps lies."""
    return run / "checkpoints" / f"step-{step:06d}"


def latest(run: Path) -> tuple[int, Path] | None:
    """(finished steps, folder) of the newest complete checkpoint of a run."""
    found = sorted(p for p in (run / "checkpoints").glob("step-*") if (p / "state.json").is_file())
    return (int(found[-1].name.split("-")[1]), found[-1]) if found else None


def save(folder: Path, adapter: FlatAdapter, optimizer: FlatAdamW, step: int) -> None:
    """Write a checkpoint and drop all but the newest ``KEEP``."""
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    adapter.save(temporary / "adapter")
    save_file({k: v.contiguous() for k, v in optimizer.state_dict().items()}, temporary / "optimizer.safetensors")
    state = {"step": step, "adapter_version": adapter.version, "adapter_sha256": adapter.sha256()}
    (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    for old in sorted(folder.parent.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old)


def load(folder: Path, adapter: FlatAdapter, optimizer: FlatAdamW) -> dict[str, Any]:
    """Restore adapter and optimizer; ``InputError`` if the adapter is not the one that was saved."""
    state: dict[str, Any] = read_mapping(folder / "state.json")
    adapter.load_dir(folder / "adapter")
    adapter.version = state["adapter_version"]
    if adapter.sha256() != state["adapter_sha256"]:
        raise InputError(f"{folder}: the adapter's checksum is not the one in state.json; use an older checkpoint")
    optimizer.load_state_dict(load_file(folder / "optimizer.safetensors"))
    return state
