"""Job files for clusters: a Slurm batch script, and the objects of Kubernetes."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import yaml

from distmp.errors import ConfigError

_SLURM = """\
#!/bin/bash
# Train on several nodes under Slurm. Submit it from a folder that all nodes share:
#
#     sbatch launch/slurm.sbatch                     # the run at the end of this file
#     sbatch launch/slurm.sbatch --optim.lr 3e-4     # one setting changed
#     sbatch --nodes=4 launch/slurm.sbatch           # more nodes
#
# Before its time is up the job writes a checkpoint and goes back in the queue, as often as the run
# needs. Written by `distmp launch --render slurm`.
#
# Change for your own job: time, partition and account; PYTHON, to use another environment.
#
#SBATCH --job-name=distmp
#SBATCH --nodes=^nodes
#SBATCH --gpus-per-node=^ranks
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#
# One launcher on each node, which has the whole node:
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#
# SIGUSR1 so many seconds before the end: time for the step that runs and for a checkpoint.
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

export PET_NPROC_PER_NODE="${PET_NPROC_PER_NODE:-^ranks}"

srun --cpu-bind=none "${PYTHON:-python3}" -m distmp launch ^options-- \\
    ^run "$@"
code=$?

# Stopped in order, with a checkpoint, before the last step.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_KUBERNETES = """\
# Train on several nodes of a Kubernetes cluster (1.31 or later), without an operator:
#
#     kubectl apply -f launch/kubernetes.yaml
#     kubectl logs --follow --prefix -l job-name=distmp
#
# A pod that is evicted, or whose node goes down, is made again, and all ranks go on from the newest
# checkpoint. Written by `distmp launch --render kubernetes`.
#
# Change for your own job: image, an image with distmp and the run's files in its working directory;
# claimName, a volume that all nodes can write to at the same time (ReadWriteMany).

# Gives pods names, by which they find the first one.
apiVersion: v1
kind: Service
metadata:
  name: distmp
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: distmp
---
apiVersion: batch/v1
kind: Job
metadata:
  name: distmp
spec:
  # One pod for each node; the one with index 0 hosts the rendezvous.
  completionMode: Indexed
  completions: ^nodes
  parallelism: ^nodes
  # When a pod fails, those of the other nodes do as well: three times all of them.
  backoffLimit: ^failures
  podFailurePolicy:
    rules:
      # A wrong configuration does not become right by itself.
      - action: FailJob
        onExitCodes: {containerName: ranks, operator: In, values: [2]}
      # Stopped in order, with a checkpoint: goes on, however often this happens.
      - action: Ignore
        onExitCodes: {containerName: ranks, operator: In, values: [75]}
      - action: Ignore
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
  template:
    spec:
      subdomain: distmp
      restartPolicy: Never
      # Between SIGTERM and the end: time for the step that runs and for a checkpoint.
      terminationGracePeriodSeconds: 180
      containers:
        - name: ranks
          image: distmp:latest
          command: [^launch]
          args: [^run]
          resources:
            limits: {nvidia.com/gpu: ^ranks}
          volumeMounts:
            - {name: runs, mountPath: /runs}
            - {name: shared-memory, mountPath: /dev/shm}
      volumes:
        - name: runs
          persistentVolumeClaim:
            claimName: distmp-runs
        # What data loaders and NCCL exchange; a container has 64 MiB by itself.
        - name: shared-memory
          emptyDir: {medium: Memory, sizeLimit: 16Gi}
"""


KINDS = ("slurm", "kubernetes")

# Words that are truth values or nothing to one parser or another.
_YAML_OTHER_THAN_TEXT = ("yes", "no", "true", "false", "on", "off", "null")


class _Template(string.Template):
    """`^name` is a place to fill in: both kinds of files have dollar signs of their own."""

    delimiter = "^"


@dataclass(frozen=True)
class JobRequest:
    """What a job file is written for.

    Attributes:
        nodes: Number of machines.
        ranks: Ranks on each, one for each GPU.
        options: Further options of `distmp launch`.
        run: Options of `distmp train`.
    """

    nodes: int
    ranks: int
    options: tuple[str, ...]
    run: tuple[str, ...]


def render(launch_arguments: Sequence[str], train_arguments: Sequence[str]) -> str:
    """Return the text of a job file.

    Args:
        launch_arguments: Options of `distmp launch`: --render with `slurm` or `kubernetes`,
            --nnodes, --nproc-per-node, and what else the launchers of the job are to get.
        train_arguments: Options of `distmp train`; they are not checked.

    Raises:
        ConfigError: If one of the three is missing or impossible, or an option is not UTF-8.
    """
    for word in (*launch_arguments, *train_arguments):
        _check_text(word)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--render", required=True, choices=KINDS)
    parser.add_argument("--nnodes")
    parser.add_argument("--nproc-per-node", "--nproc_per_node")
    try:
        given, rest = parser.parse_known_args(launch_arguments)
    except argparse.ArgumentError as error:
        raise ConfigError("distmp launch", shlex.join(launch_arguments), str(error)) from None
    request = JobRequest(
        _count("--nnodes", given.nnodes),
        _count("--nproc-per-node", given.nproc_per_node),
        tuple(rest),
        tuple(train_arguments),
    )
    return _WRITERS[given.render](request)


def _check_text(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise ConfigError("--render", word, "is not UTF-8, which job files are") from None


def _count(option: str, text: str | None) -> int:
    if text is None or not re.fullmatch(r"[1-9][0-9]*", text):
        raise ConfigError(option, text, "a job file asks for so many; give a number of 1 or more")
    return int(text)


def _slurm(request: JobRequest) -> str:
    return _Template(_SLURM).substitute(
        nodes=request.nodes,
        ranks=request.ranks,
        options="".join(f"{shlex.quote(word)} " for word in request.options),
        run=shlex.join(["--resume=auto", *request.run]),
    )


def _kubernetes(request: JobRequest) -> str:
    options = [f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks}", *request.options]
    return _Template(_KUBERNETES).substitute(
        nodes=request.nodes,
        ranks=request.ranks,
        failures=3 * request.nodes,
        launch=_yaml_words(["python3", "-m", "distmp", "launch", *options, "--"]),
        run=_yaml_words(["--run-dir=/runs/distmp", "--resume=auto", *request.run]),
    )


_WRITERS: dict[str, Callable[[JobRequest], str]] = {"slurm": _slurm, "kubernetes": _kubernetes}


def _yaml_words(words: Iterable[str]) -> str:
    # Kubernetes puts the value of a variable in place of $(NAME), and a dollar sign for two.
    return ", ".join(_yaml_word(word.replace("$", "$$")) for word in words)


def _yaml_word(word: str) -> str:
    """Return a word for a list in brackets, quoted unless every parser takes it for text."""
    plain = re.fullmatch(r"--|--?[A-Za-z][\w./=-]*|[A-Za-z]\w+(/[\w.-]+)*", word, re.ASCII)
    if plain and word.lower() not in _YAML_OTHER_THAN_TEXT:
        return word
    return yaml.safe_dump(word, default_style='"', width=math.inf, allow_unicode=True).rstrip("\n")
