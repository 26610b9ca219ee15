"""Documents on disk: what is read is what was written, and bad input is refused by line, key and value."""

import os
from typing import ClassVar

import pytest

from stagebreaker.profiles.document import Document, InputError, Model, load_yaml, nearest, write_atomic


class Part(Model):
    weight: float = 1.0


class Example(Document):
    WHAT: ClassVar[str] = "example"
    name: str
    count: int = 0
    parts: tuple[Part, ...] = ()


FULL = Example(name="é", count=3, parts=(Part(weight=0.5),))


def refusal(path):
    with pytest.raises(InputError) as error:
        Example.load(path)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def written(tmp_path, text, name="x.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# -- canonical form ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.json", "x.yaml"])
def test_load_gives_back_what_save_wrote(tmp_path, name):
    FULL.save(tmp_path / name)
    assert Example.load(tmp_path / name) == FULL
    assert Example.load(tmp_path / name).to_json() == (tmp_path / name).read_text("utf-8")


def test_canonical_form():
    assert (
        Example(name="é", parts=(Part(weight=0.5),)).to_json()
        == """{
  "schema_version": 1,
  "name": "é",
  "count": 0,
  "parts": [
    {
      "weight": 0.5
    }
  ]
}
"""
    )


def test_equal_documents_have_equal_bytes_and_hashes(tmp_path):
    one = Example.load(written(tmp_path, "name: a\ncount: 2\n", "1.yaml"))
    other = Example.load(written(tmp_path, '{"count": 2, "name": "a", "schema_version": 1}', "2.json"))
    assert one == other
    assert (one.to_json(), one.digest()) == (other.to_json(), other.digest())
    assert one.digest() != FULL.digest()


def test_documents_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        FULL.count = 4


# -- refusals ----------------------------------------------------------------------------------------


def test_unknown_key_names_the_nearest(tmp_path):
    assert refusal(written(tmp_path, "name: a\ncuont: 2\n")) == ": unknown key 'cuont'; did you mean 'count'?"


def test_unknown_key_of_a_part_names_the_nearest_of_that_part(tmp_path):
    message = refusal(written(tmp_path, "name: a\nparts: [{wieght: 2.0}]\n"))
    assert message == ": unknown key 'parts.0.wieght'; did you mean 'weight'?"


def test_a_key_like_no_other_lists_all(tmp_path):
    assert refusal(written(tmp_path, "name: a\nzzz: 2\n")).endswith("known: count, name, parts, schema_version")


def test_missing_key(tmp_path):
    assert refusal(written(tmp_path, "count: 1\n")) == ": name is missing; add it"


@pytest.mark.parametrize("version", ["2", "0", "'1'", "null"])
def test_other_schema_versions_are_refused_by_name(tmp_path, version):
    message = refusal(written(tmp_path, f"schema_version: {version}\nname: a\n"))
    assert f"schema_version={load_yaml(version)!r} of this example is not 1" in message


def test_malformed_yaml_gives_the_line(tmp_path):
    assert refusal(written(tmp_path, "name: a\ncount: [1\nparts: []\n")).startswith(":3: not YAML (")


def test_malformed_json_gives_the_line(tmp_path):
    assert refusal(written(tmp_path, '{\n "name": "a",\n "count": }\n', "x.json")).startswith(":3: not JSON (")


def test_a_tab_in_yaml_is_not_a_traceback(tmp_path):
    assert "not YAML" in refusal(written(tmp_path, "name: a\n\tcount: 1\n"))


@pytest.mark.parametrize(("text", "kind"), [("- 1\n", "list"), ("", "NoneType"), ("word\n", "str")])
def test_what_is_no_mapping_is_refused(tmp_path, text, kind):
    assert refusal(written(tmp_path, text)) == f": a example is a mapping of fields, got {kind}"


@pytest.mark.parametrize("weight", [".nan", ".inf", "-.inf"])
def test_numbers_that_are_none_are_refused_in_yaml(tmp_path, weight):
    assert "parts.0.weight" in refusal(written(tmp_path, f"name: a\nparts: [{{weight: {weight}}}]\n"))


@pytest.mark.parametrize("weight", ["NaN", "Infinity"])
def test_numbers_that_are_none_are_refused_in_json(tmp_path, weight):
    text = f'{{"name": "a", "parts": [{{"weight": {weight}}}]}}'
    assert "parts.0.weight" in refusal(written(tmp_path, text, "x.json"))


@pytest.mark.parametrize("count", ["'3'", "3.0", "true", "null", "2020-01-01"])
def test_nothing_is_converted_in_silence(tmp_path, count):
    refusal(written(tmp_path, f"name: a\ncount: {count}\n"))


def test_a_missing_file_is_named(tmp_path):
    assert refusal(tmp_path / "none.yaml") == ": no such file; give the path of an existing file"


def test_a_folder_is_no_file(tmp_path):
    assert "not a file; give the file itself" in refusal(tmp_path)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(tmp_path / "x.yaml")


# -- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("1.e2", 100.0),
        ("12", 12),
        ("0.5", 0.5),
    ],
)
def test_numbers_in_yaml(text, value):
    found = load_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["e5", "1e", "1e-", "+", "a1e5", "1e5x"])
def test_words_stay_words(text):
    assert load_yaml(text) == text


def test_yaml_runs_no_code(tmp_path):
    message = refusal(written(tmp_path, "name: !!python/object/apply:os.getcwd []\n"))
    assert "not YAML" in message


# -- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["replace", "fsync", "chmod"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "x.json"
    FULL.save(path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        Example(name="new").save(path)
    monkeypatch.undo()
    assert Example.load(path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_writing_makes_folders_and_replaces_the_file(tmp_path):
    path = tmp_path / "a" / "b" / "x.txt"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_document_with_nan_is_not_written(tmp_path):
    broken = Part.model_construct(weight=float("nan"))
    document = Example.model_construct(schema_version=1, name="a", count=0, parts=(broken,))
    with pytest.raises(ValueError, match="not JSON compliant"):
        document.save(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "ending"),
    [("mergd", "did you mean 'merged'?"), ("zzzz", "known: colocated, merged")],
)
def test_nearest(name, ending):
    assert nearest(name, ["merged", "colocated"]) == ending
