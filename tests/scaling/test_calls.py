"""Calls as text and as fingerprints; several logs in one process stand for ranks."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from distmp.scaling import calls
from distmp.scaling.calls import CallLog, Decision, difference


def optimizer(value: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.full((2,), value))])


def compared(*decisions: Decision, world_size: int | None = None) -> str | None:
    """Return the message for ranks with these decisions, converted to JSON as in a store."""
    sent = {rank: json.loads(json.dumps(decision)) for rank, decision in enumerate(decisions)}
    everything = calls.all_identities()
    answers = {rank: (decision, everything) for rank, decision in sent.items()}
    return difference(decisions[0], world_size or len(decisions), lambda value: answers)


def test_words_of_calls() -> None:
    log, (first, second) = CallLog(), (optimizer(), optimizer(1.0))
    assert log.decide("step", [first], [first]).call == "step(optimizer 0) in iteration 1"
    log.steps(first)
    log.updates(sets_scale=False)
    decision = log.decide("clip_grad_norm_", [second], [second, first], max_norm=0.5)
    assert (
        decision.call == "clip_grad_norm_(optimizer 1, 0.5) for optimizers 0 and 1 in iteration 2"
    )
    assert decision.before == "step(optimizer 0) and update() in iteration 1"
    assert decision.changes == "step(optimizer 0) in iteration 1"
    log.unscales(second)
    for both in (second, first):
        log.steps(both)
    log.updates(sets_scale=True)
    decision = log.decide("step", [first], [first], unscaled=[first])
    assert decision.call == "step(optimizer 0) after unscale_(optimizer 0) in iteration 3"
    assert decision.before == (
        "unscale_(optimizer 1), step(optimizers 0 and 1) and update(new_scale) in iteration 2"
    )
    assert log.decide("update", [], []).call == "update() in iteration 3"


def test_numbers_differ_from_the_first_difference_on() -> None:
    one, other = CallLog(), CallLog()
    member, other_member = optimizer(), optimizer()
    for _ in range(3):
        first, second = (
            one.decide("step", [member], [member]),
            other.decide("step", [other_member], [other_member]),
        )
        assert (first.fingerprint, first.digest) == (second.fingerprint, second.digest)
        assert first.fingerprint < 2**calls.FINGERPRINT_BITS
        for log in (one, other):
            log.updates(sets_scale=False)
    one.updates(sets_scale=False)
    for _ in range(3):
        first, second = (
            one.decide("step", [member], [member]),
            other.decide("step", [other_member], [other_member]),
        )
        assert first.fingerprint != second.fingerprint


def test_order_of_steps_after_a_common_decision_may_differ() -> None:
    decisions = []
    for order in ((0, 1), (1, 0)):
        log, members = CallLog(), [optimizer(), optimizer()]
        log.decide("clip_grad_norm_", members, members, max_norm=1.0)
        for place in order:
            log.steps(members[place])
        log.updates(sets_scale=False)
        decisions.append(log.decide("step", [members[0]], [members[0]]))
    assert decisions[0] == decisions[1]
    assert compared(*decisions) is None


def test_other_parameters_are_allowed_unless_ranks_have_them_in_another_order() -> None:
    members = [optimizer(1.0), optimizer(2.0)]
    first, second = (CallLog().decide("step", [member], [member]) for member in members)
    assert first.digest == second.digest
    assert first.fingerprint != second.fingerprint
    message = compared(first, second)
    assert message is not None
    assert message.startswith("ranks use their optimizers in a different order: step(optimizer 0)")
    del members[1]
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert compared(first, second) is None


def test_missing_answers_of_ranks_are_not_agreement() -> None:
    member = optimizer()
    decision = CallLog().decide("step", [member], [member])
    message = compared(decision, world_size=2)
    assert message is not None
    assert message.startswith("ranks call the scaler differently: rank 0 calls step(optimizer 0)")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copied_call_log_is_empty(copied: object) -> None:
    log, member = CallLog(), optimizer()
    log.decide("step", [member], [member])
    log.updates(sets_scale=False)
    new = copied(log)  # type: ignore[operator]
    assert new.iteration == 1
    assert new.decide("step", [member], [member]) == CallLog().decide("step", [member], [member])
