"""Test the files for Kubernetes in launch/ against the schemas of their objects."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from distmp.errors import STOPPED_EXIT_CODE, ConfigError
from tests import two_hosts
from tests.torchrun import environment

ROOT = Path(__file__).parent.parent.parent
FILES = ("kubernetes", "jobset", "trainjob")
# The oldest version with the current podFailurePolicy, and recent ones.
KUBERNETES_VERSIONS = ("1.31", "1.34", "1.37")
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
PAGE = ROOT / "docs" / "schedulers.md"


def objects(file: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by kind."""
    text = (ROOT / "launch" / f"{file}.yaml").read_text()
    return {entity["kind"]: entity for entity in yaml.safe_load_all(text)}


def job_set(file: str) -> dict[str, Any]:
    """Return the specification of a JobSet."""
    found = objects(file)
    return (
        found["JobSet"]["spec"]
        if file == "jobset"
        else found["TrainingRuntime"]["spec"]["template"]["spec"]
    )


def job_spec(file: str) -> dict[str, Any]:
    """Return the specification of the Job that creates the pods."""
    if file == "kubernetes":
        return objects(file)["Job"]["spec"]
    (job,) = job_set(file)["replicatedJobs"]
    return job["template"]["spec"]


def container(file: str) -> dict[str, Any]:
    """Return the container of a pod; a TrainJob replaces parts of its runtime."""
    (found,) = job_spec(file)["template"]["spec"]["containers"]
    if file != "trainjob":
        return found
    trainer = objects(file)["TrainJob"]["spec"]["trainer"]
    return {**found, **trainer, "resources": trainer["resourcesPerNode"]}


