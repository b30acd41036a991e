"""Numbers and names of the collectives that a rank has started."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distmp.distributed import flight_recorder
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import join
from tests.ranks import ranks
from tests.torchrun import python, run

C10D = torch._C._distributed_c10d  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "own",
    [{}, {"TORCH_FR_BUFFER_SIZE": "7"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}],
    ids=["unset", "own size", "disabled by the older name"],
)
def test_buffer_size_set_by_user_is_kept(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in flight_recorder.SIZE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, size in own.items():
        monkeypatch.setenv(name, size)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    flight_recorder.enable()
    sizes = {name: os.environ.get(name) for name in flight_recorder.SIZE_VARIABLES}
    assert sizes == dict.fromkeys(sizes) | (own or {"TORCH_FR_BUFFER_SIZE": "2000"})


@ranks(2)
def test_sequence_numbers_and_pending_collectives_of_groups() -> None:
    first, second = dist.new_group(), dist.new_group(group_desc="of the mesh")
    dist.new_group([0])  # has no other rank to wait for
    before = flight_recorder.started()["the default group (gloo)"]
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2), group=second)
    dist.barrier(group=second)
    labels = {
        "the default group (gloo)": before + 1,
        f"group {first.group_name} of ranks 0-1 (gloo)": 0,
        f"group {second.group_name} 'of the mesh' of ranks 0-1 (gloo)": 2,
    }
    assert flight_recorder.started() == labels
    while (
        flight_recorder.pending()
    ):  # gloo marks a collective as retired shortly after it has returned
        time.sleep(0.01)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=second, async_op=True)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(flight_recorder.pending()))
        thread.start()
        thread.join()
        if hasattr(C10D, "_dump_fr_trace_json"):
            assert seen == [{list(labels)[2]: [(3, "all_reduce")]}]
    store = dist.distributed_c10d._get_default_store()
    store.set("seen" if dist.get_rank() == 0 else "waits", "")
    store.wait(["seen"])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2), group=second)
    else:
        work.wait()  # type: ignore[union-attr]


@ranks(2)
def test_groups_without_sequence_numbers_are_omitted() -> None:
    """Such as groups of other backends, or groups that the main thread destroys meanwhile."""
    group, own = dist.new_group(), flight_recorder._backends
    for error in (RuntimeError, AttributeError, KeyError):

        def backends(one: Any, error: type[Exception] = error) -> dict[str, Any]:
            if one is group:
                raise error("no sequence numbers")
            return own(one)

        flight_recorder._backends = backends
        assert list(flight_recorder.started()) == ["the default group (gloo)"]
    flight_recorder._backends = own


def entry(number: int, name: str, group: str = "0", **changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": [group, "default_pg"],
        "is_p2p": False,
        "retired": False,
        "state": "scheduled",
    } | changes


def test_nccl_pending_collectives_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry(5, "nccl:broadcast", retired=True),
        entry(6, "nccl:all_gather", state="completed"),
        entry(7, "nccl:all_reduce", state="started"),
        entry(7, "nccl:all_reduce", state="started"),  # two tensors that are coalesced
        entry(8, "nccl:reduce_scatter"),
        entry(0, "nccl:send 0->1", is_p2p=True),
        entry(9, "nccl:all_reduce", group="5"),
        entry(9, "gloo:all_reduce"),
    ]
    text = json.dumps({"entries": entries}).encode()
    monkeypatch.setattr(C10D, "_dump_nccl_trace_json", lambda: text, raising=False)
    monkeypatch.setattr(C10D, "_dump_fr_trace_json", lambda: b"{}", raising=False)
    groups = [("world (nccl)", "0", "nccl", 8), ("world (gloo)", "0", "gloo", 3)]
    monkeypatch.setattr(flight_recorder, "_groups", lambda: iter(groups))
    assert flight_recorder.pending() == {"world (nccl)": [(7, "all_reduce"), (8, "reduce_scatter")]}
    monkeypatch.setattr(flight_recorder, "MAX_PENDING", 1)
    assert flight_recorder.pending() == {"world (nccl)": [(7, "all_reduce")]}


def test_dump_that_holds_gil_ends_process(tmp_path: Path) -> None:
    """The dump holds the GIL, as if a query of a CUDA event did not return."""
    script = """
import ctypes, torch
from distmp.distributed import flight_recorder
flight_recorder.BLOCKED_SECONDS = 0.5
torch._C._distributed_c10d._dump_nccl_trace_json = lambda: ctypes.PyDLL(None).sleep(1000)
flight_recorder.pending()
"""
    done = run(python("-c", script), tmp_path)
    assert done.returncode == 1
    assert "in pending\n" in done.stderr


def test_reads_of_recorders_have_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def read() -> bytes:
        calls.append("read")
        return b"{}"

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.setattr(C10D, name, read, raising=False)
    monkeypatch.setattr(
        faulthandler,
        "dump_traceback_later",
        lambda seconds, **options: calls.append(f"{seconds} s, {options}"),
    )
    monkeypatch.setattr(
        faulthandler, "cancel_dump_traceback_later", lambda: calls.append("no limit")
    )
    assert flight_recorder.pending() == {}
    assert calls == 2 * ["60.0 s, {'exit': True}", "read", "no limit"]


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="needs a CUDA device and NCCL",
)
@ranks(1, initialize=False)
def test_nccl_recorder_is_read() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    world = join(RankEnvironment(), timeout_seconds=60)
    dist.all_reduce(torch.ones(4, device=world.device))
    torch.cuda.synchronize()
    last = flight_recorder._entries("nccl")[-1]
    assert last["profiling_name"] == "nccl:all_reduce"
    assert last["process_group"][0] == dist.group.WORLD.group_name
    backend = flight_recorder._backends(dist.group.WORLD)["nccl"]
    assert last["collective_seq_id"] == backend._get_sequence_number_for_group()
