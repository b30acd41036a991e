from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distmp.distributed.rank_environment import RankEnvironment, adopt_ranks, refuse_several
from distmp.errors import ConfigError
from tests.ports import reserved_port
from tests.torchrun import python, run, tiny

# mpirun asks for confirmation before it runs as root, as it does in containers.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ADDRESS = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
# As the launchers set them for rank 5 of 8 on two machines, reduced to the relevant variables.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_SIZE": "8", "PMI_RANK": "5", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_LOCALID": "1",
}
# With --mpi=pmi2, which numbers no processes of a machine.
PMI2 = {**SRUN, "PMI_SIZE": "8", "PMI_RANK": "5"}
# mpirun starts a daemon on each machine with srun, and the ranks inherit its variables.
OPEN_MPI_BY_SRUN = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **OPEN_MPI}
FLUX = {"FLUX_JOB_SIZE": "8", "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(OPEN_MPI, id="mpirun"),
        pytest.param(HYDRA, id="mpiexec"),
        pytest.param(SRUN, id="srun"),
        pytest.param(PMI2, id="srun --mpi=pmi2"),
        pytest.param(OPEN_MPI_BY_SRUN, id="mpirun by srun"),
        # Exported by many batch scripts, without the ranks.
        pytest.param({**SRUN, "WORLD_SIZE": "8"}, id="srun with WORLD_SIZE"),
    ],
)
def test_ranks_with_address_are_adopted(variables: dict[str, str]) -> None:
    adopted = {**variables, **ADDRESS}
    adopt_ranks(adopted)
    assert RankEnvironment.from_variables(adopted) == RankEnvironment(5, 1, 8, 4)
    assert adopted.items() >= {**variables, **ADDRESS}.items()


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(OPEN_MPI, id="no address"),
        pytest.param({**FLUX, **ADDRESS}, id="incomplete"),
        pytest.param({**OPEN_MPI, **ADDRESS, "WORLD_SIZE": "1"}, id="independent processes"),
        pytest.param({**OPEN_MPI, **ADDRESS, "RANK": "0", "WORLD_SIZE": "2"}, id="torchrun within"),
        pytest.param({**BATCH, **ADDRESS}, id="a batch script"),
    ],
)
def test_unrelated_variables_are_not_adopted(variables: dict[str, str]) -> None:
    adopted = dict(variables)
    adopt_ranks(adopted)
    assert adopted == variables


def test_machines_with_unequal_process_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE = '5,3': start the same"):
        adopt_ranks({**SRUN, **ADDRESS, "SLURM_STEP_TASKS_PER_NODE": "5,3"})


@pytest.mark.parametrize(
    ("variables", "setting"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (HYDRA, "PMI_SIZE"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        (FLUX, "FLUX_JOB_SIZE"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "JSM_NAMESPACE_SIZE"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK"),
        (BATCH, "SLURM_NTASKS"),
        ({"NODE_RANK": "1"}, "NODE_RANK"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "n1"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_NNODES"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES"),
        ({"DSTACK_NODES_NUM": "2"}, "DSTACK_NODES_NUM"),
        ({"SM_HOST_COUNT": "2"}, "SM_HOST_COUNT"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "n1"}, "LOCAL_RANK"),
    ],
)
def test_one_of_several_processes_is_refused(variables: dict[str, str], setting: str) -> None:
    with pytest.raises(ConfigError, match="torchrun") as error:
        RankEnvironment.from_variables(variables)
    assert error.value.setting == setting
    assert error.value.exit_code == 2
    # What the message suggests works, where it suggests it.
    if "WORLD_SIZE=1" in str(error.value):
        alone = {**variables, **ADDRESS, "WORLD_SIZE": "1"}
        assert RankEnvironment.from_variables(alone) == RankEnvironment()


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="a shell"),
        pytest.param(ADDRESS, id="an address"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, id="a shell of salloc"),
        pytest.param(
            {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            id="an interactive step",
        ),
        pytest.param({**BATCH, "SLURM_NTASKS": "1", **ADDRESS}, id="a batch script with one task"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
            id="one task of srun",
        ),
        pytest.param(
            {**OPEN_MPI, **ADDRESS, "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
            id="one process of mpirun",
        ),
        pytest.param({"PMIX_RANK": "0", "PMI_SIZE": "1", "PMI_RANK": "0"}, id="one process of PMI"),
        pytest.param({"NODE_RANK": "0", "NNODES": "1", **ADDRESS}, id="one machine"),
        pytest.param({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "1"}, id="options of torchrun"),
        pytest.param({**BATCH, "PYTEST_CURRENT_TEST": "test"}, id="a test in a batch script"),
        pytest.param({"PET_NNODES": "2", "PYTEST_CURRENT_TEST": "test"}, id="a test in a pod"),
        # accelerate launch with one process.
        pytest.param({"ACCELERATE_MIXED_PRECISION": "no", "PMIX_RANK": "0"}, id="accelerate"),
    ],
)
def test_single_process_trains_without_group(variables: dict[str, str]) -> None:
    refuse_several(variables)
    assert RankEnvironment.from_variables(variables) == RankEnvironment()


def test_mpirun_processes_need_address_to_train(tmp_path: Path) -> None:
    """They train together if they know an address, and not at all otherwise."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is missing (apt-get install openmpi-bin)")

    def mpirun(*options: str) -> subprocess.CompletedProcess[str]:
        arguments = tiny(tmp_path, "--steps=2", "--schedule.warmup-steps=1")
        command = python("-m", "distmp.train", *arguments)
        several = ("mpirun", "--oversubscribe", "-n", "2", *options)
        return run([*several, *command], tmp_path, variables=AS_ROOT)

    alone = mpirun()
    assert alone.returncode == 2
    assert "OMPI_COMM_WORLD_SIZE = 2: 2 processes were started together" in alone.stderr
    assert not (tmp_path / "run").exists()
    with reserved_port() as port:
        together = mpirun("-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={port}")
    assert together.returncode == 0, together.stderr
    assert together.stdout.count("ranks: 2 on cpu (gloo)") == 1
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 2
