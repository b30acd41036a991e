from __future__ import annotations

import io

import pytest
import torch

from distmp.errors import ConfigError
from distmp.precision import PrecisionPolicy, policy, resolve

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "expected", "reason"),
    [
        ((5, 2), "fp32", "no fast 16-bit arithmetic"),
        ((6, 1), "fp32", "no fast 16-bit arithmetic"),
        ((7, 0), "fp16", "only emulates bfloat16"),
        ((7, 5), "fp16", "only emulates bfloat16"),
        ((8, 0), "bf16", "computes bfloat16 natively"),
        ((8, 9), "bf16", "computes bfloat16 natively"),
        ((9, 0), "bf16", "computes bfloat16 natively"),
        ((12, 0), "bf16", "computes bfloat16 natively"),
    ],
)
def test_auto_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = resolve("auto", torch.device("cuda", 3))
    assert found.policy == policy(expected)
    major, minor = capability
    assert found.reason.startswith(f"GPU 3 (compute capability {major}.{minor}) ")
    assert reason in found.reason


@pytest.mark.parametrize(
    ("cpuinfo", "expected", "reason"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", "fp32", "no bfloat16 instructions"),
        ("flags\t\t: fpu avx512_bf16 sse\n", "bf16", "avx512_bf16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16\n", "bf16", "amx_bf16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16", "(bf16)"),
        ("flags\t\t: fpu not_avx512_bf16_at_all\n", "fp32", "no bfloat16 instructions"),
        ("model name\t: amx_bf16\n", "fp32", "no bfloat16 instructions"),
        (None, "fp32", "no bfloat16 instructions"),
    ],
)
def test_auto_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, expected: str, reason: str
) -> None:
    def open_cpuinfo(path: str) -> io.StringIO:
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return io.StringIO(cpuinfo)

    monkeypatch.setattr("builtins.open", open_cpuinfo)
    found = resolve("auto", CPU)
    monkeypatch.undo()
    assert found.policy == policy(expected)
    assert reason in found.reason


@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)])
def test_what_is_asked_for_is_kept(device: torch.device) -> None:
    own = PrecisionPolicy("own", compute_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    assert resolve(own, device) == (own, "given")
    assert resolve("fp16", device) == (policy("fp16"), "configured")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        resolve("autoo", CPU)
