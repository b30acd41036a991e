from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from distmp.checkpoint.location import Location, RemotePath, check_reachable, locate
from distmp.errors import ConfigError


@pytest.fixture(params=["local", "file", "memory", "chained"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A location of each kind that does not exist yet."""
    name = uuid.uuid4().hex
    texts = {
        "local": f"{tmp_path}/{name}",
        "file": f"file://{tmp_path}/{name}",
        "memory": f"memory://bucket/{name}/",
        "chained": f"dir::file://{tmp_path}/{name}",
    }
    found = locate("checkpoint.path", texts[request.param])
    assert isinstance(found, Path if request.param in ("local", "file") else RemotePath)
    return found


def test_files_and_folders(place: Location) -> None:
    assert not place.exists()
    assert not place.is_dir()
    (place / "a").mkdir(parents=True)
    (place / "a").mkdir(exist_ok=True)
    assert (place / "a" / "x").write_bytes(b"12345") == 5
    with (place / "a" / "y").open("wb") as file:
        file.write(b"123")
    assert {path.name for path in (place / "a").iterdir()} == {"x", "y"}
    assert [path.name for path in place.iterdir()] == ["a"]
    assert (place / "a").is_dir()
    assert not (place / "a").is_file()
    assert (place / "a" / "x").is_file()
    assert (place / "a" / "x").stat().st_size == 5
    (place / "a" / "x").rename(place / "a" / "z")
    assert not (place / "a" / "x").exists()
    assert (place / "a" / "z").read_bytes() == b"12345"
    with (place / "a" / "z").open("rb") as file:
        file.seek(3)
        assert file.read() == b"45"
    with pytest.raises(FileNotFoundError):
        (place / "a" / "x").read_bytes()
    with pytest.raises(FileNotFoundError):
        (place / "a" / "x").unlink()
    (place / "a" / "x").unlink(missing_ok=True)
    (place / "a" / "y").unlink()
    assert [path.name for path in (place / "a").iterdir()] == ["z"]


def test_names(place: Location) -> None:
    below = place / "a" / "b.c"
    assert below.name == "b.c"
    assert below.parent.name == "a"
    assert below.parent == place / "a"
    assert len({below, place / "a" / "b.c", place}) == 2
    assert below.resolve().parent == (place / "a").resolve()


def test_a_url_is_shown_as_it_was_given() -> None:
    place = locate("checkpoint.path", "memory://bucket/run/")
    assert str(place / "step-000001") == "memory://bucket/run/step-000001"


@pytest.mark.parametrize(
    ("text", "problem"),
    [("nothing://bucket", "Protocol not known: nothing"), ("oci://bucket", "Install ocifs")],
)
def test_what_cannot_be_reached_is_an_error_of_the_setting(text: str, problem: str) -> None:
    for setting, settings in (("checkpoint.path", (text, None)), ("resume", (None, text))):
        with pytest.raises(ConfigError, match=problem) as error:
            check_reachable(*settings)
        assert error.value.setting == setting
    check_reachable(None, "auto")
