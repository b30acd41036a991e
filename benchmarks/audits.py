"""Audits of the gradients of scripts and examples of others, on two CPU ranks.

    python -m benchmarks.audits --nanogpt NANOGPT --accelerate ACCELERATE

NANOGPT and ACCELERATE are clones as for `benchmarks.known_scripts`, whose scripts are audited as
published. Of Transformers and Lightning there are a `Trainer` with labels of different lengths, and
the demo of a transformer that is part of Lightning. Models are tiny, with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distmp
from benchmarks.known_scripts import SCRIPTS, Hunk, installed_trl, output, run
from distmp.testing import AuditReport

RANKS = 2


class Auditing:
    """An audit that starts when it is built; rank 0 prints its report when it ends first."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._print)
        self._audit = self._stack.enter_context(distmp.audit(model, optimizer))

    def _print(self) -> None:
        if os.environ["RANK"] == "0":
            print(f"\nreport {json.dumps(asdict(self._audit.report))}", flush=True)

    def end(self) -> None:
        """Compare and print."""
        self._stack.close()


def trainer_callback(updates: int = 2) -> Any:
    """Return a callback of transformers that audits the first updates."""
    from transformers import TrainerCallback

    class AuditCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.auditing = Auditing(kwargs["model"], kwargs["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == updates:
                self.auditing.end()

    return AuditCallback()


def transformers_trainer(*, across_devices: bool) -> None:
    """Train with labels of different lengths."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes))
    data = [torch.randint(64, (16,)).tolist() for _ in range(16)]
    rows = [
        {"input_ids": r, "labels": [*r[: 2 + i], *[-100] * (14 - i)]} for i, r in enumerate(data)
    ]
    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=across_devices,
        report_to="none",
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=[trainer_callback()]).train()


def lightning_demo() -> None:
    """Train an epoch of five batches with two microbatches per update."""
    import lightning as L
    from lightning.pytorch.demos import Transformer

    class Demo(L.LightningModule):  # of lightning.pytorch.demos, with a smaller model
        def __init__(self) -> None:
            super().__init__()
            self.model = Transformer(64, 32, 2, 64, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, target = batch
            output = self.model(inputs, target)
            return nn.functional.nll_loss(output, target.view(-1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

        def on_train_start(self) -> None:
            self.auditing = Auditing(self.model, self.optimizers())

        def on_train_epoch_end(self) -> None:
            self.auditing.end()

    L.seed_everything(0)
    tokens = torch.randint(64, (20, 9))
    rows = [(row[:-1], row[1:]) for row in tokens]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Demo(), torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]


def cost() -> None:
    """Print the processor time of two audited steps relative to that of two steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.distributed.init_process_group("gloo")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.parallel.DistributedDataParallel(
        LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_attention_heads=4, **sizes))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randint(1024, (4, 4, 256))

    def steps() -> None:
        for index, batch in enumerate(batches):
            logits = model(input_ids=batch).logits
            (nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()) / 2).backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()

    def seconds(work: Callable[[], None]) -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    steps()
    alone = min(seconds(steps) for _ in range(3))
    auditing = Auditing(model, optimizer)
    ratio = (seconds(steps) + seconds(auditing.end)) / alone
    if torch.distributed.get_rank() == 0:
        text = f"two audited steps take {ratio:.1f} times the processor time of two steps"
        print(text, flush=True)


EXAMPLES: dict[str, Callable[[], None]] = {
    "transformers": lambda: transformers_trainer(across_devices=True),
    "transformers-rank-means": lambda: transformers_trainer(across_devices=False),
    "lightning": lightning_demo,
    "cost": cost,
}
# Where objects are freed, the destructor of torch's gloo group can wait forever for a thread that
# waits for the interpreter.
_EXAMPLE = """import os
from benchmarks.audits import EXAMPLES

EXAMPLES[{!r}]()
os._exit(0)
"""
_EPOCH_END = "        model.eval()\n        for step, batch in enumerate(eval_dataloader):\n"
HUNKS = {
    "nanogpt": (
        Hunk(
            "while True:\n",
            "from benchmarks.audits import Auditing\n"
            "auditing = Auditing(model, optimizer)\nwhile True:\n",
        ),
        Hunk("    iter_num += 1\n", "    iter_num += 1\n    iter_num == 2 and auditing.end()\n"),
    ),
    "accelerate": (
        Hunk(
            "    # Now we train the model\n",
            "    from benchmarks.audits import Auditing\n"
            "    auditing = Auditing(model, optimizer)\n",
        ),
        Hunk(_EPOCH_END, f"        auditing.end()\n{_EPOCH_END}"),
    ),
    "trl": (
        Hunk(
            "    # Train the model\n",
            "    from benchmarks.audits import trainer_callback\n"
            "    trainer.add_callback(trainer_callback())\n",
        ),
    ),
}


def result(name: str, repository: Path) -> str:
    """Return the report of a published script or an example, or the cost."""
    if name in HUNKS:
        script = SCRIPTS[name]
        shown = output(script, repository, RANKS, [*script.shown, *HUNKS[name]])
    else:
        with tempfile.TemporaryDirectory(prefix="script-") as directory:
            Path(directory, "script.py").write_text(_EXAMPLE.format(name))
            shown = run(RANKS, Path(directory))
    found = re.search(r"^report (.*)$", shown, re.MULTILINE)
    if found is None:
        raise ValueError(f"no report in the output of {name}:\n{shown}")
    measured = re.search(r"^two audited.*$", shown, re.MULTILINE)
    return measured[0] if measured else str(AuditReport(**json.loads(found[1])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="clone of karpathy/nanoGPT")
    parser.add_argument("--accelerate", type=Path, help="clone of accelerate")
    parser.add_argument("names", nargs="*", default=[*HUNKS, *EXAMPLES])
    arguments = parser.parse_args()
    for name in arguments.names:
        repository = getattr(arguments, name, None) or installed_trl()
        print(f"{name}: {result(name, repository)}", flush=True)
    versions = ("torch", "accelerate", "transformers", "trl", "lightning")
    print(", ".join(f"{name} {version(name)}" for name in versions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
