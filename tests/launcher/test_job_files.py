from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmp.errors import STOPPED_EXIT_CODE, ConfigError
from distmp.launcher import command
from distmp.launcher.job_files import KINDS, render

ROOT = Path(__file__).parent.parent.parent
FILES = {"slurm": "launch/slurm.sbatch"}

ODD_WORDS = ["", " ", "a b", "'", '"', "\\", "\n", "#", "- x", "yes", "1e5", "0o7", "{a: 1}", "a,b"]
ODD_WORDS += ["$HOME", "$(HOME)", "$$", "`id`", "%j", "^run", "&", "\u2028", "\x85", "\t", "é"]
words = st.sampled_from(ODD_WORDS) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20
)


def default(kind: str) -> list[str]:
    """Return the arguments that generate the committed files."""
    numbers = ["--nnodes", "2", "--nproc-per-node", "8"]
    return ["--render", kind, *numbers, "--", "--config", "configs/quickstart.yaml"]


def written(kind: str, options: list[str], run: list[str]) -> str:
    return render(["--render", kind, "--nnodes=4", "--nproc-per-node=8", *options], run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_in_launch_are_generated_by_the_documented_command(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert command.main(default(kind)) == 0
    assert capsys.readouterr().out == (ROOT / FILES[kind]).read_text()
    page = (ROOT / "docs" / "schedulers.md").read_text()
    assert f"distmp launch {shlex.join(default(kind))} > {FILES[kind]}\n" in page


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node=8"], "--nnodes = None"),
        (["--nnodes=2"], "--nproc-per-node = None"),
        (["--nnodes=2", "--nproc-per-node=gpu"], "--nproc-per-node = 'gpu'"),
        (["--nnodes=2:4", "--nproc-per-node=8"], "--nnodes = '2:4'"),
        (["--nnodes=0", "--nproc-per-node=8"], "--nnodes = '0'"),
        (
            ["--nnodes=2", "--nproc-per-node=8", "--no-such-option=3"],
            "torchrun does not accept this",
        ),
        (["--nnodes=2", "--nproc-per-node=8", "--", "--optim.lr=x"], "optim.lr = 'x'"),
        (["--nnodes=2", "--nproc-per-node=8", "--log-dir=\udcff"], "is not UTF-8"),
    ],
)
def test_invalid_jobs_are_refused(kind: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        command.main(["--render", kind, *arguments])


def test_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"choose from '?slurm"):
        command.main(["--render", "pbs", "--nnodes=2", "--nproc-per-node=8"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_agrees_with_the_files(kind: str) -> None:
    page = (ROOT / "docs" / "schedulers.md").read_text()
    section = page.partition(f"\n## {kind.capitalize()}\n")[2].partition("\n## ")[0]
    text = (ROOT / FILES[kind]).read_text()
    for name in ["--resume=auto", "--signal", "--gpus-per-node", "PET_NPROC_PER_NODE"]:
        assert f"`{name}" not in section or name in text, name
    assert f"exit code {STOPPED_EXIT_CODE}" in section
    assert ("180 seconds before" in section) == ("USR1@180" in text)


# Slurm


# Bash runs a batch script; `.` passes it the arguments, as sbatch does.
RUN_SCRIPT = """\
srun() { printf '%s\\0' "$PET_NPROC_PER_NODE" "$@"; return $CODE; }
scontrol() { printf '%s\\0' scontrol "$@"; }
script=$1
shift
. "$script" "$@"
"""


def run_script(path: Path, *arguments: str, code: int = 0) -> tuple[int, list[str]]:
    """Run a batch script with functions that replace Slurm's commands; return their arguments."""
    variables = {"PATH": os.environ["PATH"], "CODE": str(code), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", RUN_SCRIPT, "job", str(path), *arguments],
        env=variables,
        capture_output=True,
    )
    assert not done.stderr
    return done.returncode, done.stdout.decode().split("\0")[:-1]


@settings(max_examples=60, deadline=None)
@given(value=words, run=st.lists(words, max_size=4), more=st.lists(words, max_size=2))
def test_a_batch_script_passes_on_every_word(
    value: str, run: list[str], more: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.getbasetemp() / "odd.sbatch"
    script.write_bytes(written("slurm", [f"--log-dir={value}"], run).encode())
    subprocess.run(["bash", "-n", script], check=True)
    code, got = run_script(script, *more)
    launch = ["8", "--cpu-bind=none", "python3", "-m", "distmp", "launch", f"--log-dir={value}"]
    assert (code, got) == (0, [*launch, "--", "--resume=auto", *run, *more])


@pytest.mark.parametrize("given", [["--config", "x.yaml"], ["--config=x.yaml"]])
def test_a_configuration_after_a_batch_script_replaces_the_one_in_it(given: list[str]) -> None:
    _, got = run_script(ROOT / FILES["slurm"], "--steps=3", *given)
    assert got[got.index("--") + 1 :] == ["--resume=auto", "--steps=3", *given]


@pytest.mark.parametrize("code", [0, 1, 2, STOPPED_EXIT_CODE])
def test_a_batch_script_requeues_itself_after_an_orderly_stop(code: int) -> None:
    ended, got = run_script(ROOT / FILES["slurm"], code=code)
    assert ended == code
    requeued = got[-3:] == ["scontrol", "requeue", "7"]
    assert requeued == (code == STOPPED_EXIT_CODE)


def test_a_batch_script_requests_the_nodes_and_gpus() -> None:
    options = re.findall(r"^#SBATCH (\S+)$", written("slurm", [], []), flags=re.MULTILINE)
    assert {"--nodes=4", "--gpus-per-node=8", "--requeue", "--signal=USR1@180"} <= {*options}
