"""Odd inputs: configurations, command lines and checkpoints that nobody should write.

    python -m tests.adversary.inputs --cases 5000 --seed 7
    python -m tests.adversary.inputs --seed 7 --replay 1234

Each case runs in a process of its own, forked from one that has imported distmp, with limits on
processor time and memory. It ends right, with the weights of an undisturbed run, or with one
message and exit code 2; or 1, if no checkpoint can be used.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tests.checkpoint.sealing import seal
from tests.checkpoint.test_damage import DAMAGES
from tests.progress import INTERVAL_SECONDS, Progress
from tests.ranks import PRELOAD, run_ranks
from tests.torchrun import corpus

# Limits of a case: seconds of processor time, bytes of address space beyond those of the imports,
# and seconds without progress.
CPU_SECONDS, MEMORY_BYTES, IDLE_SECONDS = 15, 4 << 30, 40
LONGEST_MESSAGE = 3000
PRELOADED = (*PRELOAD, "distmp.cli", "distmp.launcher.command", "distmp.commands.export",
             "distmp.commands.explain.command", "distmp.commands.report",
             "distmp.export.export")  # fmt: skip

TINY: dict[str, Any] = {
    "run_dir": "run",
    "steps": 1,
    "model": {"options": {"layers": 1, "dimension": 16, "heads": 2, "hidden": 16}},
    "data": {"path": "corpus", "sequence_length": 16},
    "batch": {"global_batch_size": 4, "microbatch_size": 2},
    "precision": {"policy": "fp32"},
    "schedule": {"warmup_steps": 0},
    "validation": {"final_samples": 2},
}
# What makes a run small, whatever its configuration says.
SMALL = [
    "--steps=1", "--model.options={layers: 1, dimension: 16, hidden: 16, heads: 2}",
    "--data.path=corpus", "--data.sequence-length=16", "--batch.global-batch-size=4",
    "--batch.microbatch-size=2", "--validation.final-samples=2",
    "--schedule.warmup-steps=0",
]  # fmt: skip
# A run of so many steps is disturbed at its checkpoints of the steps before the last one.
STEPS = 3
RESUME = [
    "train", "--config=tiny.yaml", f"--steps={STEPS}", "--checkpoint.every=1",
    "--checkpoint.keep=9", "--validation.final-samples=1",
]  # fmt: skip

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"),
    -float("inf"), 10**30, -(10**30), 10**4000, "", " ", "x", "0", "true", "nan", "auto", "é" * 9,
    "a" * 250, "\ud800", "nul\0", "new\nline", "\x1b[31m", "../..", "a/b", ":", "a:b", "os:path",
    "%s", "{}", "~", "-1", [], [1], ["x", None], [[[]]], {}, {"a": 1}, {"x": {"y": [None]}}, {1: 2},
    {"": 0}, {None: 1}, {"é": "\0"},
]  # fmt: skip
ODD_BYTES = (
    b"\t", b"\0", b"\xff\xfe", b"&a [*a]", b"*b", b"!!python/object:os.system", b"!!int x", b"{",
    b"<<: *a\n", b"? ", b"- ", b"[" * 3000, b"%YAML 9\n", b"---\n", b"|", b"\xe2\x80\xa8",
    b'"\\ud800"', b"a: " * 400,
)  # fmt: skip
# Settings that ask for more work or memory than a case has, or write outside of its directory.
LEFT_OUT = {"compile", "run_dir"}


@dataclass
class Ending:
    """How a case ended.

    Attributes:
        code: Exit code; negative: the signal that ended the process.
        output: Standard output.
        errors: Standard error.
        problem: Why the process was ended.
    """

    code: int
    output: str
    errors: str
    problem: str = ""


@dataclass
class Verdict:
    """Whether a case ended in an allowed way.

    Attributes:
        number: Number of the case.
        case: What was done.
        problem: What is wrong; empty if nothing is.
        ending: How it ended.
        seconds: Duration.
    """

    number: int
    case: str
    problem: str
    ending: Ending
    seconds: float

    def __str__(self) -> str:
        said = self.ending.errors.strip()
        shown = said if len(said) < 2000 else f"{said[:800]} ... {said[-1200:]}"
        return (
            f"case {self.number}: {self.problem or 'as it may be'}\n  {self.case}\n"
            f"  exit code {self.ending.code}: {shown}"
        )


# What is tried. Each function prepares the current directory and returns the arguments of `distmp`.


def odd_settings(chance: random.Random) -> tuple[str, list[str]]:
    """Give one or two settings an odd value."""
    config, made = json.loads(json.dumps(TINY)), []
    for _ in range(chance.choice([1, 1, 2])):
        name = chance.choice([*_settings(), "unknown", "model", "optim", "log", "optim.unknown"])
        fitting = [each for each in VALUES if type(each) is type(_defaults().get(name))]
        value = chance.choice(fitting if fitting and chance.random() < 0.6 else VALUES)
        section = config
        *sections, last = name.split(".")
        for part in sections:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                break
        else:
            section[last] = value
            made.append(f"{name} = {ascii(value)[:60]}")
    Path("odd.yaml").write_text(yaml.safe_dump(config, allow_unicode=False))
    return ", ".join(made), ["train", "--config", "odd.yaml"]


def odd_text(chance: random.Random) -> tuple[str, list[str]]:
    """Damage the text of a configuration."""
    text = yaml.safe_dump(TINY).encode()
    at, count = chance.randrange(len(text)), chance.randint(1, 9)
    odd = chance.choice([*ODD_BYTES, chance.randbytes(count)])
    damaged = chance.choice([text[:at] + odd + text[at + count :], text[:at], odd + text])
    Path("odd.yaml").write_bytes(damaged)
    return f"{odd[:30]!r} at {at}", ["train", "--config", "odd.yaml", *SMALL]


def odd_file(chance: random.Random) -> tuple[str, list[str]]:
    """Give a configuration that is no small, regular file, or means more than it says."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    kinds: dict[str, Callable[[Path], object]] = {
        **NO_FILES,
        "comments": lambda path: path.write_bytes(b"# comment\n" * 3_000_000),
        "aliases": lambda path: path.write_text(bomb),
        "aliases in options": lambda path: path.write_text(f"{bomb}model: {{options: *a11}}\n"),
        "merges": lambda path: path.write_text(merges),
        "itself": lambda path: path.write_text("model: &a {options: *a}\n"),
        "deep list": lambda path: path.write_text("[" * chance.choice([50, 300, 900, 50_000])),
        "deep options": lambda path: path.write_text(
            f"optim: {{options: {'{a: ' * (depth := chance.choice([40, 200, 700]))}1{'}' * depth}}}"
        ),
        "long line": lambda path: path.write_text("data: {pattern: " + "a" * 200_000),
        "many keys": lambda path: path.write_text("".join(f"k{n}: 1\n" for n in range(15_000))),
    }
    kind = chance.choice(list(kinds))
    kinds[kind](Path("odd.yaml"))
    return kind, ["train", "--config", "odd.yaml", *SMALL]


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "random": lambda path: path.symlink_to("/dev/urandom"),
    "loop": _loop,
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "empty": Path.touch,
    "huge": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "nothing": lambda path: None,
}


