"""`Fp32GradBuckets` in a custom loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.adversary.mistakes import Ends, add, in_lines
from tests.adversary.parts import BucketsScript


def buckets(name: str, change: Any, ends: Ends, **limits: Any) -> None:
    add(f"buckets: {name}", change, "buckets", ends, kind="buckets", **limits)


def lines(name: str, text: str, ends: Ends, truth: tuple[str, ...] | None = None) -> None:
    buckets(name, in_lines(text, truth), ends)


ONE = ("backward", "step")
lines("correct", "begin, first, backward, end, last, backward, end, finish, step", "right")
lines("one microbatch", "begin, last, backward, end, finish, step", "right", ONE)
lines("no begin", "first, backward, end, last, backward, end, finish, step", "error")
lines("nothing announced", "begin, backward, finish, step", "error")
lines("no end", "begin, first, backward, last, backward, finish, step", "error")
lines("no last", "begin, first, backward, end, first, backward, end, finish, step", "either")
lines("last twice", "begin, last, backward, end, last, backward, end, finish, step", "error")
lines("finish twice", "begin, last, backward, end, finish, finish, step", "either", ONE)
lines("finish first", "finish, begin, last, backward, end, finish, step", "either", ONE)
lines("finish alone", "finish", "either", ("zero",))
lines("no finish", "begin, last, backward, end, step", "error")
lines("no backward", "begin, last, end, finish, step", "either", ("zero", "step"))
lines("two backwards", "begin, last, backward, backward, end, finish, step", "either")
lines(
    "zero in between",
    "begin, first, backward, end, zero, last, backward, end, finish, step",
    "right",
)
lines("zero at the end", "begin, last, backward, end, finish, step, zero", "right", ONE)
lines("discard first", "discard, begin, last, backward, end, finish, step", "right", ONE)
lines(
    "discard and go on",
    "begin, first, backward, discard, begin, last, backward, end, finish, step",
    "right",
    ONE,
)
lines("end without begin", "end, begin, last, backward, end, finish, step", "either", ONE)
lines("begin twice", "begin, begin, last, backward, end, finish, step", "right", ONE)


def without_group(script: BucketsScript) -> None:
    script.group = lambda: None


buckets("no group under several ranks", without_group, "error", ranks=(2,))


def group_is(value: Any) -> None:
    def change(script: BucketsScript) -> None:
        script.group = lambda: value

    buckets(f"group = {value!r}", change, "error")


for _group in ("world", 0, [0, 1]):
    group_is(_group)


def named(name: str, wrong: Any, ends: Ends = "error", **limits: Any) -> None:
    def change(script: BucketsScript) -> None:
        model = script.model
        script.named = lambda: wrong(model)

    buckets(f"of {name}", change, ends, **limits)


named("a generator", lambda model: model.named_parameters(), "right")
named("parameters without names", lambda model: list(model.parameters()))
named("the model", lambda model: model)
named("nothing", lambda model: [])
named("None", lambda model: None)
named("the state", lambda model: list(model.state_dict().items()))
named(
    "parameters twice",
    lambda model: [*model.named_parameters(), *model.named_parameters()],
    "right",
)
named("a name twice", lambda model: [("w", p) for p in model.parameters()])
named("frozen parameters", lambda model: list(model.requires_grad_(False).named_parameters()))
named(
    "an integer",
    lambda model: [("i", nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False))],
)
named("float64", lambda model: [("d", nn.Parameter(torch.ones(2, dtype=torch.float64)))])
named("no leaf", lambda model: [(n, p * 2) for n, p in model.named_parameters()])


def one_option(name: str, value: Any, ends: Ends = "error") -> None:
    def change(script: BucketsScript) -> None:
        script.options[name] = value

    buckets(f"{name} = {value!r}", change, ends)


for _name, _values in {
    "reduce_dtype": ("bf16", None, torch.float64, torch.int8, "float32", 16),
    "bucket_bytes": (0, -1, "25MB", 1.5),
    "shard": ("no",),
    "reproducible": ("no",),
    "drop_non_finite": ("no",),
}.items():
    for _value in _values:
        one_option(_name, _value)
one_option("bucket_bytes", 1, "right")


def different(name: str, change_it: Any, known: str = "") -> None:
    def change(script: BucketsScript) -> None:
        if script.rank == 1:
            change_it(script)

    buckets(f"only rank 1 has {name}", change, "error", ranks=(2,), known=known)


different(
    "fewer parameters", lambda s: setattr(s, "named", lambda: list(s.model.named_parameters())[1:])
)
different("another reduce_dtype", lambda s: s.options.update(reduce_dtype=torch.bfloat16))
different(
    "another order", lambda s: setattr(s, "named", lambda: list(s.model.named_parameters())[::-1])
)
different("other buckets", lambda s: s.options.update(bucket_bytes=1))
different("no finish", lambda s: s.lines.remove("finish"))
