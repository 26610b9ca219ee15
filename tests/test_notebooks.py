"""Notebooks: saved without outputs, on public functions of the light packages, and true when they are run.

Each is executed once, in a kernel of this interpreter, and what its readings say is looked up in what it printed.
"""

import ast
import importlib
import re
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
OURS = tuple(f"stagebreaker.{folder}." for folder in ("profiles", "sim", "placement"))
LOADED = "import sys; print(sys.executable); print(*sorted({name.partition('.')[0] for name in sys.modules}))"
STUDIES = ("Candidates", "GPUs", "Reward latency", "Video length", "Mini-batches", "LoRA rank", "Judge serving")

pytestmark = pytest.mark.parametrize("name", NAMES)


class ThisInterpreter(KernelSpecManager):
    """Whatever kernels the user has registered, the one that runs is of the interpreter that runs the tests."""

    def get_kernel_spec(self, kernel_name):
        """One kernel under every name; it keeps no history."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "--HistoryManager.enabled=False", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


@lru_cache
def executed(name):
    """(the notebook with its outputs, what its kernel had loaded at the end)."""
    notebook = read(name)
    notebook.cells.append(nbformat.v4.new_code_cell(LOADED))
    with TemporaryDirectory() as folder:  # sockets in a folder of their own: no ports, nothing left behind
        manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter(), transport="ipc", ip=f"{folder}/kernel")
        NotebookClient(notebook, km=manager, timeout=120).execute()
    return notebook, notebook.cells.pop().outputs[0].text.split()


def code(notebook):
    """The code of a notebook, magics left out."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("%"))


def sections(notebook):
    """Heading -> its cells, each section from a heading of level 2 to the next."""
    found = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found[cell.source.partition("\n")[0].removeprefix("## ")] = []
        if found:
            found[next(reversed(found))].append(cell)
    return found


def outputs(cells):
    return [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]


def test_it_is_valid_and_stripped(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.metadata.kernelspec.name) == (4, "python3")
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert cell.metadata == {}
        assert cell.cell_type != "code" or (cell.outputs, cell.execution_count) == ([], None)


def test_it_imports_public_names_of_the_light_packages(name):
    imports = [node for node in ast.walk(ast.parse(code(read(name)))) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    allowed = {*sys.stdlib_module_names, "numpy", "pandas", "matplotlib"}
    for node in imports:
        modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for module in modules:
            assert module.startswith(OURS) or module.partition(".")[0] in allowed, module
            assert "._" not in module, module
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            assert not alias.name.startswith("_"), alias.name
            assert hasattr(importlib.import_module(node.module), alias.name), alias.name


def test_it_reaches_into_nothing_private(name):
    used = [node.attr for node in ast.walk(ast.parse(code(read(name)))) if isinstance(node, ast.Attribute)]
    assert [attribute for attribute in used if attribute.startswith("_")] == []


def test_it_holds_no_logic(name):
    """What branches, loops or takes more than a line belongs into a module, where it is tested."""
    statements = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.ClassDef)
    tree = ast.parse(code(read(name)))
    assert [type(node).__name__ for node in ast.walk(tree) if isinstance(node, statements)] == []
    assert all(len(node.body) == 1 for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_it_runs_without_an_engine(name):
    notebook, (interpreter, *loaded) = executed(name)
    assert interpreter == sys.executable
    assert "simpy" in loaded
    assert not {"torch", "ray", "diffusers", "transformers"} & set(loaded)
    said = [output.text for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output]
    assert [text for text in said if "Warning" in text] == []


def test_every_section_ends_in_a_figure_and_its_reading(name):
    notebook, _ = executed(name)
    for heading, cells in sections(notebook).items():
        assert cells[-1].source.startswith("**Reading.** "), heading
        if heading != "Published and reproduced":
            assert cells[-2].cell_type == "code", heading
            assert ["image/png" in data for data in outputs(cells[-2:])] == [True], heading


def test_its_readings_say_what_it_printed(name):
    """Every ``1.26x`` of a section stands, rounded, in one of the section's tables."""
    notebook, _ = executed(name)
    checked = 0
    for heading, cells in sections(notebook).items():
        printed = " ".join(data.get("text/plain", "") for data in outputs(cells))
        numbers = {round(float(number), 2) for number in re.findall(r"\d+\.\d+", printed)}
        for claim in re.findall(r"(\d+\.\d\d)x", cells[-1].source):
            assert float(claim) in numbers, f"{heading}: {claim}x is in no table"
            checked += 1
    assert checked >= 4


def test_the_studies_are_there(name):
    headings = " / ".join(sections(read(name)))
    wanted = STUDIES if name == "what_if" else ("Published and reproduced", "Figure 16", "Figure 9", "Figure 3")
    assert [study for study in wanted if study not in headings] == []
