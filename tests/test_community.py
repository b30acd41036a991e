"""Workflows and forms of the public repository name what exists, and are safe to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from distmp.cli import _SUBCOMMANDS

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: path for path in (GITHUB / "workflows").glob("*.yml")}
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
# What GitHub requires of an element of a form, by type.
REQUIRED = {"markdown": {"value"}, "textarea": {"label"}, "input": {"label"}}


def read(path: Path) -> dict[str, Any]:
    """Return a file; the YAML that GitHub reads has no boolean `on`."""
    return {
        "on" if key is True else key: value for key, value in yaml.safe_load(path.open()).items()
    }


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_runs_targets_that_exist_with_pinned_actions(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE)}
    workflow = read(WORKFLOWS[name])
    assert workflow["permissions"] == {"contents": "read"}
    runs = [step["run"] for step in steps(workflow) if "run" in step]
    commands = [re.sub(r"\$\{\{.*?\}\}", "VALUE", run) for run in runs]
    made = [word for run in commands if run.startswith("make ") for word in run.split()[1:]]
    assert made
    for word in made:
        variable, is_variable, _ = word.partition("=")
        assert f"$({variable})" in makefile if is_variable else word in targets, word
    for step in steps(workflow):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/none@v0"))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120


def test_ci_tests_every_python_of_the_classifiers() -> None:
    matrix = read(WORKFLOWS["ci"])["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text()
    assert {*re.findall(r"Python :: (3\.\d+)", project)} <= {*matrix}
    assert re.search(r'requires-python = ">=([\d.]+)"', project)[1] == matrix[0]  # type: ignore[index]
    assert f"| {matrix[0]} to {matrix[-1]} in CI |" in (ROOT / "README.md").read_text()


def test_no_pull_request_starts_code_on_own_machines() -> None:
    for path in WORKFLOWS.values():
        workflow = read(path)
        runners = [job["runs-on"] for job in workflow["jobs"].values()]
        if any("self-hosted" in runner for runner in runners):
            assert {*workflow["on"]} == {"workflow_dispatch", "schedule"}
        else:
            assert "pull_request_target" not in workflow["on"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_has_what_github_requires(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= {*form}
    fields = [element for element in form["body"] if element["type"] != "markdown"]
    assert any(element.get("validations", {}).get("required") for element in fields)
    assert len({element["id"] for element in fields}) == len(fields)
    for element in form["body"]:
        assert REQUIRED[element["type"]] <= {*element["attributes"]}
    text = path.read_text()
    assert {*re.findall(r"`distmp (\w+)`", text)} <= {*_SUBCOMMANDS}
    for name in re.findall(r"[\w/]+\.md", text):
        assert (ROOT / name).exists(), name
