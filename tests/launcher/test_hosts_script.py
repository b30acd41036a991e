"""Test `distmp launch --hosts` on two hosts with an ssh server each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import two_hosts
from tests.torchrun import TINY, corpus, environment, python
from tests.two_hosts import NAMES, TwoHosts

ROOT = Path(__file__).parent.parent.parent
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def ssh_servers(hosts: TwoHosts, directory: Path) -> Iterator[str]:
    """Start an ssh server with temporary keys on each host; yield the ssh command to reach them."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True
        )
    shutil.copy(directory / "user.pub", directory / "authorized")
    (directory / "known").write_text(f"{','.join(NAMES)} {(directory / 'host.pub').read_text()}")
    server = {
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized",
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
    client = {"IdentityFile": directory / "user", "UserKnownHostsFile": directory / "known"}
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
        output = hosts.run(
            0,
            *python("-m", "distmp", "launch", "--hosts", ",".join(NAMES), "--ssh", ssh),
            *("--", "--config", str(ROOT / "configs" / "quickstart.yaml"), *options),
            cwd=tmp_path,
            env={**environment(), "PET_NPROC_PER_NODE": "1"},
            timeout=150,
        )
    assert "[node1] ranks: 2 on cpu" in output
    assert "[node2] distmp launch: " in output
    assert (tmp_path / "run of two" / "steps.jsonl").read_text().count("\n") == 2