def odd_command(chance: random.Random) -> tuple[str, list[str]]:
    """Give options in odd orders, twice, without values, or with odd ones."""
    command = chance.choice(["train", "train", "launch", "export", "report", "explain", "x", ""])
    options = {
        "train": [f"--{name.replace('_', '-')}" for name in _settings()],
        "launch": ["--dry-run", "--nnodes", "--nproc-per-node", "--hosts", "--port",
                   "--max-restarts", "--rdzv-endpoint", "--environment", "--ssh"],
        "export": ["--to", "--dtype", "run", "weights"],
        "report": ["--out", "--to", "run", "."],
    }  # fmt: skip
    words = [*options.get(command, []), "--config", "--help", "--version", "--", "-", "--x", "-x"]
    plain = [value for value in VALUES if isinstance(value, str) and "\0" not in value]
    values = [*plain, "1e999", "9" * 5000, "{a: 1}", "[1", "{" * 2000, "tiny.yaml", "\udcff"]
    arguments = []
    for _ in range(chance.randint(0, 4)):
        word, value = chance.choice(words), chance.choice(values)
        arguments += chance.choice(
            [[word], [word, value], [f"{word}={value}"], [value], [word] * 2]
        )
    if command == "launch":  # nothing is started
        arguments = ["--dry-run", *arguments]
    if command in ("train", "explain"):
        arguments = [*chance.choice([["--config=tiny.yaml"], SMALL]), *arguments]
    while any(left_out(word) for word in arguments):
        arguments.pop()
    return ascii(arguments)[:300], [command, *arguments]


