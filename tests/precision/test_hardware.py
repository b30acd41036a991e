from __future__ import annotations

import io

import pytest
import torch

from distmp.errors import ConfigError
from distmp.precision import PrecisionPolicy, policy, resolve

CPU = torch.device("cpu")
EMULATES = "only emulates the matmuls of {}, which is slow"
NO_TF32 = "has no TF32, so products keep all bits of float32"


@pytest.mark.parametrize(
    ("capability", "expected", "reason"),
    [
        ((5, 2), "fp32", "no tensor cores"),
        ((6, 1), "fp32", "no tensor cores"),
        ((7, 0), "fp16", "only emulates bfloat16"),
        ((7, 5), "fp16", "only emulates bfloat16"),
        ((8, 0), "bf16", "computes bfloat16 natively"),
        ((8, 6), "bf16", "computes bfloat16 natively"),
        ((8, 9), "bf16", "natively; fp8 may be faster: distmp calibrate --policies bf16,fp8"),
        ((9, 0), "bf16", "natively; fp8 may be faster: distmp calibrate --policies bf16,fp8"),
        ((12, 0), "bf16", "natively; fp8 may be faster: distmp calibrate --policies bf16,fp8"),
    ],
)
def test_auto_policy_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = resolve("auto", torch.device("cuda", 3))
    assert found.policy == policy(expected)
    major, minor = capability
    assert found.reason.startswith(f"GPU 3 (compute capability {major}.{minor}) ")
    assert reason in found.reason
    assert ("fp8" in found.reason) == ("fp8" in reason)


@pytest.mark.parametrize(
    ("cpuinfo", "expected", "reason"),
    [
        ("processor: 0\nflags\t\t: fpu avx2 avx512f\n", "fp32", "no bfloat16 instructions"),
        ("flags\t\t: fpu avx512_bf16 sse\n", "bf16", "avx512_bf16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16\n", "bf16", "amx_bf16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16", "(bf16)"),
        ("flags\t\t: fpu not_avx512_bf16_at_all\n", "fp32", "no bfloat16 instructions"),
        (None, "fp32", "no bfloat16 instructions"),
    ],
)
def test_auto_policy_on_cpu(
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


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(f"flags : {features}\n"))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("requested", "features", "reason"),
    [
        ("fp32", "avx2", "configured"),
        ("bf16", "avx2 avx512_bf16", "configured"),
        ("bf16", "avx2", "configured; this CPU only emulates bfloat16, which is slow"),
        ("fp16-autocast", "avx512_fp16", "configured"),
        ("fp16", "amx_bf16", "configured; this CPU only emulates float16, which is slow"),
        ("tf32", "amx_bf16", f"configured; this CPU {NO_TF32}"),
        ("fp8", "amx_bf16", f"configured; this CPU {EMULATES.format('fp8')}"),
        ("mxfp8", "avx2", f"configured; this CPU {EMULATES.format('mxfp8')}"),
        ("nvfp4", "amx_bf16", f"configured; this CPU {EMULATES.format('nvfp4')}"),
    ],
)
def test_cpu_limitations_are_reported(
    monkeypatch: pytest.MonkeyPatch, requested: str, features: str, reason: str
) -> None:
    on_a_cpu(monkeypatch, features)
    found = resolve(requested, CPU)
    monkeypatch.undo()
    assert found == (policy(requested), reason)


@pytest.mark.parametrize(
    ("requested", "capability", "limit"),
    [
        ("bf16", (8, 0), ""),
        ("bf16", (7, 0), "only emulates bfloat16, which is slow"),
        ("bf16-autocast", (7, 5), "only emulates bfloat16, which is slow"),
        ("fp16", (7, 0), ""),
        ("fp16", (6, 1), "only emulates float16, which is slow"),
        ("tf32", (8, 0), ""),
        ("tf32", (7, 5), NO_TF32),
        ("fp32", (3, 5), ""),
        ("fp8", (7, 0), EMULATES.format("fp8")),
        ("fp8", (8, 6), EMULATES.format("fp8")),
        ("fp8", (8, 9), ""),
        ("fp8-rowwise", (8, 9), EMULATES.format("fp8-rowwise")),
        ("fp8-rowwise", (9, 0), ""),
        ("fp8,forward=e5m2", (9, 0), EMULATES.format("fp8,forward=e5m2")),
        ("fp8,forward=bf16", (9, 0), ""),
    ],
)
def test_gpu_limitations_are_reported(
    monkeypatch: pytest.MonkeyPatch, requested: str, capability: tuple[int, int], limit: str
) -> None:
    on_a_gpu(monkeypatch, capability)
    found = resolve(requested, torch.device("cuda", 0))
    major, minor = capability
    suffix = f"; GPU (compute capability {major}.{minor}) {limit}" if limit else ""
    assert found == (policy(requested), f"configured{suffix}")


@pytest.mark.parametrize("requested", ["mxfp8", "nvfp4"])
def test_block_scaling_is_emulated_on_every_gpu(
    monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    on_a_gpu(monkeypatch, (10, 0))
    found = resolve(requested, torch.device("cuda", 0))
    assert found.reason.endswith(f") {EMULATES.format(requested)}")


def test_requested_policy_is_unchanged() -> None:
    own = PrecisionPolicy("own", compute_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    for device in (CPU, torch.device("cuda", 0), torch.device("meta")):
        assert resolve(own, device).policy is own
        assert resolve(own, device).reason.startswith("given")
        assert resolve("fp16", device).policy == policy("fp16")
        assert resolve({"preset": "fp16"}, device).policy == policy("fp16")
        assert resolve("bf16,reduce=bf16", device).policy.reduce_dtype == torch.bfloat16


def test_auto_policy_on_unknown_device() -> None:
    found = resolve("auto", torch.device("meta"))
    assert found == (policy("fp32"), "what meta computes natively is not known")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        resolve("autoo", CPU)


def test_automatic_policy_for_missing_gpu_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device = 'cuda': cannot be used here, .* finds no GPU"):
        resolve("auto", "cuda")
