"""Who may import whom, what the light packages load, and that packaging names every folder."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "profiles": set(),
    "sim": {"profiles"},
    "placement": {"sim", "profiles"},
    "executor": {"sim", "profiles"},
}
LIGHT = ("profiles", "sim", "placement")
HEAVY = ("torch", "ray", "diffusers", "transformers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SCRIPTS = PROJECT["project"]["scripts"]


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("stagebreaker", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported(tree):
    """Full names in the import statements below ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outside_functions(tree):
    """The same, but only what runs when the module is imported."""
    left = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(ast.Module([node], []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def folders(names):
    return {name.split(".")[1] for name in names if name.startswith("stagebreaker.")}


@pytest.mark.parametrize("folder", ALLOWED)
def test_import_direction(folder):
    assert sources(folder)
    for path in sources(folder):
        tree = ast.parse(path.read_text("utf-8"), str(path))
        names = list(outside_functions(tree) if path.name == "__main__.py" else imported(tree))
        assert folders(names) <= ALLOWED[folder] | {folder}, path
        bare = {name.split(".")[0] for name in names} & ALLOWED.keys()
        assert not bare, f"{path} imports {bare} without stagebreaker."


def test_functions_are_looked_into_and_left_out_where_they_should_be():
    text = "import a\nif x:\n    import b\nclass C:\n    import c\n    def f(self):\n        from d import e\n"
    tree = ast.parse(text)
    assert set(imported(tree)) == {"a", "b", "c", "d.e"}
    assert set(outside_functions(tree)) == {"a", "b", "c"}


def loaded_by(modules):
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_light_packages_load_no_engine():
    modules = [module_name(path) for folder in LIGHT for path in sources(folder)]
    assert "stagebreaker.sim.recurrence" in modules
    assert not loaded_by(modules) & set(HEAVY)


def test_profiles_loads_no_simulator():
    modules = [module_name(path) for path in sources("profiles")]
    assert "simpy" not in loaded_by(modules)


def test_the_check_sees_what_is_loaded():
    assert {"simpy", "pydantic"} <= loaded_by(["stagebreaker.sim.engine"])


def test_packaging_lists_every_folder():
    found = {module_name(path) for folder in ALLOWED for path in sources(folder) if path.name == "__init__.py"}
    setuptools = PROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(found)
    expected = {name: name.removeprefix("stagebreaker.").replace(".", "/") for name in found}
    assert setuptools["package-dir"] == expected


def test_every_folder_with_code_is_a_package():
    for folder in ALLOWED:
        for path in sources(folder):
            assert (path.parent / "__init__.py").exists(), path


def test_every_package_is_typed():
    assert all((ROOT / folder / "py.typed").exists() for folder in ALLOWED)


@pytest.mark.parametrize("script", SCRIPTS)
def test_entry_points_can_be_called(script):
    module, _, function = SCRIPTS[script].partition(":")
    assert module == f"stagebreaker.{script_folder(script)}.__main__"
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("script", SCRIPTS)
def test_entry_points_load_no_engine(script):
    assert not loaded_by([SCRIPTS[script].partition(":")[0]]) & set(HEAVY)


def script_folder(script):
    return {"profile": "profiles", "plan": "placement", "run": "executor"}[script.removeprefix("stagebreaker-")]
