"""Replaces NCCL's process group by that of the fake device."""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

from tests.fake_cuda import library

TIMEOUT = timedelta(minutes=5)


class _Options:
    """The options of NCCL's process group that torch sets."""

    is_high_priority_stream = False
    _timeout = TIMEOUT


class _ProcessGroupMeta(type):
    def __call__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("fake_cuda", store), rank, size, timeout=TIMEOUT
        )
        return _module().create(rank, size, gloo)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Backend) and instance.name() == "nccl"


class ProcessGroupNCCL(metaclass=_ProcessGroupMeta):
    """Creates fake process groups; `isinstance` is True for them."""

    Options = _Options


def install_process_group() -> None:
    """Let `init_process_group("nccl")` create the fake process group."""
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment]
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc,assignment,attr-defined]


def _module() -> ModuleType:
    name = "fake_cuda_process_group"
    if name not in sys.modules:
        flags = (f"-DTORCH_EXTENSION_NAME={name}",)
        path = library.built("process_group", library.PROCESS_GROUP, *flags)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
