from __future__ import annotations

from benchmarks.report import in_turns


def test_turns_alternate_and_the_first_do_not_count() -> None:
    asked: list[str] = []

    def measure(name: str) -> float:
        asked.append(name)
        return len(asked)

    found = in_turns(["a", "b"], 2, measure, warm_up=1)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_names_that_cannot_be_measured_are_skipped() -> None:
    asked: list[str] = []

    def measure(name: str) -> float | None:
        asked.append(name)
        return None if name == "a" and len(asked) > 3 else 1.0

    assert in_turns(["a", "b"], 3, measure, warm_up=1) == {"b": [1.0] * 3}
    assert asked.count("a") == 2
