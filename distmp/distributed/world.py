"""The ranks of this run: which one this process is, its device, and how they reach each other."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from distmp.distributed import rendezvous_store
from distmp.distributed.accelerate_launch import wants_cpu
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError, DistmpError, SetupError, TrainingError

T = TypeVar("T")

DEVICE_TYPES = ("cpu", "cuda")

# How much later than this rank another one may fail in the same call.
FAILURE_SECONDS = 5.0


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: Number of ranks.
        device: Where this rank computes.
        group: All ranks, or None for a process that runs alone.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @classmethod
    def current(cls, device: torch.device | str | None = None) -> World:
        """Describe the world as torch.distributed has it; a process without a group is alone.

        Args:
            device: Where this rank computes; None takes the current CUDA device if there is one,
                "cuda" the current one.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = usable_device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, device, None)
        return cls(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD)


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device that tensors can be made on.

    Raises:
        ConfigError: For what names no device, or one that is not here.
    """
    try:
        if isinstance(device, bool | int):  # torch takes it for the number of a GPU
            raise TypeError
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", device, "is no device; use 'cpu', 'cuda' or None") from error
    if found.type not in DEVICE_TYPES:
        raise ConfigError("device", str(device), "is not supported; use 'cpu', 'cuda' or None")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", str(device), "there is no GPU here; use 'cpu' or None")
    if found.index is not None and found.type == "cuda":
        count = torch.cuda.device_count()
        if found.index >= count:
            raise ConfigError("device", str(device), f"there are {count} GPUs here, from 0 on")
    return found


def local_device(local_rank: int) -> torch.device:
    """Return the device of a rank: its own GPU where each rank of this machine has one, else CPU.

    With fewer GPUs than ranks the ranks share them. `accelerate launch --cpu` keeps off them.
    """
    if not torch.cuda.is_available() or wants_cpu(os.environ):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device, local_world_size: int) -> dict[str, Any]:
    """Return the backend for `init_process_group`, with the device that it is bound to, if any.

    NCCL carries CUDA tensors where every rank of the machine has a GPU of its own; gloo carries CPU
    tensors, and CUDA tensors of ranks that share a GPU, which NCCL refuses.

    Args:
        device: Where this rank computes.
        local_world_size: Number of ranks on this machine.
    """
    if device.type == "cuda" and torch.cuda.device_count() >= local_world_size:
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo", "device_id": None}


def world_of_process(device: torch.device | str | None = None) -> World:
    """Return the world of this process; join the ranks of its launcher if nobody has done so yet.

    In a process that torchrun (or another launcher that sets its variables) has started beside
    others, the default process group is created here, as `join` creates it, and destroyed when the
    process ends.

    Args:
        device: Where this rank computes; None takes the GPU of its local rank if there is one.

    Raises:
        ConfigError: If there is a sign of several processes, and this one cannot join them.
        SetupError: If the other ranks did not come.
    """
    if dist.is_available() and dist.is_initialized():
        _check_group()
        return World.current(_device_of_rank(device, int(os.environ.get("LOCAL_RANK", 0))))
    environment = RankEnvironment.from_variables()
    if "RANK" not in os.environ:
        return World.current(device)
    _check_address(environment.world_size)
    chosen = _device_of_rank(device, environment.local_rank)
    try:
        dist.init_process_group(**backend_for(chosen, environment.local_world_size))
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SetupError(
            {
                0: f"rank {environment.rank} could not join the {environment.world_size} ranks of "
                f"WORLD_SIZE at {address} (MASTER_ADDR, MASTER_PORT): {error}"
            },
            exit_code=1,
        ) from error
    atexit.register(leave)
    return World.current(chosen)


def _device_of_rank(device: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the device that was asked for, with the GPU of this rank where that is left open."""
    if device is not None:
        found = usable_device(device)
        if found.type != "cuda" or found.index is not None:
            return found
    if torch.cuda.is_available() and torch.cuda.current_device() != 0:
        return torch.device("cuda", torch.cuda.current_device())  # the script has chosen it
    return local_device(local_rank)


