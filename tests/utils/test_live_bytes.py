from __future__ import annotations

import torch

from distmp.utils.live_bytes import (
    ACTIVATIONS,
    BACKWARD,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    REST,
    LiveBytes,
)


def test_peak_is_split_by_category() -> None:
    weight = torch.zeros(10)  # allocated before
    with LiveBytes() as memory:
        memory.label([weight, weight.view(2, 5)], PARAMETERS)
        memory.start()
        memory.phase = ACTIVATIONS
        kept = weight * 2
        passing = torch.cat([kept, kept])
        view = passing[3:]  # the same memory
        del passing
        memory.phase = BACKWARD
        gradient = kept.double()
        memory.label([gradient], GRADIENTS)
        del view
        del kept
        torch.zeros(5)
    assert memory.peak == {PARAMETERS: 40, ACTIVATIONS: 40 + 80, GRADIENTS: 80}
    assert {part: size for part, size in memory.live.items() if size} == {
        PARAMETERS: 40,
        GRADIENTS: 80,
    }


def test_peak_counts_only_after_start() -> None:
    with LiveBytes() as memory:
        large = torch.zeros(1000)
        del large
        memory.start()
        small = torch.zeros(2)
    assert memory.peak == {REST: small.nbytes}


def test_storages_reallocated_in_place_are_counted() -> None:
    original = torch.UntypedStorage.resize_
    with LiveBytes() as memory:
        full = torch.zeros(100)
        full.untyped_storage().resize_(0)
        assert memory.live == {REST: 0, GATHERED: 0}
        memory.start()
        full.untyped_storage().resize_(400)
    assert memory.peak == {GATHERED: 400}
    assert torch.UntypedStorage.resize_ is original
