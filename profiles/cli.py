"""What the three commands share: one line for bad input, exit codes, tables and progress.

Exit codes: 0 done; 1 a check failed; 2 bad input, with one line and no traceback; 3 a run failed. Tables and progress
are for people and go to a terminal; with ``--json`` standard output carries one JSON document and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stagebreaker.profiles.document import InputError

ENGINES = ("torch", "ray", "diffusers", "transformers", "peft", "safetensors", "PIL", "accelerate")
"""What only the full install brings."""

CHECK_FAILED, BAD_INPUT, RUN_FAILED, INTERRUPTED = 1, 2, 3, 130


class CheckFailedError(Exception):
    """A check the user asked for did not hold; exit code 1."""


class InterruptedRunError(Exception):
    """The user stopped a run; the message says how to go on; exit code 130."""


class RunFailedError(Exception):
    """A run broke off; the message names task and GPU and says how to resume; exit code 3."""


def run_app(app: typer.Typer) -> None:
    """Run a Typer application with this project's exit codes."""
    try:
        code = app(standalone_mode=False)
        if isinstance(code, int) and code:  # how typer reports Ctrl-C
            _fail("interrupted", code)
    except InputError as error:
        _fail(str(error), BAD_INPUT)
    except CheckFailedError as error:
        _fail(str(error), CHECK_FAILED)
    except RunFailedError as error:
        _fail(str(error), RUN_FAILED)
    except OSError as error:
        _fail(
            f"{error.filename or 'a file'}: {error.strerror or error}; give a path that can be read or written",
            BAD_INPUT,
        )
    except ModuleNotFoundError as error:
        if error.name not in ENGINES:
            raise
        _fail(f"this needs real engines and {error.name} is not installed; pip install 'stagebreaker[run]'", BAD_INPUT)
    except InterruptedRunError as error:
        _fail(str(error), INTERRUPTED)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        show = getattr(error, "format_message", None)  # the command line's own usage errors
        if show is None:
            if type(error).__name__ == "Abort":
                _fail("interrupted", INTERRUPTED)
            raise
        _fail(f"{show()}; see --help", BAD_INPUT)


def _fail(message: str, code: int) -> None:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stagebreaker {version('stagebreaker')}")
        raise typer.Exit


VersionFlag = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
]


def check_folder(out: Path) -> None:
    """Raise ``InputError`` if ``out`` cannot be a folder; makes nothing."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"--out {out}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK):
        raise InputError(f"--out {out}: {existing} cannot be written to; give another folder")


def check_file(out: Path) -> None:
    """Raise ``InputError`` if ``out`` cannot be a file; makes nothing."""
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; give a file")
    check_folder(out.parent)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, allow_nan=False))


def console() -> Console:
    """Where tables go: standard output, wide enough for them when it is no terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=120)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table: first column left, the others right."""
    made = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        made.add_column(column, justify="left" if n == 0 else "right", no_wrap=n == 0)
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal's standard error; one plain line elsewhere. Yields ``advance(n)``."""
    err = Console(stderr=True)
    if not err.is_terminal:
        print(f"{what}: {total} to do", file=sys.stderr)
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


def seconds(us: int) -> str:
    """A duration for people."""
    if us >= 10_000_000:
        return f"{us / 1e6:.1f} s"
    return f"{us / 1e6:.3f} s" if us >= 1_000_000 else f"{us / 1e3:.1f} ms"


def ratio(value: float | None, suffix: str = "x") -> str:
    """A ratio for people; a dash where it has no meaning."""
    return "-" if value is None else f"{value:.3f}{suffix}"


def share(value: float | None) -> str:
    """A share of time as per cent."""
    return "-" if value is None else f"{100 * value:.0f} %"
