from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distmp.buckets import used_parameters as module
from distmp.buckets.used_parameters import UsedParameters
from tests.ranks import ranks

CPU = torch.device("cpu")
APPLIED, SKIPPED = torch.zeros(()), torch.ones(())


def step(
    used: UsedParameters, *microbatches: tuple[str, bool | None], skipped: torch.Tensor
) -> str:
    """Run a step with microbatches (used letters, whether kept); return the unused letters."""
    used.begin_step()
    for letters, kept in microbatches:
        for letter in letters:
            used.mark_used(letter)
        used.end_microbatch(None if kept is None else torch.tensor(kept))
    used.exchange_flags()
    used.end_step(skipped)
    return "".join(letter for letter in "abcd" if letter in used.unused_in_step)


def test_parameter_is_updated_from_its_first_gradient_on() -> None:
    used = UsedParameters("abcd", None, CPU)
    assert step(used, ("a", None), ("ab", None), skipped=APPLIED) == "cd"
    assert step(used, ("", None), skipped=APPLIED) == "cd"
    assert step(used, ("c", None), skipped=APPLIED) == "d"
    assert used.unused == ["d"]


def test_dropped_microbatches_and_skipped_steps_do_not_count() -> None:
    used = UsedParameters("abcd", None, CPU)
    assert step(used, ("a", True), ("ab", False), skipped=APPLIED) == "bcd"
    assert step(used, ("bc", None), skipped=SKIPPED) == "d"
    assert step(used, ("c", None), skipped=APPLIED) == "bd"
    assert used.unused == ["b", "d"]


def test_an_unfinished_step_does_not_count() -> None:
    used = UsedParameters("ab", None, CPU)
    used.begin_step()
    used.mark_used("a")
    assert step(used, ("b", None), skipped=APPLIED) == "a"


def test_unused_parameters_can_be_restored() -> None:
    used = UsedParameters("ab", None, CPU)
    assert step(used, ("ab", None), skipped=APPLIED) == ""
    used.unused = ["a", "b"]
    assert step(used, ("b", None), skipped=APPLIED) == "a"


@ranks(2)
def test_used_parameters_need_no_exchange_once_all_are_used() -> None:
    rank = dist.get_rank()
    used = UsedParameters("abcd", dist.group.WORLD, CPU)
    of_rank_0 = ("a", True), ("bc", False)
    of_rank_1 = ("d", False), ("c", True)
    assert step(used, *(of_rank_1 if rank else of_rank_0), skipped=APPLIED) == "bd"
    assert step(used, ("bd" if rank else "", None), skipped=APPLIED) == ""
    reads: list[Any] = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(module, "on_host", lambda values: reads.append(values) or values.tolist())
    assert step(used, ("", None), skipped=APPLIED) == ""
    if rank == 0:  # without the other rank: there is no collective
        assert step(used, ("", None), skipped=APPLIED) == ""
    assert reads == [APPLIED]  # whether the previous step was skipped
    monkeypatch.undo()
