from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from distmp.config import BatchConfig, RunConfig, load
from distmp.distributed import rendezvous_store
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import AttemptError
from distmp.distributed.world import World, leave
from distmp.errors import HANG_EXIT_CODE, ConfigError, SetupError
from distmp.training import failures, preflight
from distmp.training.preflight import is_enabled, join_checked
from distmp.training.run_inputs import CODE, DATA, inputs
from distmp.utils.settings import from_mapping
from tests.elastic import Job, run_jobs
from tests.ranks import ranks, run_ranks
from tests.torchrun import corpus, tiny

LIMIT_SECONDS = 20.0
SHORT_SECONDS = 3.0


@contextlib.contextmanager
def store_of_an_agent() -> Iterator[int]:
    """Host a store as torchrun's agent does; yield its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


class Result(NamedTuple):
    code: int
    output: str


def as_rank(case: str, port: int, directory: str, limit: float) -> Result:
    """Run a preflight in a child process, which may exit in any way."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    rendezvous_store._attempt = 0  # the ranks have agreed
    output = Path(directory) / f"{case}-{os.environ['RANK']}"
    child = os.fork()
    if child == 0:
        with output.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 2)
            os._exit(checked(CASES[case], limit))
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFSTOPPED(status):  # Once another rank has reported it, it is killed, as by torchrun.
        reports = [Path(directory) / f"{case}-{rank}" for rank in range(2)]
        while not any("no rank has made progress" in path.read_text() for path in reports):
            time.sleep(0.1)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Result(code, output.read_text())


def checked(case: Callable[[int], RunConfig | None], limit: float) -> int:
    environment = RankEnvironment.from_variables()
    try:
        config = case(environment.rank) or RunConfig()
        watch = partial(failures.watch, environment, limit, limit)
        _, report = join_checked(config, environment, watch)
        failures.stop_watching()
        for line in report:
            sys.stderr.write(f"{line}\n")
        leave()
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        sys.stderr.flush()
    return 0


def healthy(rank: int) -> None:
    os.environ.update(
        {"NCCL_SOCKET_IFNAME": f"eth{rank}"} | ({"NCCL_ALGO": "Ring"} if rank else {})
    )


def other_settings(rank: int) -> RunConfig | None:
    if rank == 2:
        torch.__version__ = "2.10.0"  # type: ignore[assignment]
    return RunConfig(batch=BatchConfig(microbatch_size=8)) if rank == 1 else None


def slow_link(rank: int) -> None:
    """Rank 2 has a slow link."""
    exchange = dist.batch_isend_irecv

    def exchange_slowly(operations: list[dist.P2POp]) -> list[dist.Work]:
        time.sleep(0.2)
        return exchange(operations)

    if rank == 2:
        dist.batch_isend_irecv = exchange_slowly  # type: ignore[assignment]


def hangs_in_the_middle(rank: int) -> None:
    if rank == 2:
        preflight.inputs = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]


CASES: dict[str, Callable[[int], RunConfig | None]] = {
    function.__name__: function  # type: ignore[attr-defined]
    for function in (healthy, other_settings, slow_link, hangs_in_the_middle)
}


def run_case(case: str, directory: Path, limit: float = LIMIT_SECONDS) -> list[Result]:
    with store_of_an_agent() as port:
        return run_ranks(as_rank, 3, case, port, str(directory), limit, initialize=False)


def test_healthy_ranks_pass_preflight(tmp_path: Path) -> None:
    results = run_case("healthy", tmp_path)
    assert {result.code for result in results} == {0}
    assert results[0].output.startswith("3 ranks on 1 host, consistent; all-reduce ")
    # All ranks have the same report.
    assert len({result.output.rpartition(";")[0] for result in results}) == 1
    host = os.uname().nodename
    assert f"\nNCCL_ALGO differs: unset on rank 0 ({host}), Ring on ranks 1-2 ({host})" in (
        results[0].output
    )
    assert "NCCL_SOCKET_IFNAME" not in results[0].output


def test_ranks_with_different_setting_are_named(tmp_path: Path) -> None:
    results = run_case("other_settings", tmp_path)
    assert {result.code for result in results} == {2}
    host = os.uname().nodename
    for result in results:
        assert (
            f"version of torch differs: {torch.__version__} on ranks 0-1 ({host}), 2.10.0 on"
            in (result.output)
        )
        assert f"batch.microbatch_size differs: 16 on ranks 0, 2 ({host}), 8 on rank 1" in (
            result.output
        )
        assert result.output.count("differs") == 2  # nothing else differs


def test_slow_link_is_named(tmp_path: Path) -> None:
    results = run_case("slow_link", tmp_path)
    assert {result.code for result in results} == {0}
    lines = [line for line in results[0].output.splitlines() if " is slow: " in line]
    assert any(f"rank 2 on {os.uname().nodename} is slow" in line for line in lines)
    # Other processes on this machine may slow down another rank too, but not as much.
    factors = {line.split()[1]: float(line.split(", ")[1].split()[0]) for line in lines}
    assert max(factors, key=factors.__getitem__) == "2"


