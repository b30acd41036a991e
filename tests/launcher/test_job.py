from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.launcher.job import Job, detect, expand

# As the environments set them, reduced to the relevant variables.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "n[08-10]",
    "SLURM_NODELIST": "n[08-10]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8",
    "SLURM_JOB_NAME": "train",
    "SLURM_CLUSTER_NAME": "cluster",
}
SBATCH = {**SLURM, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n08"}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n09",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.0.8",
    # srun --mpi=pmi2 and --mpi=pmix
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "slurm.pmix.4711.2",
}
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-n08-77@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.2.0.4\n10.2.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-01-10-00-00-000000_cluster_1",
}
POD_NAME = "train-1.workers.space.svc.cluster.local"


def values(job: Job) -> tuple[object, ...]:
    explained = (job.nodes, job.node_rank, job.head, job.name)
    return job.environment, *(entry and entry.value for entry in explained)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, ("local", None, None, None, None), id="nothing"),
        pytest.param({"HOME": "/"}, ("local", None, None, None, None), id="a shell"),
        pytest.param(SRUN, ("slurm", 2, 1, "n08", "4711.2"), id="a step of srun"),
        pytest.param(
            {**SBATCH, "SLURM_JOB_NUM_NODES": "1"},
            ("slurm", 1, None, None, "4711"),
            id="a batch script on one machine",
        ),
        pytest.param(
            POD,
            ("kubernetes", None, 1, "train-0.workers.space.svc.cluster.local", "train"),
            id="a pod of an indexed Job",
        ),
        pytest.param(
            {"SKYPILOT_NUM_NODES": "1", "OMPI_COMM_WORLD_SIZE": "1"},
            ("local", None, None, None, None),
            id="one process of mpirun",
        ),
    ],
)
def test_environment_is_detected_from_variables(
    variables: dict[str, str], expected: tuple[object, ...]
) -> None:
    job = detect(variables, POD_NAME)
    assert values(job) == expected
    assert not job.notes


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(SBATCH, id="one script for all machines"),
        pytest.param(SLURM, id="a shell of salloc"),
        pytest.param({**SLURM, "SLURM_JOB_NUM_NODES": "1"}, id="one machine, another one"),
        # A shell on the first machine (LaunchParameters=use_interactive_step) is a special step.
        pytest.param({**SBATCH, "SLURM_STEP_ID": "4294967290"}, id="an interactive step"),
    ],
)
def test_several_slurm_machines_need_srun(variables: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"`srun --ntasks=\"\$SLURM_NNODES\" --ntasks-per-node=1 --cpu-bind=none distmp",
    ):
        detect(variables, "n08")
    assert detect(variables, "n08", "local").environment == "local"


def test_conflicts_are_explained() -> None:
    variables = {**SRUN, **POD}
    job = detect(variables, POD_NAME)
    assert job.environment == "kubernetes"
    (note,) = job.notes
    assert "selected kubernetes; also found slurm: SLURM_JOB_ID=4711" in note
    assert "`--environment slurm` selects that" in note
    # The other one can be requested.
    requested = detect(variables, POD_NAME, "slurm")
    assert requested.environment == "slurm"
    assert "selected slurm; also found kubernetes" in requested.notes[-1]
    assert detect(variables, POD_NAME, "local").nodes is None


# One process per machine, with its rank and the address of the first machine.
GIVEN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "n1"}
DSTACK = {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.2.0.4"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-node-0-1",
}
# Set by a batch script for the processes that it starts.
BY_HAND = {"WORLD_SIZE": "16", "MASTER_ADDR": "n08", "MASTER_PORT": "29500", "NNODES": "2"}


