from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distmp.commands.doctor.checks import CHECKS, run_checks
from distmp.commands.doctor.machine_info import Clock, Folder, Gpu, MachineInfo

GIB = 1 << 30

GPU = Gpu("NVIDIA H200", 140 * GIB, 0, 0, False, "580.1")

HEALTHY = MachineInfo(
    hostname="node1",
    addresses=("10.0.0.1",),
    interfaces={"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1", "fe80::1")},
    versions={
        "python": "3.11.7",
        "distmp": "0.1.0",
        "torch": "2.13.0+cu130",
        "nccl": "2.29",
        "accelerate": "1.15.0",
    },
    cuda_build="13.0",
    cuda_driver="13.1",
    cuda_devices=2,
    gpus=(GPU, GPU),
    native_dtypes=("bfloat16", "float16"),
    cores=8,
    usable_cores=8,
    granted_cores=8,
    core_quota=None,
    available_bytes=64 * GIB,
    memory_limit=None,
    shm_bytes=32 * GIB,
    shm_free_bytes=30 * GIB,
    workers=0,
    limits={"open_files": 65536, "processes": None, "locked_bytes": None},
    rdma_devices=("mlx5_0",),
    folder=Folder("/runs", 500 * GIB, None),
    temporary=Folder("/tmp", 50 * GIB, None),
    clock=Clock(True, 0.001),
    environment={},
    policy="bf16 (it computes it natively)",
    strategy="ddp on 2 ranks (one for each of 2 CUDA devices)",
)


def variables(**values: str) -> dict[str, Any]:
    return {"environment": values}


