"""What every benchmark here writes: the conditions first, then numbers as medians with their spread.

One .json with every sample, one .md with the table; both carry the date in their names.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

# A script's folder is first on the path, where transformers would take kernels.py for the package of that name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]


Way = TypeVar("Way")


def conditions(*packages: str) -> dict[str, Any]:
    """Hardware, versions and how busy the machine is; take it before the first measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def rotated(ways: Mapping[str, Way], n: int) -> list[tuple[str, Way]]:
    """The ways to measure, starting with another one each round."""
    items = list(ways.items())
    return items[n % len(items) :] + items[: n % len(items)]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def cell(samples: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """``median (lower quartile to upper quartile)``."""
    s = spread(samples)
    return f"{s['median']:,.{digits}f}{unit} ({s['low']:,.{digits}f} to {s['high']:,.{digits}f})"


def write(out: Path, name: str, title: str, where: dict[str, Any], data: dict[str, Any], body: Sequence[str]) -> None:
    """``<name>-<date>.json`` and ``.md`` in ``out``; prints the latter."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{name}-{where['date']}.json"
    file.write_text(json.dumps({"benchmark": name, "conditions": where, **data}, indent=1) + "\n", "utf-8")
    line = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in where.items())
    text = "\n".join((f"# {title}", "", f"{line}. Medians, quartiles in brackets.", "", *body)) + "\n"
    file.with_suffix(".md").write_text(text, "utf-8")
    print(text)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; numbers to the right."""
    rule = ["---", *("---:" for _ in columns[1:])]
    return [f"| {' | '.join(row)} |" for row in (columns, rule, *rows)]