@pytest.mark.parametrize(
    ("variables", "expected", "port"),
    [
        pytest.param(GIVEN, (2, 1, "n1"), None, id="one process per machine"),
        pytest.param({**GIVEN, "MASTER_PORT": "23456"}, (2, 1, "n1"), 23456, id="PyTorchJob"),
        pytest.param({**GIVEN, **SBATCH}, (2, 1, "n1"), None, id="ssh in a batch script"),
        pytest.param({**GIVEN, **POD}, (2, 1, "n1"), None, id="a pod with variables"),
        pytest.param(KUBEFLOW, (2, 1, "train-node-0-0.train"), 29400, id="Kubeflow Trainer"),
        pytest.param(
            {**KUBEFLOW, "PET_NNODES": "1:3"},
            (None, 1, "train-node-0-0.train"),
            29400,
            id="elastic",
        ),
        pytest.param(SKYPILOT, (2, 1, "10.2.0.4"), None, id="SkyPilot"),
        pytest.param(DSTACK, (2, 1, "10.2.0.4"), None, id="dstack"),
        # Not of 16 machines: WORLD_SIZE is the number of ranks.
        pytest.param({**BY_HAND, "NODE_RANK": "1"}, (2, 1, "n08"), 29500, id="NODE_RANK"),
        pytest.param({"NODE_RANK": "1"}, (None, 1, None), None, id="only NODE_RANK"),
        pytest.param(
            {"WORLD_SIZE": "2", "RANK": "1", "NODE_RANK": "1", "MASTER_ADDR": "n1"},
            (2, 1, "n1"),
            None,
            id="Azure ML",
        ),
        pytest.param({"WORLD_SIZE": "8"}, (None, None, None), None, id="only WORLD_SIZE"),
        pytest.param(OPEN_MPI, (2, 1, None), None, id="mpirun"),
        pytest.param({**OPEN_MPI, "MASTER_ADDR": "n1"}, (2, 1, "n1"), None, id="mpirun, address"),
        # The processes of mpirun inherit the variables of an allocation, or of a step.
        pytest.param({**SBATCH, **OPEN_MPI}, (2, 1, None), None, id="mpirun in a batch script"),
        pytest.param({**SRUN, **OPEN_MPI}, (2, 1, None), None, id="mpirun in a step"),
        pytest.param(HYDRA, (4, 0, None), None, id="mpiexec"),
    ],
)
def test_variables_that_number_machines_are_read(
    variables: dict[str, str], expected: tuple[object, ...], port: int | None
) -> None:
    job = detect(variables, "n1")
    assert values(job) == ("variables", *expected, None)
    assert (job.port and job.port.value) == port
    # A name may resolve only after the first machine has started.
    assert job.names_appear == (expected[-1] is not None)
    assert detect(variables, "n1", "local").environment == "local"