# Problem: changes to the healthy machine, check, status, and text of message or remedy.
PROBLEMS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "old Python": (
        {"versions": {**HEALTHY.versions, "python": "3.9.18"}},
        "versions",
        "FAIL",
        "needs python 3.10",
    ),
    "old torch": (
        {"versions": {**HEALTHY.versions, "torch": "2.9.1+cu128"}},
        "versions",
        "FAIL",
        "needs torch 2.10",
    ),
    "torch for the CPU beside GPUs": ({"cuda_build": None}, "CUDA", "FAIL", "without CUDA"),
    "old driver": ({"cuda_driver": "12.8"}, "CUDA", "FAIL", "a torch built for CUDA 12"),
    "hidden GPUs": ({"cuda_devices": 0}, "CUDA", "FAIL", "CUDA_VISIBLE_DEVICES"),
    "different GPUs": (
        {"gpus": (GPU, replace(GPU, name="NVIDIA A100"))},
        "GPUs",
        "WARN",
        "NVIDIA A100, NVIDIA H200",
    ),
    "broken GPU memory": (
        {"gpus": (GPU, replace(GPU, ecc_errors=3))},
        "GPUs",
        "FAIL",
        "GPU 1, NVIDIA H200: 3 memory errors",
    ),
    "hot GPU": ({"gpus": (replace(GPU, throttled=True),)}, "GPUs", "WARN", "GPU 0, NVIDIA H200"),
    "GPU in use": ({"gpus": (replace(GPU, used_bytes=20 * GIB),)}, "GPUs", "WARN", "20.0 GiB"),
    "too many threads": (variables(OMP_NUM_THREADS="64"), "threads", "WARN", "8 cores available"),
    "more threads than the quota": (
        {"core_quota": 0.5, "granted_cores": 1, **variables(OMP_NUM_THREADS="2")},
        "threads",
        "WARN",
        "1 core available",
    ),
    "no number of threads": (variables(OMP_NUM_THREADS="4,2"), "threads", "WARN", "not a number"),
    "no memory left": ({"available_bytes": GIB}, "memory", "WARN", "1.0 GiB available"),
    "small memory of a container": (
        {"available_bytes": GIB // 2, "memory_limit": GIB},
        "memory",
        "WARN",
        "512 MiB available, limit 1.0 GiB",
    ),
    "Docker's /dev/shm": ({"shm_bytes": 64 << 20}, "shared memory", "WARN", "--shm-size"),
    "full /dev/shm": (
        {"shm_free_bytes": 1 << 20, "cuda_devices": 1, "workers": 2},
        "shared memory",
        "WARN",
        "1.0 MiB free of 32.0 GiB; data workers may fill it",
    ),
    "no /dev/shm": ({"shm_bytes": None}, "shared memory", "FAIL", "/dev/shm is missing"),
    "few files": (
        {"limits": {**HEALTHY.limits, "open_files": 256}},
        "limits",
        "WARN",
        "ulimit -n",
    ),
    "few processes": (
        {"limits": {**HEALTHY.limits, "processes": 100}},
        "limits",
        "WARN",
        "ulimit -u",
    ),
    "no locked memory for InfiniBand": (
        {"limits": {**HEALTHY.limits, "locked_bytes": 64 << 10}},
        "limits",
        "FAIL",
        "mlx5_0 has to lock",
    ),
    "read-only disk": (
        {"folder": Folder("/runs", 500 * GIB, "Read-only file system")},
        "disk",
        "FAIL",
        "Read-only file system",
    ),
    "full disk": ({"folder": Folder("/runs", GIB // 2, None)}, "disk", "FAIL", "512 MiB free"),
    "nearly full disk": ({"folder": Folder("/runs", 5 * GIB, None)}, "disk", "WARN", "5.0 GiB"),
    "full TMPDIR": (
        {"temporary": Folder("/tmp", 0, "No space left on device")},
        "temporary files",
        "FAIL",
        "/tmp: cannot be written (No space left on device)",
    ),
    "nearly full TMPDIR": (
        {"temporary": Folder("/tmp", 1 << 20, None)},
        "temporary files",
        "WARN",
        "1.0 MiB free",
    ),
    "clock that is not synchronized": (
        {"clock": Clock(False, None)},
        "clock",
        "WARN",
        "chrony",
    ),
    "wrong clock": ({"clock": Clock(True, -12.0)}, "clock", "WARN", "off by -12 s"),
    "unknown hostname": ({"addresses": ()}, "hostname", "WARN", "node1 does not resolve"),
    "hostname of another machine": (
        {"addresses": ("10.9.9.9",)},
        "hostname",
        "WARN",
        "no interface",
    ),
    "gloo on the loopback": (
        variables(GLOO_SOCKET_IFNAME="lo"),
        "network",
        "WARN",
        "GLOO_SOCKET_IFNAME=lo, through which no other machine",
    ),
    "NCCL on the loopback": (
        variables(NCCL_SOCKET_IFNAME="=lo"),
        "network",
        "WARN",
        "NCCL_SOCKET_IFNAME='=lo', through which no other machine",
    ),
    "NCCL for missing InfiniBand": (
        {"rdma_devices": (), **variables(NCCL_NET="IB")},
        "network",
        "FAIL",
        "no InfiniBand",
    ),
    "gloo on a missing interface": (
        variables(GLOO_SOCKET_IFNAME="eth0,ib0"),
        "network",
        "FAIL",
        "ib0 does not exist",
    ),
    "NCCL on a missing interface": (
        variables(NCCL_SOCKET_IFNAME="=eth"),
        "network",
        "FAIL",
        "matches none",
    ),
    "NCCL without any interface": (
        variables(NCCL_SOCKET_IFNAME="^lo,eth"),
        "network",
        "FAIL",
        "matches none",
    ),
    "debugging": (
        variables(CUDA_LAUNCH_BLOCKING="1"),
        "environment",
        "WARN",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    "verbose logs": (variables(NCCL_DEBUG="trace"), "environment", "WARN", "writes a lot"),
    "no error handling": (
        variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
        "environment",
        "FAIL",
        "wait without a limit",
    ),
    "variables of an old rank": (variables(RANK="0"), "environment", "WARN", "RANK is set"),
}


def test_a_healthy_machine_passes_everything() -> None:
    results = run_checks(HEALTHY)
    assert [name for name, _ in results] == [*CHECKS]
    assert {result.status for _, result in results} == {"PASS"}
    assert not any(result.remedy for _, result in results)


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_problem_has_a_message_and_a_remedy(case: str) -> None:
    changes, check, status, text = PROBLEMS[case]
    problems = [
        entry for entry in run_checks(replace(HEALTHY, **changes)) if entry[1].status != "PASS"
    ]
    # Only this check reports, and only the problem.
    assert [(name, result.status) for name, result in problems] == [(check, status)]
    (_, result) = problems[0]
    assert text in f"{result.message} {result.remedy}"
    assert result.remedy


def test_every_check_has_a_problem() -> None:
    information = {"types", "choices", "cores"}
    assert {check for _, check, _, _ in PROBLEMS.values()} == CHECKS.keys() - information


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "cuda_build": None,
                "cuda_driver": None,
                "cuda_devices": 0,
                "gpus": (),
                "rdma_devices": (),
                "limits": {**HEALTHY.limits, "open_files": 1024, "locked_bytes": 64 << 10},
                "shm_bytes": 64 << 20,
                "shm_free_bytes": 64 << 20,
                "core_quota": 2.5,
                "interfaces": {"lo": ("127.0.0.1",)},
                "addresses": ("127.0.1.1",),
                **variables(NCCL_NET="IB"),
            },
            id="a container without GPU, InfiniBand and network, with Debian's name of the host",
        ),
        pytest.param({"clock": Clock(None, None)}, id="unknown state of the clock"),
        pytest.param(
            {"gpus": (Gpu("?", None, None, None, None, None),) * 2},
            id="a driver that reports little",
        ),
        pytest.param({"cuda_driver": "13.0", "cuda_build": "13.1"}, id="minor versions of CUDA"),
        pytest.param(variables(NCCL_SOCKET_IFNAME="^docker", NCCL_DEBUG="WARN"), id="harmless"),
        pytest.param({"core_quota": 2.0, **variables(OMP_NUM_THREADS="2")}, id="threads by quota"),
        pytest.param({"usable_cores": 1, "granted_cores": 1}, id="pinned to a core"),
    ],
)
def test_harmless_machines_pass(changes: dict[str, Any]) -> None:
    assert {result.status for _, result in run_checks(replace(HEALTHY, **changes))} == {"PASS"}


@pytest.mark.parametrize(
    ("names", "addresses", "environment", "expected"),
    [
        (("lo", "eth0"), ("10.0.0.1",), {}, "gloo uses eth0, NCCL eth0"),
        (("lo", "docker0", "eth0", "ib0"), ("10.0.0.2",), {}, "gloo uses eth0, NCCL ib0"),
        (("lo", "docker0"), ("10.0.0.1",), {}, "gloo uses docker0, NCCL docker0"),
        (
            ("lo", "eth0", "eth1"),
            ("10.0.0.1",),
            {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth"},
            "gloo uses eth1, NCCL eth",
        ),
        (("lo", "eth0"), ("127.0.0.1",), {}, "gloo uses lo, NCCL eth0"),
    ],
)
def test_interfaces_that_libraries_use(
    names: tuple[str, ...],
    addresses: tuple[str, ...],
    environment: dict[str, str],
    expected: str,
) -> None:
    interfaces = {
        name: (f"10.0.0.{number}" if number else "127.0.0.1",) for number, name in enumerate(names)
    }
    machine = replace(HEALTHY, interfaces=interfaces, addresses=addresses, environment=environment)
    (message,) = [result.message for name, result in run_checks(machine) if name == "network"]
    assert message.endswith(expected)
