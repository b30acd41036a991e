from __future__ import annotations

import collections
import sys
from pathlib import Path

import pytest

from distmp.errors import ConfigError
from distmp.utils.imports import load_object


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules of a user that is not on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my_parts").mkdir()
    (tmp_path / "my_parts" / "__init__.py").write_text("")
    (tmp_path / "my_parts" / "models.py").write_text("class Model:\n    size = 3\n")
    (tmp_path / "my_broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "my_faulty.py").write_text("1 / 0\n")
    return tmp_path


def test_objects_are_imported_by_path() -> None:
    assert load_object("model.name", "collections:OrderedDict") is collections.OrderedDict
    found = load_object("model.name", "collections:OrderedDict.fromkeys")
    assert found("ab") == {"a": None, "b": None}


def test_working_directory_is_searched(directory: Path) -> None:
    assert load_object("model.name", "my_parts.models:Model.size") == 3
    load_object("model.name", "my_parts.models:Model")
    assert sys.path.count(str(directory)) == 1


@pytest.mark.parametrize(
    "path", ["", "collections", "collections:", ":OrderedDict", ":", ".models:x", "..:x"]
)
def test_malformed_paths_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="write an import path"):
        load_object("model.name", path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_partz:x", "there is no module 'my_partz' on the Python path"),
        ("my_parts.modelz:x", r"there is no module 'my_parts\.modelz'"),
        (
            "my_parts.models.deep:x",
            r"there is no module 'my_parts\.models\.deep'|'my_parts\.models'",
        ),
        (
            "my_parts.models:Modle",
            r"module 'my_parts\.models' has no 'Modle'; did you mean 'Model'\?",
        ),
        ("my_parts.models:Model.length", r"has no 'Model\.length'"),
    ],
)
@pytest.mark.usefixtures("directory")
def test_missing_module_or_attribute_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_object("model.name", path)
    assert str(caught.value).startswith(f"model.name = {path!r}: ")


@pytest.mark.usefixtures("directory")
def test_errors_inside_module_keep_traceback() -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_object("model.name", "my_broken:Model")
    with pytest.raises(ZeroDivisionError):
        load_object("model.name", "my_faulty:Model")