@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        pytest.param({**SRUN, **BY_HAND}, "slurm", id="in a step"),
        pytest.param({**SRUN, **BY_HAND, "RANK": "1", "NODE_RANK": "1"}, "slurm", id="ranks"),
        pytest.param(
            {**SBATCH, **BY_HAND, "SLURM_JOB_NUM_NODES": "1"}, "slurm", id="in a batch script"
        ),
        pytest.param({**POD, **BY_HAND}, "kubernetes", id="in a pod"),
        pytest.param({"WORLD_SIZE": "1", "RANK": "0"}, "local", id="one rank"),
        pytest.param(
            {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "n1"}, "local", id="one node"
        ),
        pytest.param({"NODE_RANK": "0"}, "local", id="the only node"),
        pytest.param({"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "local", id="an address"),
    ],
)
def test_incomplete_machine_variables_are_ignored(
    variables: dict[str, str], environment: str
) -> None:
    assert detect(variables, POD_NAME).environment == environment


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({**GIVEN, "LOCAL_RANK": "1"}, "LOCAL_RANK"),
        # Ranks of torchrun or of another `distmp launch`, also with one rank per machine.
        ({**GIVEN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE"),
        ({**GIVEN, "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, "WORLD_SIZE"),
    ],
)
def test_several_launchers_per_machine_are_refused(variables: dict[str, str], setting: str) -> None:
    with pytest.raises(ConfigError, match="start one `distmp launch` per machine") as error:
        detect(variables, "n1")
    assert error.value.setting == setting
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("variables", "setting", "problem"),
    [
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID", "there are 2 machines"),
        ({**SRUN, "SLURM_NODEID": "x"}, "SLURM_NODEID", "an integer"),
        (
            {**SRUN, "SLURM_STEP_NODELIST": "n[08"},
            "SLURM_STEP_NODELIST",
            "list of fewer than 65,536 machines",
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "SLURM_STEP_TASKS_PER_NODE", "one task"),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, "SLURM_STEP_NODELIST", "not set"),
        ({**POD, "HOSTNAME": "my-pod"}, "JOB_COMPLETION_INDEX", "does not end in -1"),
        ({**POD, "JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX", "not set"),
        ({**GIVEN, "RANK": "2"}, "RANK", "there are 2 machines"),
        ({**GIVEN, "RANK": "x"}, "RANK", "an integer"),
        ({**GIVEN, "MASTER_PORT": "70000"}, "MASTER_PORT", "below 65536"),
    ],
)
def test_contradicting_variables_are_one_message(
    variables: dict[str, str], setting: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        detect(variables, "here")
    assert error.value.setting == setting


def test_requested_environment_must_be_present() -> None:
    with pytest.raises(ConfigError, match="--environment"):
        detect(POD, POD_NAME, "slurm")


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed")
@pytest.mark.parametrize(
    "text",
    [
        "node1",
        "n[01-03,7],login",
        "n[098-101]",
        "a-b,c.example.org",
        "rack[1-2]n[01-02]",
        "b,a,b",
        "n[1-2],m[3,5-6],n[1-2]",
    ],
)
def test_node_list_agrees_with_scontrol(text: str, tmp_path: Path) -> None:
    """scontrol needs a configuration, which containers on compute nodes often lack."""
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        "ClusterName=test\nSlurmctldHost=localhost\n"
        "NodeName=localhost\nPartitionName=all Nodes=ALL\n"
    )
    names = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(configuration)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    assert expand(text, setting="SLURM_JOB_NODELIST") == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("n[01-03,7],login", "n01 n02 n03 n7 login"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a-b,c.example.org", "a-b c.example.org"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("gpu[3]-ib", "gpu3-ib"),
        ("b,a,b", "b a b"),
        ("n[1-60000]", " ".join(f"n{n}" for n in range(1, 60001))),
    ],
)
def test_node_list_expands_names_and_ranges(text: str, names: str) -> None:
    assert expand(text, setting="SLURM_JOB_NODELIST") == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a-b]"),
        *("n[1,]", "n[[1]]", "n[1-999999999]", "n[1-9999]m[1-9999]", "n[1-40000],m[1-40000]"),
    ],
)
def test_invalid_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_JOB_NODELIST = {text!r}: is not")):
        expand(text, setting="SLURM_JOB_NODELIST")


numbers = st.lists(st.integers(0, 120), min_size=1, max_size=12, unique=True).map(sorted)


@given(st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True), numbers, st.integers(1, 4))
def test_compressed_node_list_round_trips(prefix: str, values: list[int], width: int) -> None:
    """The reference compresses as Slurm does: consecutive numbers become ranges."""
    ranges: list[list[int]] = []
    for value in values:
        # Slurm writes numbers of different widths as different ranges.
        if ranges and ranges[-1][-1] == value - 1 and len(f"{value:0{width}}") == width:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    parts = [
        f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in ranges
    ]
    expected = [f"{prefix}{value:0{width}}" for value in values]
    assert expand(f"{prefix}[{','.join(parts)}]", setting="x") == expected


@given(st.text(alphabet="n1-,[]0 ", max_size=20))
def test_any_node_list_expands_or_raises(text: str) -> None:
    try:
        names = expand(text, setting="x")
    except ConfigError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)
