"""Losses of well-known scripts, as published and with the lines that docs/scripts.md replaces.

    python -m benchmarks.known_scripts --nanogpt NANOGPT --accelerate ACCELERATE

NANOGPT and ACCELERATE are clones of karpathy/nanoGPT and huggingface/accelerate; TRL's script is
the installed one. Each script trains a tiny model with random weights on one and two CPU ranks.
Models, tokenizers and data are written where a script looks for them, so it needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, save
from benchmarks.tables import scripts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scripts.md"
RANKS = (1, 2)
FORMS = ("original", "distmp", "distmp, float16")
TIMEOUT_SECONDS = 600
SPECIAL = ("<pad>", "<eos>", "<unk>")
WORDS = (*SPECIAL, *(f"w{number}" for number in range(61)))


@dataclass(frozen=True)
class Hunk:
    """Lines of a script and the lines that replace them."""

    old: str
    new: str


@dataclass(frozen=True)
class Script:
    """A published script, and how to train a few steps with it."""

    title: str
    """Its heading in docs/scripts.md."""

    path: str
    """Where it is in its repository."""

    prepare: Callable[[Path, Path], None]
    """Writes what the script reads to a directory; gets the directory and the repository."""

    arguments: tuple[str, ...]
    """Its arguments."""

    loss: str
    """The regular expression of a loss in its output."""

    float16: tuple[str, ...]
    """Further arguments, for float16."""

    shown: tuple[Hunk, ...] = ()
    """Replacements of all forms: losses are printed and fall in a few steps, and ranks end."""


def hunks(page: str, title: str) -> tuple[list[Hunk], list[Hunk]]:
    """Return the replacements for distmp and those for CPUs, from the blocks below a heading."""
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```diff\n(.*?)\n```", section, flags=re.DOTALL)
    return _parse(blocks[0]), [hunk for block in blocks[1:] for hunk in _parse(block)]


def _parse(block: str) -> list[Hunk]:
    parts = [part.splitlines() for part in block.split("\n\n")]
    return [
        Hunk(
            *("".join(f"{line[1:]}\n" for line in part if line[0] in kept) for kept in (" -", " +"))
        )
        for part in parts
    ]


def replaced(text: str, changes: list[Hunk]) -> str:
    """Apply replacements.

    Raises:
        ValueError: If the lines to replace are not in the script exactly once.
    """
    for change in changes:
        found = list(re.finditer(f"^{re.escape(change.old)}", text, re.MULTILINE))
        if len(found) != 1:
            raise ValueError(f"not in the script exactly once: {change.old!r}")
        text = text[: found[0].start()] + change.new + text[found[0].end() :]
    return text


def losses(script: Script, repository: Path, ranks: int, form: str) -> list[float]:
    """Train with a form of the script; return the losses that it prints.

    Args:
        script: The script.
        repository: The directory of its repository.
        ranks: Number of processes.
        form: "original", "distmp", or "distmp, float16".
    """
    ours = [] if form == "original" else hunks(PAGE.read_text(), script.title)[0]
    further = script.float16 if form == "distmp, float16" else ()
    shown = output(script, repository, ranks, [*script.shown, *ours], further)
    return [float(loss) for loss in re.findall(script.loss, shown, re.MULTILINE)]


def output(
    script: Script, repository: Path, ranks: int, changes: list[Hunk], further: tuple[str, ...] = ()
) -> str:
    """Train with a script and return its output.

    Args:
        script: The script.
        repository: The directory of its repository.
        ranks: Number of processes.
        changes: Replacements, besides those for CPUs.
        further: Further arguments.
    """
    for_cpus = hunks(PAGE.read_text(), script.title)[1]
    text = replaced((repository / script.path).read_text(), [*for_cpus, *changes])
    with tempfile.TemporaryDirectory(prefix="script-") as name:
        directory = Path(name)
        (directory / "script.py").write_text(text)
        torch.manual_seed(0)
        script.prepare(directory, repository)
        return run(ranks, directory, (*script.arguments, *further))


def run(ranks: int, directory: Path, arguments: tuple[str, ...] = ()) -> str:
    """Return the output of `script.py` in a directory; an error of it is raised."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "huggingface")}
    command = [sys.executable, *(launcher if ranks > 1 else []), "script.py", *arguments]
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            shown, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # unlike a kill, torchrun ends its ranks
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return shown


def _prepare_nanogpt(directory: Path, repository: Path) -> None:
    for name in ("model.py", "configurator.py"):
        (directory / name).write_text((repository / name).read_text())
    data = directory / "data" / "tiny"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        tokens = torch.randint(0, 64, (4096,)).sort().values  # so that there is something to learn
        (data / f"{split}.bin").write_bytes(tokens.to(torch.uint16).numpy().tobytes())