def left_out(word: str) -> bool:
    return any(word.startswith(f"--{name.replace('_', '-')}") for name in LEFT_OUT)


def damaged_checkpoint(chance: random.Random) -> tuple[str, list[str]]:
    """Damage the files of a checkpoint."""
    path = Path(f"run/checkpoints/step-{STEPS - 1:06d}")
    if chance.random() < 0.4:
        kind, name = chance.choice(list(NO_FILES)), chance.choice(sorted(os.listdir(path)))
        (path / name).unlink()
        NO_FILES[kind](path / name)
        return f"{name} is {kind}", _resumed(chance, path)
    damage = chance.choice(DAMAGES)
    damage(path, chance)
    return damage.__name__, _resumed(chance, path)


def forged_numbers(chance: random.Random) -> tuple[str, list[str]]:
    """Change state.json, and recompute its checksum."""
    path = Path(f"run/checkpoints/step-{STEPS - 1:06d}")
    file = path / "state.json"
    state = json.loads(file.read_text())
    target = chance.choice([state, state["numbers"], state["numbers"], state["files"]])
    name = chance.choice([*target, "odd"])
    value = chance.choice([*VALUES[:-3], "deep"])
    if value == "deep":
        value = []
        for _ in range(chance.choice([60, 300, 900])):
            value = [value]
    # Another position in the data cannot be told from the right one.
    if name == "samples" and type(value) is int and value >= 0:
        value = -1
    if chance.random() < 0.3 and name in target:
        del target[name]
        value = "(missing)"
    else:
        target[name] = value
    _seal_content(file, state)
    return f"{name} = {ascii(value)[:60]}", _resumed(chance, path)


