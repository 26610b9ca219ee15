"""What the documents show is true: examples parse, files that are named exist."""

import re
from pathlib import Path

import pytest
import yaml

from stagebreaker.sim.workload import Cluster, Workload

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```yaml (workload|cluster)\n(.*?)```", re.DOTALL)
EXAMPLES = BLOCK.findall((ROOT / "docs/documents.md").read_text(encoding="utf-8"))


def test_there_is_an_example_of_both():
    assert [kind for kind, _ in EXAMPLES] == ["workload", "cluster"]


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_examples_parse(kind, text):
    model = {"workload": Workload, "cluster": Cluster}[kind]
    assert model.parse(yaml.safe_load(text), "example").schema_version == 1


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:docs|sim|executor|placement|profiles|tests|benchmarks|constraints)/[\w./-]*)`", text))
    tree = text.split("## The tree")[1].split("\n## ")[0]
    for line in re.findall(r"^    (\S.*?)   ", tree, re.MULTILINE):
        folder = ""
        for part in re.split(r",\s*", line):
            folder = part.rsplit("/", 1)[0] + "/" if "/" in part else folder
            named.add(part if "/" in part else folder + part)
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
