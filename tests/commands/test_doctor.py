from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distmp.commands import doctor
from distmp.commands.doctor import CHECKS, main
from distmp.errors import ConfigError

Patch = pytest.MonkeyPatch
GIB = 1 << 30
USAGE = type(shutil.disk_usage("/"))


@pytest.fixture(autouse=True)
def healthy(tmp_path: Path, monkeypatch: Patch) -> None:
    """A healthy machine with one GPU, independent of the one that runs the test."""
    for name in os.environ:
        if name.startswith(("NCCL_", "GLOO_", "TORCH", "CUDA_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", free(500 * GIB))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(doctor, "_rdma_devices", lambda: ["mlx5_0"])
    gpu(tmp_path)


def program(directory: Path, name: str, output: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)


def gpu(directory: Path, used: str = "4", errors: str = "0", slowdown: str = "Not Active") -> None:
    row = f"NVIDIA H200, 143771, {used}, {errors}, Not Active, {slowdown}"
    program(directory, "nvidia-smi", row)


def free(size: int) -> Callable[..., object]:
    return lambda _: USAGE(600 * GIB, 0, size)


def no_cuda() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old")


# What breaks the machine, check, status, and text of message or remedy.
PROBLEMS: dict[str, tuple[Callable[[Path, Patch], object], str, str]] = {
    "unusable GPUs": (
        lambda _, patch: patch.setattr(torch.cuda, "init", no_cuda),
        "FAIL  CUDA",
        "CUDA_VISIBLE_DEVICES",
    ),
    "broken memory": (
        lambda path, _: gpu(path, errors="3"),
        "FAIL  GPUs",
        "GPU 0, NVIDIA H200: 3 memory errors",
    ),
    "hot GPU": (lambda path, _: gpu(path, slowdown="Active"), "WARN  GPUs", "throttled"),
    "GPU in use": (lambda path, _: gpu(path, used="20000"), "WARN  GPUs", "20000 MiB"),
    "few files": (
        lambda _, patch: patch.setattr(
            resource, "getrlimit", lambda kind: (256 if kind == resource.RLIMIT_NOFILE else -1, -1)
        ),
        "WARN  limits",
        "ulimit -n",
    ),
    "no locked memory for InfiniBand": (
        lambda _, patch: patch.setattr(resource, "getrlimit", lambda _: (64 << 10, -1)),
        "FAIL  limits",
        "mlx5_0 has to lock",
    ),
    "full disk": (
        lambda _, patch: patch.setattr(shutil, "disk_usage", free(GIB // 2)),
        "FAIL  disk",
        "512 MiB free",
    ),
    "nearly full disk": (
        lambda _, patch: patch.setattr(shutil, "disk_usage", free(5 * GIB)),
        "WARN  disk",
        "5.0 GiB free",
    ),
    "debugging": (
        lambda _, patch: patch.setenv("CUDA_LAUNCH_BLOCKING", "1"),
        "WARN  environment",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    "no error handling": (
        lambda _, patch: patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        "FAIL  environment",
        "wait without a limit",
    ),
    "variables of an old rank": (
        lambda _, patch: patch.setenv("RANK", "0"),
        "WARN  environment",
        "RANK is set",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problem_is_reported_with_remedy(
    case: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_machine, check, text = PROBLEMS[case]
    break_machine(tmp_path, monkeypatch)
    code = main([f"--run-dir={tmp_path}", "--strategy=single"])
    lines = capsys.readouterr().out.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith(("WARN", "FAIL"))]
    assert lines[number].startswith(check)
    assert text in lines[number] + lines[number + 1]
    assert " -> " in lines[number + 1]
    assert code == check.startswith("FAIL")


def test_full_shared_memory_is_reported_where_used(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"/dev/shm": 64 << 20}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: free(sizes.get(str(path), 500 * GIB))(path)
    )
    for workers, status in ((0, "PASS"), (2, "WARN")):
        assert main([f"--run-dir={tmp_path}", f"--data.workers={workers}"]) == 0
        assert f"{status}  shared memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "variables", [{"NCCL_DEBUG": "WARN"}, {"OMP_NUM_THREADS": "2", "CUDA_LAUNCH_BLOCKING": "0"}]
)
def test_healthy_machine_passes_all_checks(
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = sorted(tmp_path.iterdir())
    arguments = [f"--run-dir={tmp_path / 'runs' / 'new'}", "--precision.policy=bf16"]
    assert main([*arguments, "--strategy=single"]) == 0
    output = capsys.readouterr().out
    *lines, after = output.splitlines()
    assert len(lines) == output.count("PASS  ") == len(CHECKS)
    assert "see logs in its run directory" in after
    # No file or directory was left behind.
    assert sorted(tmp_path.iterdir()) == before


def test_other_output_of_nvidia_smi_is_no_gpu(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    program(tmp_path, "nvidia-smi", "No devices were found")
    assert main([f"--run-dir={tmp_path}", "--strategy=single"]) == 0
    assert "none" in capsys.readouterr().out.split("GPUs ")[1].splitlines()[0]


def test_invalid_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        main(["--strategy=dpp"])