def forged_index(chance: random.Random) -> tuple[str, list[str]]:
    """Change the index of the tensors, and recompute the checksums."""
    import torch

    path = Path(f"run/checkpoints/step-{STEPS - 1:06d}")
    file = path / ".metadata"
    index = pickle.loads(file.read_bytes())
    names = list(index.state_dict_metadata)
    name = chance.choice([each for each in names if index.state_dict_metadata[each].size])
    tensor = index.state_dict_metadata[name]
    entry = next(entry for key, entry in index.storage_data.items() if key.fqn == name)
    chunk = tensor.chunks[0]
    half = type(chunk)(chunk.offsets, torch.Size([max(1, chunk.sizes[0] // 2), *chunk.sizes[1:]]))
    large = torch.Size([1 << 40, *chunk.sizes[1:]])

    def rename(new: str) -> None:
        index.state_dict_metadata[new] = index.state_dict_metadata.pop(name)

    changes: dict[str, Callable[[], object]] = {
        "two equal halves": lambda: setattr(tensor, "chunks", [half, half]),
        "twice": lambda: setattr(tensor, "chunks", [chunk, chunk]),
        "no parts": lambda: setattr(tensor, "chunks", []),
        "outside": lambda: setattr(chunk, "offsets", torch.Size([-1] * len(chunk.offsets))),
        "parts of other dimensions": lambda: setattr(chunk, "sizes", torch.Size([1])),
        "huge": lambda: (setattr(tensor, "size", large), setattr(chunk, "sizes", large)),
        "size is text": lambda: setattr(tensor, "size", "x"),
        "no slash": lambda: rename("weight"),
        "only a slash": lambda: rename("/"),
        "of the optimizer": lambda: rename("optimizer/x"),
        "of the model": lambda: rename("model/x"),
        "unused": lambda: rename("unused/"),
        "surrogate": lambda: rename("model/\ud800"),
        "no name": lambda: rename(""),
        "of no parameter": lambda: rename("optimizer/x/exp_avg"),
        "offset": lambda: setattr(entry, "offset", chance.choice([-1, 1, 1 << 70, "x", None])),
        "length": lambda: setattr(entry, "length", chance.choice([-1, 1, 1 << 70, "x", None])),
        "file": lambda: setattr(entry, "relative_path", chance.choice(["/etc/passwd", "", "x", 7])),
        "compressed": lambda: setattr(entry, "transform_descriptors", ["zstd"]),
        "dtype": lambda: setattr(tensor.properties, "dtype", chance.choice([torch.int64, "x"])),
        "not stored": lambda: index.storage_data.clear(),
        "nothing": lambda: index.state_dict_metadata.clear(),
        "no list": lambda: setattr(index, "state_dict_metadata", chance.choice([None, 5, []])),
    }
    kind = chance.choice([*changes, "bytes", "bytes"])
    if kind == "bytes":
        content = bytearray(file.read_bytes())
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        file.write_bytes(content)
    else:
        changes[kind]()
        file.write_bytes(pickle.dumps(index))
    seal(path)
    return f"{kind} of {name}", _resumed(chance, path)


def mixed_files(chance: random.Random) -> tuple[str, list[str]]:
    """Take files from the checkpoint of another step, and recompute the checksums."""
    path = Path(f"run/checkpoints/step-{STEPS - 1:06d}")
    files = [
        ["__0_0.distcp", ".metadata"],
        ["state.json"],
        ["__0_0.distcp", ".metadata", "state.json"],
    ]
    taken = chance.choice(files)
    for name in taken:
        shutil.copyfile(path.with_name(f"step-{1:06d}") / name, path / name)
    seal(path)
    return f"{taken} of step 1", _resumed(chance, path)


def _seal_content(file: Path, state: Any) -> None:
    from distmp.checkpoint.manifest import _content_sum

    if isinstance(state, dict) and "crc32" in state:
        state.pop("crc32")
        with contextlib.suppress(RecursionError):
            state["crc32"] = f"{_content_sum(json.loads(json.dumps(state))):08x}"
    file.write_text(json.dumps(state))


def _resumed(chance: random.Random, path: Path) -> list[str]:
    if chance.random() < 0.15:
        return ["export", str(chance.choice([path, path.parent, "run"])), "--to", "weights"]
    return [*RESUME, f"--resume={chance.choice(['auto', 'auto', path, path.parent])}"]


# The more frequent ones are named more often.
CASES = (
    odd_settings, damaged_checkpoint, odd_command, forged_numbers, odd_settings, odd_text,
    forged_index, odd_command, odd_settings, odd_file, damaged_checkpoint, mixed_files,
)  # fmt: skip


@functools.cache
def _defaults() -> dict[str, Any]:
    from distmp.config import RunConfig
    from distmp.utils.settings import flat
    from tests.settings import leaf_names

    return flat(asdict(RunConfig()), frozenset(leaf_names(RunConfig)))


def _settings() -> list[str]:
    from distmp.config import RunConfig
    from tests.settings import leaf_names

    return [name for name in leaf_names(RunConfig) if name not in LEFT_OUT]


# Processes


def isolated(work: Callable[[], int], directory: Path) -> Ending:
    """Run `work` in a process of its own, in a directory, with limits."""
    outputs = [directory.with_suffix(".out"), directory.with_suffix(".err")]
    pid = os.fork()
    if pid == 0:
        _run_limited(work, directory, outputs)
    progress, problem, pause = Progress([pid], IDLE_SECONDS, 4 * CPU_SECONDS), "", 0.002
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(pause)
        pause = min(INTERVAL_SECONDS, 1.2 * pause)
        if pause == INTERVAL_SECONDS and (problem := problem or progress.problem() or ""):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    output, errors = (file.read_bytes().decode(errors="replace") for file in outputs)
    return Ending(os.waitstatus_to_exitcode(ended[1]), output, errors, problem)


def _run_limited(work: Callable[[], int], directory: Path, outputs: Sequence[Path]) -> NoReturn:
    """Run `work` in this process and end it."""
    code = 70
    try:
        os.setpgid(0, 0)
        # A rank of a test is a daemon, which may not start the workers of a DataLoader.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        for number, file in enumerate(outputs, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
        os.chdir(directory)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001  # judged by the parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(arguments: list[str]) -> int:
    """Run the command `distmp`."""
    import torch

    from distmp import cli

    torch.set_num_threads(1)
    sys.argv = ["distmp", *arguments]
    code = cli.main(arguments)
    if code == 0 and arguments[:1] == ["train"] and "--resume" in " ".join(arguments):
        print(f"weights {_weights(Path('run'))}")
    return code


def _weights(run: Path) -> str:
    """Return a digest of the weights after the last step."""
    from distmp.checkpoint.loading import StoredCheckpoint
    from distmp.export.export import CheckpointWeights

    checkpoint = StoredCheckpoint(run / "checkpoints" / f"step-{STEPS:06d}")
    digest = hashlib.sha256()
    weights = CheckpointWeights(checkpoint, torch_float32())
    for name in sorted(weights.specs):
        digest.update(name.encode() + weights.read(name).numpy().tobytes())
    return digest.hexdigest()


def torch_float32() -> Any:
    import torch

    return torch.float32


class Bench:
    """Runs cases in directories below one, from which every case starts with an equal copy.

    Args:
        directory: An empty directory.
        seed: Seed of all cases.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self._start = directory / "start"
        corpus(self._start / "corpus")
        (self._start / "tiny.yaml").write_text(yaml.safe_dump(TINY))
        made = isolated(lambda: _command([*RESUME, "--resume=auto"]), self._start)
        assert made.code == 0, made
        self._expected = made.output.splitlines()[-1]
        assert self._expected.startswith("weights "), made
        shutil.rmtree(self._start / f"run/checkpoints/step-{STEPS:06d}")

    def judge(self, number: int) -> Verdict:
        """Run a case."""
        chance = random.Random(f"{self._seed} {number}")
        kind = CASES[number % len(CASES)]
        directory = self._directory / str(number)
        shutil.copytree(self._start, directory)
        started, case = time.monotonic(), ["unknown"]
        os.environ.update(COLUMNS="100", TMPDIR=str(directory))

        def work() -> int:
            made, arguments = kind(chance)
            Path("case").write_text(f"{kind.__name__}: {made}; distmp {ascii(arguments)[:400]}")
            Path("arguments").write_text(json.dumps(arguments))
            return _command(arguments)

        ending = isolated(work, directory)
        case = (directory / "case").read_text() if (directory / "case").exists() else "was not made"
        arguments = (
            json.loads((directory / "arguments").read_text()) if case != "was not made" else []
        )
        problem = self._problem(ending, arguments)
        shutil.rmtree(directory, ignore_errors=True)
        return Verdict(number, case, problem, ending, time.monotonic() - started)

    def _problem(self, ending: Ending, arguments: list[str]) -> str:
        """Return what is wrong with the end of a case."""
        said = ending.errors
        if ending.problem:
            return ending.problem
        if ending.code < 0:
            return f"died of {signal.Signals(-ending.code).name}"
        if "Traceback (most recent call last)" in said or ending.code == 70:
            return "a traceback"
        if ending.code == 0:
            resumed = any(word.startswith("--resume=") for word in arguments)
            right = not resumed or self._expected in ending.output
            return "" if right else "continues with other numbers"
        reads = any(word.startswith("--resume") or word == "export" for word in arguments)
        if ending.code == 1 and not reads:
            return "exit code 1, but no checkpoint is read"
        if ending.code not in (1, 2):
            return f"exit code {ending.code}"
        if not said.strip() and ending.output.startswith(("usage", "distmp", "Usage")):
            return ""  # the help
        messages = [line for line in said.splitlines() if line.startswith("distmp")]
        if len(messages) != 1:
            return f"{len(messages)} messages"
        return "" if len(messages[0]) < LONGEST_MESSAGE else "a long message"


def judge_all(numbers: Sequence[int], seed: int) -> list[Verdict]:
    """Run cases in this process, which must not have run any operation of torch."""
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), seed)
        return [bench.judge(number) for number in numbers]


def run(numbers: Sequence[int], seed: int, timeout: float = 100) -> list[Verdict]:
    """Run cases one after the other.

    Args:
        numbers: Their numbers.
        seed: Seed of all cases.
        timeout: Seconds without progress after which a test fails.
    """
    return run_ranks(judge_all, 1, list(numbers), seed, timeout=timeout, initialize=False)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--replay", type=int, action="append", help="the number of a case")
    parser.add_argument("--verbose", action="store_true", help="also show what ends as it may")
    wanted = parser.parse_args()
    print(f"seed {wanted.seed}", flush=True)
    numbers = wanted.replay or range(wanted.cases)
    failed = 0
    for start in range(0, len(numbers), 50):
        for verdict in run(numbers[start : start + 50], wanted.seed):
            failed += bool(verdict.problem)
            if verdict.problem or wanted.verbose or wanted.replay:
                print(f"{verdict}\n", flush=True)
        print(f"{min(start + 50, len(numbers))} cases, {failed} failed", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