def unknown_parts(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the parts that a model has dropped or changed."""
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from unknown_parts(value, read.get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, value in enumerate(written):
            yield from unknown_parts(value, read[index], f"{path}[{index}]")
    elif written != read:
        yield path


def check(entity: dict[str, Any]) -> None:
    """Check an object with the models that Kubeflow generates from the definitions of both APIs."""
    model = MODELS[entity["kind"]].from_dict(entity)
    assert list(unknown_parts(entity, model.to_dict())) == []


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_pods_match_kubernetes_schema(file: str, version: str) -> None:
    spec = copy.deepcopy(job_spec(file))
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    assert kubernetes_validate.validate(job, version, strict=True) == version
    # The validation detects a wrong name.
    spec["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="onExitCode"):
        kubernetes_validate.validate(job, version, strict=True)


def test_service_matches_kubernetes_schema() -> None:
    kubernetes_validate.validate(objects("kubernetes")["Service"], "1.31", strict=True)


@pytest.mark.parametrize(
    ("file", "kinds"), [("jobset", ["JobSet"]), ("trainjob", ["TrainingRuntime", "TrainJob"])]
)
def test_files_match_jobset_and_kubeflow_schemas(file: str, kinds: list[str]) -> None:
    assert list(objects(file)) == kinds
    for entity in objects(file).values():
        check(entity)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [("numNode", 2, r"spec\.trainer\.numNode"), ("numNodes", "2", "valid integer")],
)
def test_schema_models_detect_mistakes(name: str, value: object, problem: str) -> None:
    train_job = objects("trainjob")["TrainJob"]
    train_job["spec"]["trainer"][name] = value
    with pytest.raises((AssertionError, ValueError), match=problem):
        check(train_job)


@pytest.mark.parametrize("file", FILES)
def test_objects_of_file_are_consistent(file: str) -> None:
    spec, pod = job_spec(file), job_spec(file)["template"]["spec"]
    ranks = container(file)
    mounts = {mount["name"]: mount["mountPath"] for mount in ranks["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert f"--run-dir={mounts['runs']}/distmp" in ranks["args"]
    assert ranks["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert pod["terminationGracePeriodSeconds"] >= 180
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {"values": []})["values"]:
            assert rule["onExitCodes"]["containerName"] == ranks["name"]
            actions[code] = rule["action"]
    assert actions == {ConfigError.exit_code: "FailJob", STOPPED_EXIT_CODE: "Ignore"}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    if file != "trainjob":
        assert spec["completions"] == spec["parallelism"] == 2
        assert {"--nnodes=2", "--nproc-per-node=8"} <= {*ranks["command"]}


def test_service_resolves_pods_before_ready() -> None:
    """It has to do so before they are ready."""
    service, job = objects("kubernetes").values()
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]


@pytest.mark.parametrize("file", ["jobset", "trainjob"])
def test_failed_pod_restarts_all_except_exit_code_2(file: str) -> None:
    policy = job_set(file)["failurePolicy"]
    assert job_spec(file)["backoffLimit"] == 0
    assert policy["maxRestarts"] == 3
    ((reason, action),) = [(r["onJobFailureReasons"], r["action"]) for r in policy["rules"]]
    # The reason of a Job that failed by a rule of its podFailurePolicy, here for exit code 2.
    assert (reason, action) == (["PodFailurePolicy"], "FailJobSet")


def test_train_job_uses_its_runtime() -> None:
    """Kubeflow finds the container by these names."""
    runtime, train_job = objects("trainjob").values()
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (job,) = job_set("trainjob")["replicatedJobs"]
    labels = job["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    assert (job["name"], container("trainjob")["name"]) == ("node", "node")
    assert "torch" in runtime["spec"]["mlPolicy"]


def test_kubernetes_page_agrees_with_files() -> None:
    section = PAGE.read_text().partition("\n## Kubernetes\n")[2]
    text = "".join((ROOT / "launch" / f"{file}.yaml").read_text() for file in FILES)
    for name in re.findall(r"`([a-zA-Z]+(?:Name|Policy|Seconds|Limit|Restarts|Nodes))`", section):
        assert name in text, name
    for file in FILES:
        assert f"`launch/{file}.yaml`" in section
        assert "--run-dir=/runs/distmp" in container(file)["args"]
    assert f"exit code {STOPPED_EXIT_CODE}" in section


def test_job_set_runs_job_command() -> None:
    assert container("jobset")["command"] == container("kubernetes")["command"]


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["kubernetes", "trainjob"])
def test_pod_commands_connect_all_pods(file: str) -> None:
    """The commands in the files work in the environment that kubelet creates."""
    reason = two_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    ranks = container(file)
    # As the controllers name the pods; a JobSet gives them its name as the subdomain.
    prefix = "distmp" if file == "kubernetes" else "distmp-node-0"
    domain = "distmp.default.svc.cluster.local"
    launch = [sys.executable, *ranks["command"][1:]]
    launch.insert(launch.index("launch") + 1, "--dry-run")
    with two_hosts.two_hosts((f"{prefix}-0.{domain}", f"{prefix}-1.{domain}")) as hosts:
        for index in range(2):
            pod = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{prefix}-{index}"}
            if file == "trainjob":
                pod |= {
                    "PET_NNODES": str(ranks["numNodes"]),
                    "PET_NPROC_PER_NODE": "8",
                    "PET_NODE_RANK": str(index),
                    # Kubernetes searches the domain; these hosts have only full names.
                    "PET_MASTER_ADDR": f"{prefix}-0.{domain}",
                    "PET_MASTER_PORT": "29400",
                }
            variables = {**environment(), **pod}
            output = hosts.run(index, *launch, *ranks["args"], cwd=ROOT, env=variables)
            assert f"JOB_COMPLETION_INDEX={index}" in output
            assert f"--rdzv-endpoint={two_hosts.ADDRESSES[0]}:" in output
            assert f"--local-addr={two_hosts.ADDRESSES[index]}" in output
            assert f"is_host={'true' if index == 0 else 'false'}" in output
            assert ("--nnodes=2 --nproc-per-node=8" in output) == (file != "trainjob")