@pytest.mark.nightly
def test_blocking_rank_is_named(tmp_path: Path) -> None:
    results = run_case("hangs_in_the_middle", tmp_path, SHORT_SECONDS)
    (reporter,) = [result for result in results if "no rank has made progress" in result.output]
    assert reporter.code == HANG_EXIT_CODE
    host = os.uname().nodename
    assert f"rank 2 of 3 on {host} is late and does not answer: its process is" in reporter.output
    assert "ranks 0-1 wait in work.wait" in reporter.output
    assert "preflight: comparing settings, code and data" in reporter.output


@ranks(2)
def test_links_of_ranks_that_share_a_gpu_are_measured() -> None:
    world = replace(World.current("cpu"), device=torch.device("cuda", 0))
    speed = preflight.measure(world, 1)  # gloo sends no tensors of a GPU
    assert min(speed) > 0


def test_unreachable_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of_an_agent() as port:
        pass  # nothing listens on this port any more
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous_store, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous_store, "_attempt", None)
    message = f"rank 1 on .* the store at .*:{port}"
    with pytest.raises(AttemptError, match=message):
        join_checked(RunConfig(), RankEnvironment(1, 0, 2, 1), lambda: None)


@pytest.mark.parametrize(
    ("setting", "world_size", "local_world_size", "enabled"),
    [
        ("auto", 4, 2, True),
        ("auto", 4, 4, False),
        ("auto", 1, 1, False),
        ("always", 4, 4, True),
        ("only", 4, 4, True),
        ("always", 1, 1, False),
        ("never", 4, 2, False),
    ],
)
def test_preflight_runs_according_to_setting(
    setting: str, world_size: int, local_world_size: int, enabled: bool
) -> None:
    config = RunConfig(preflight=setting)  # type: ignore[arg-type]
    environment = RankEnvironment(0, 0, world_size, local_world_size)
    assert is_enabled(config, environment) == enabled


def test_preflight_only_needs_two_ranks() -> None:
    with pytest.raises(ConfigError, match="preflight = 'only': use two or more"):
        is_enabled(RunConfig(preflight="only"), RankEnvironment(0, 0, 1, 1))


def test_preflight_only_creates_no_run(tmp_path: Path) -> None:
    (done,) = run_jobs([Job(tiny(tmp_path, "--preflight=only"))], tmp_path)
    assert done.exit_codes == {}, done.stderr
    assert "preflight: 2 ranks on 1 host, consistent; all-reduce " in done.stdout
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["logs"]


def test_files_of_held_out_text_are_compared(tmp_path: Path) -> None:
    corpus(tmp_path / "train")
    corpus(tmp_path / "held")
    paths = [f"--data.path={tmp_path / 'train'}", f"--data.validation-path={tmp_path / 'held'}"]
    for arguments, directories in ((paths, {"train", "held"}), (paths[:1], {"train"})):
        found = inputs(load(arguments), with_files=True)[DATA]
        assert {Path(name).parent.name for name in found} == directories


@pytest.mark.parametrize("text", ["x" * 300, "~nobody_of_this_name/x"])
def test_options_of_data_that_name_no_file_are_ignored(text: str) -> None:
    data = {"source": "module:function", "options": {"prompt": text}}
    config = from_mapping(RunConfig, {"data": data})
    assert inputs(config, with_files=True)[DATA] == {}


def test_code_that_named_modules_import_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code(directory: str, names: str = "own_model:loss", **changed: str) -> dict[str, str]:
        """Return the digests of the files on a host, except for those of distmp."""
        files = {
            "own_model.py": "import json, own_losses as o\nfrom own_package.part import x\n",
            "own_losses.py": "def loss():\n    from own_late import y\n",
            "own_late.py": "import numpy, own_missing",
            "own_script.py": "import own_data  # own_unused",
            "own_data.py": "",
            "own_unused.py": "",
            "own_package/__init__.py": "",
            "own_package/part.py": "from . import other",
            "own_package/other.py": "",
            **changed,
        }
        for name, text in files.items():
            (tmp_path / directory / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / directory / name).write_text(text)
        monkeypatch.chdir(tmp_path / directory)
        config = from_mapping(RunConfig, {"model": {"loss": names}})
        found = inputs(config, with_files=True)[CODE]
        return {name: each for name, each in found.items() if not name.startswith("distmp/")}

    script = ModuleType("__main__")
    script.__file__ = "/anywhere/own_script.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    own = code("a")
    assert sorted(own) == [
        "own_data.py",
        "own_late.py",
        "own_losses.py",
        "own_model.py",
        "own_package/__init__.py",
        "own_package/other.py",
        "own_package/part.py",
        "own_script.py",
    ]
    assert code("b") == own
    for name in own:
        changed = code("c", **{name: "x = 1"})
        assert changed[name] != own[name]
    assert "numpy/__init__.py" in code("d", "numpy:sum")
