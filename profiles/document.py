"""Documents on disk: one strict, frozen base for workload, cluster, profile, plan and certificate.

Every document is a pydantic model that refuses unknown keys and names the nearest known one, carries a
``schema_version``, and has one canonical JSON form, so that equal documents have equal bytes and equal hashes.
All bad input ends in an ``InputError`` of one line: what was given, what is allowed, how to mend it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class InputError(ValueError):
    """Bad input. The message is one line for a person; commands print it and exit with code 2."""


class Model(BaseModel):
    """A frozen part of a document: unknown keys are errors, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Document(Model):
    """A whole document on disk."""

    SCHEMA: ClassVar[int] = 1
    WHAT: ClassVar[str] = "document"
    schema_version: int = 1

    @classmethod
    def parse(cls, data: object, where: str) -> Self:
        """Validate plain data read from ``where``; raise ``InputError`` naming the first thing that is wrong."""
        if not isinstance(data, Mapping):
            raise InputError(f"{where}: a {cls.WHAT} is a mapping of fields, got {type(data).__name__}")
        version = data.get("schema_version", cls.SCHEMA)
        if version != cls.SCHEMA:
            raise InputError(
                f"{where}: schema_version={version!r} of this {cls.WHAT} is not {cls.SCHEMA}; "
                f"make it again with this version of stagebreaker"
            )
        try:
            # Through JSON: lists become tuples and nothing else is converted (strict mode knows JSON's types).
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise InputError(f"{where}: {explain(error, cls)}") from None
        except (TypeError, ValueError) as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML or JSON file."""
        return cls.parse(read_mapping(path), str(path))

    def to_json(self) -> str:
        """The canonical form: fields in their declared order, two spaces, one newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        """Write atomically: a reader sees the old file or the whole new one."""
        write_atomic(path, self.to_json())

    def digest(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def read_mapping(path: Path) -> Any:
    """YAML (JSON is a subset) from ``path``; ``InputError`` for a missing or malformed file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of an existing file") from None
    except (IsADirectoryError, NotADirectoryError):
        raise InputError(f"{path}: not a file; give the file itself") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); give a readable text file") from None
    try:
        if path.suffix == ".json":
            return json.loads(text)
        return load_yaml(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg}); mend that line") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise InputError(f"{path}{line}: not YAML ({problem}); mend that line") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.2's idea of a number: PyYAML alone reads ``1e-4`` as a word."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def load_yaml(text: str) -> Any:
    """Plain data from YAML (JSON is a subset)."""
    return yaml.load(text, Loader=_Loader)


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to a neighbour of ``path``, flush it to disk, rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


NAMES_SHOWN = 12
"""How many known names an error lists."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"known: {', '.join(names[:NAMES_SHOWN])}{more}"


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line about the first of pydantic's findings; a misspelt key is also a missing one and is named as such."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        owner = _model_at(model, first["loc"][:-1])
        return f"unknown key {path!r}; {nearest(str(first['loc'][-1]), owner.model_fields)}"
    if first["type"] == "missing":
        return f"{path} is missing; add it"
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return reason if not path or path in reason else f"{path}: {reason}"
    wanted = {"tuple_type": "must be a list, such as [1, 2]", "dict_type": "must be a mapping of names to values"}
    message = wanted.get(first["type"], f"{first['msg'][0].lower()}{first['msg'][1:]}")
    return f"{path}={_shown(first['input'])}: {message}"


def _shown(value: object) -> str:
    """A value in an error: whole if it is short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    """The model that owns the key behind ``loc``, looking through containers."""
    for part in loc:
        if not isinstance(part, str) or part not in model.model_fields:
            continue
        found = _first_model(model.model_fields[part].annotation)
        if found is not None:
            model = found
    return model


def _first_model(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _first_model(inner)
        if found is not None:
            return found
    return None
