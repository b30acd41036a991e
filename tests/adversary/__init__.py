"""A property-based test of the whole `distmp.Engine` against a float64 oracle.

The oracle is written from the documentation alone. It knows what a step has to do, not how the
engine does it, so that both can only agree by being right.

- `cases`: what is tried, as plain values; `generate` draws them from a seed.
- `models`: the models and the loss of a case, and where faults are injected.
- `oracle`: what the documentation says that a case has to do, in float64.
- `run`: runs cases with the engine on real ranks.
- `states`: the state of an engine on all ranks, put together.
- `judge`: compares what the engine did with what the oracle says.
- `shrink`: makes a failing case smaller.
- `mutants`: bugs put in on purpose, which the cases have to find.

`python -m tests.adversary --cases 5000 --seed 7` tries as many cases as one likes, and
`python -m tests.adversary --replay '<JSON>'` repeats a failing one.
"""