def _check_address(world_size: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                name,
                None,
                f"is not set, so this rank cannot join the {world_size} ranks of WORLD_SIZE; start "
                "the script with torchrun, or call torch.distributed.init_process_group first",
            )


def _check_group() -> None:
    """Refuse a group of one rank in a process that was started beside others."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1" and dist.get_world_size() == 1:
        raise ConfigError(
            "WORLD_SIZE",
            world_size,
            "several ranks were started, but the default process group of torch.distributed has "
            "only this one; initialize it with all of them, or set WORLD_SIZE=1 for processes that "
            "train on their own",
        )


def join(local_rank: int, *, timeout_seconds: float) -> World:
    """Meet the other ranks that torchrun started, if it did, and return this rank's world.

    Args:
        local_rank: Rank within this machine.
        timeout_seconds: A collective that takes longer fails.
    """
    device = local_device(local_rank)
    if "RANK" in os.environ:
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        place: dict[str, Any] = {}
        if rendezvous_store.is_kept_by_the_launcher():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            everything = rendezvous_store.connect(timeout_seconds)
            store = rendezvous_store.of_attempt(everything, rendezvous_store.restarts(), world_size)
            place = {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(
            timeout=timedelta(seconds=timeout_seconds),
            **backend_for(device, local_world_size),
            **place,
        )
    return World.current(device)


def all_or_none(world: World, work: Callable[[], T]) -> T:
    """Do `work` on every rank, or raise on every rank what kept some of them from it.

    Only errors that distmp raises on purpose are shared; any other ends its rank at once.

    Raises:
        SetupError: On all ranks alike, with the messages of those that failed.
    """
    result, problem = None, None
    try:
        result = work()
    except DistmpError as error:
        problem = (str(error), error.exit_code)
    problems: list[tuple[str, int] | None] = [problem]
    if world.group is not None:
        problems = [None] * world.world_size
        dist.all_gather_object(problems, problem, group=world.group)
    found = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
    if found:
        raise SetupError(
            {rank: message for rank, (message, _) in found.items()},
            max(exit_code for _, exit_code in found.values()),
        )
    return cast("T", result)


def from_rank_0(world: World, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 and return what it returned, or raise what it raised, on every rank.

    Raises:
        SetupError: On all ranks alike, if rank 0 could not do it.
    """
    found: list[T | None] = [all_or_none(world, lambda: work() if world.rank == 0 else None)]
    if world.group is not None:
        dist.broadcast_object_list(found, src=0, group=world.group)
    return cast("T", found[0])


def check_failed_everywhere(world: World, failures: int, problem: BaseException) -> None:
    """Wait until a call that has failed on this rank is known to have failed on every rank.

    A rank that goes on alone would meet the others' collectives with different ones of its own.

    Args:
        world: The ranks.
        failures: How many calls have failed on this rank, this one included.
        problem: Why it has failed.

    Raises:
        TrainingError: If another rank does not say so soon.
    """
    if world.group is None or world.world_size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    keys = [f"distmp/failure {failures}/{rank}" for rank in range(world.world_size)]
    try:
        store.set(keys[world.rank], "failed")
        store.wait(keys, timedelta(seconds=FAILURE_SECONDS))
    except RuntimeError as error:  # torch's errors of a store are such
        raise TrainingError(
            f"the last call of the engine failed on rank {world.rank} of {world.world_size} "
            f"({type(problem).__name__}: {problem}) and not on every other rank; ranks that still "
            "wait in it cannot be joined again, so end this rank and start again from a checkpoint"
        ) from error


def keep_until_exit(group: dist.ProcessGroup | None) -> None:
    """Keep a group alive until the process ends, although everybody has let go of it.

    Seen with torch 2.13: a gloo group that only torch's DDP still holds is destroyed with the
    interpreter locked, and waits for a thread of gloo that waits for the interpreter.
    """
    atexit.register(_let_go, group)


def _let_go(_: object) -> None:
    """Hold a reference until now."""


def leave() -> None:
    """Part from the other ranks, if this process had joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()
