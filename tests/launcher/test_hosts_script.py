"""Test launch/hosts.sh on two hosts with an ssh server each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import two_hosts
from tests.torchrun import TINY, corpus, environment
from tests.two_hosts import NAMES, TwoHosts

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "launch" / "hosts.sh"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def ssh_servers(hosts: TwoHosts, folder: Path) -> Iterator[str]:
    """Start an ssh server with temporary keys on each host; yield the ssh command to reach them."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "known").write_text(f"{','.join(NAMES)} {(folder / 'host.pub').read_text()}")
    server = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
    }
    hosts.run(0, "mkdir", "/run/sshd")
    for host in range(2):
        options = [f"-o{name}={value}" for name, value in server.items()]
        hosts.run(host, str(SSHD), "-f", "/dev/null", *options)
    client = {"IdentityFile": folder / "user", "UserKnownHostsFile": folder / "known"}
    words = ["ssh", "-F", "none", *(f"-o{name}={value}" for name, value in client.items())]
    yield shlex.join(words)


@pytest.mark.nightly
def test_two_hosts_train_two_steps(tmp_path: Path) -> None:
    if SSHD is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    reason = two_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    options = [*TINY, f"--data.path={corpus(tmp_path / 'corpus')}", "--steps=2"]
    options += ["--schedule.warmup-steps=1", "--validation.every=0", "--run-dir=run of two"]
    with two_hosts.two_hosts() as hosts, ssh_servers(hosts, tmp_path) as ssh:
        variables = {"HOSTS": ",".join(NAMES), "SSH": ssh, "PYTHON": sys.executable}
        output = hosts.run(
            0,
            str(SCRIPT),
            *options,
            cwd=tmp_path,
            env={**environment(), **variables, "PET_NPROC_PER_NODE": "1"},
            timeout=150,
        )
    assert "[node1] ranks: 2 on cpu" in output
    assert "[node2] distmp launch: " in output
    assert (tmp_path / "run of two" / "steps.jsonl").read_text().count("\n") == 2


def test_a_dry_run_prints_the_commands(tmp_path: Path) -> None:
    variables = {"DRY_RUN": "1", "HOSTS": "127.0.0.2,127.0.0.3", "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPT, "--steps=60"],
        cwd=tmp_path,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = (line for line in done.stdout.splitlines() if not line.startswith("#"))
    for rank, line in enumerate((first, second)):
        *ssh, remote = shlex.split(line)
        assert ssh[0] == "ssh"
        assert ssh[-1] == f"127.0.0.{rank + 2}"
        agent = shlex.split(remote)
        assert agent[:3] == ["cd", str(tmp_path), "&&"]
        assert f"--node-rank={rank}" in agent
        config = str(ROOT / "configs" / "quickstart.yaml")
        assert agent[agent.index("--") :] == ["--", "--config", config, "--steps=60"]


def test_needs_hosts() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "HOSTS"}
    done = subprocess.run([SCRIPT], env=variables, capture_output=True, text=True)
    assert done.returncode != 0
    assert "HOSTS=node1,node2" in done.stderr