def _prepare_accelerate(directory: Path, repository: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes)
    BertForSequenceClassification(config).save_pretrained(directory / "bert-base-cased")
    _tokenizer().save_pretrained(directory / "bert-base-cased")
    glue = directory / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    files = "".join(
        f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "validation")
    )
    header = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    (glue / "README.md").write_text(header)
    for split, count in (("train", 160), ("validation", 16)):
        pairs = [
            {"idx": i, "sentence1": _sentence(i), "sentence2": _sentence(-i), "label": i % 2}
            for i in range(count)
        ]
        _write_lines(glue / f"{split}.jsonl", pairs)
    # The script prints no loss, and its metric would be downloaded.
    (directory / "evaluate.py").write_text(
        "class load:\n"
        "    def __init__(self, *names): pass\n"
        "    def add_batch(self, **batch): pass\n"
        "    def compute(self): return {}\n"
    )


def _prepare_trl(directory: Path, repository: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes, **tokens)
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    _tokenizer().save_pretrained(directory / "model")
    (directory / "data").mkdir()
    _write_lines(directory / "data" / "train.jsonl", [{"text": _sentence(i)} for i in range(64)])


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, eos, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token=pad, eos_token=eos, unk_token=unknown, model_max_length=64
    )


def _sentence(seed: int) -> str:
    """Return 3 to 24 words that follow each other as in the vocabulary, for models to learn."""
    generator = random.Random(seed)
    length = generator.randint(3, 24)
    first = generator.randrange(len(SPECIAL), len(WORDS) - length)
    return " ".join(WORDS[first : first + length])


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


_TRL_END = "        trainer.end()\n"
SCRIPTS = {
    "nanogpt": Script(
        title="nanoGPT",
        path="train.py",
        prepare=_prepare_nanogpt,
        arguments=(
            *("--device=cpu", "--backend=gloo", "--dtype=float32", "--compile=False"),
            *("--dataset=tiny", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32"),
            *("--batch_size=4", "--gradient_accumulation_steps=4", "--max_iters=10"),
            *("--eval_iters=1", "--warmup_iters=2", "--learning_rate=0.01"),
        ),
        loss=r"iter \d+: loss ([\d.]+)",
        float16=("--dtype=float16",),
    ),
    "accelerate": Script(
        title="accelerate",
        path="examples/by_feature/gradient_accumulation.py",
        prepare=_prepare_accelerate,
        arguments=("--cpu", "--gradient_accumulation_steps=2"),
        loss=r"^loss ([\d.]+)$",
        float16=("--mixed_precision", "fp16"),
        shown=(
            Hunk(
                "                optimizer.step()\n",
                '                accelerator.print(f"\\nloss {output.loss.item():.6f}")\n'
                "                optimizer.step()\n",
            ),
            Hunk("        num_warmup_steps=100,\n", "        num_warmup_steps=1,\n"),
            Hunk('    config = {"lr": 2e-5, ', '    config = {"lr": 2e-3, '),
        ),
    ),
    "trl": Script(
        title="TRL",
        path="trl/scripts/sft.py",
        prepare=_prepare_trl,
        arguments=(
            *("--model_name_or_path", "model", "--dataset_name", "data", "--output_dir", "out"),
            *("--use_cpu", "--bf16", "False", "--dtype", "float32", "--report_to", "none"),
            *("--max_steps", "10", "--per_device_train_batch_size", "2"),
            *("--gradient_accumulation_steps", "2", "--learning_rate", "0.01"),
            *("--logging_steps", "1", "--disable_tqdm", "True", "--save_strategy", "no"),
        ),
        loss=r"'loss': '?([\d.]+)",
        float16=("--fp16", "True"),
        shown=(
            # Where the trainer is freed, the destructor of torch's gloo group can wait forever for
            # a thread that waits for the interpreter.
            Hunk(
                _TRL_END, f"{_TRL_END}    import os, sys\n    sys.stdout.flush()\n    os._exit(0)\n"
            ),
        ),
    ),
}


def installed_trl() -> Path:
    """Return the directory that contains the installed package `trl`."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, required=True, help="clone of karpathy/nanoGPT")
    parser.add_argument("--accelerate", type=Path, required=True, help="clone of accelerate")
    arguments = parser.parse_args()
    repositories = {
        "nanogpt": arguments.nanogpt,
        "accelerate": arguments.accelerate,
        "trl": installed_trl(),
    }
    result = {
        "machine": machine("cpu"),
        "versions": {
            name: version(name) for name in ("torch", "accelerate", "transformers", "trl")
        },
        "commits": {name: _commit(repositories[name]) for name in ("nanogpt", "accelerate")},
        "scripts": {
            name: _all(SCRIPTS[name], directory) for name, directory in repositories.items()
        },
    }
    print(scripts.known_scripts(result))
    print(save("known-scripts-cpu", result))
    return 0


def _all(script: Script, repository: Path) -> dict[str, dict[str, list[float]]]:
    return {
        str(ranks): {form: losses(script, repository, ranks, form) for form in FORMS}
        for ranks in RANKS
    }


def _commit(repository: Path) -> str:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
