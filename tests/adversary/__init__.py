"""A property-based test of `distmp.Engine` against a float64 oracle.

The oracle is written from the documentation only, independently of the engine's code.

- `cases`: test cases as plain values; `generate` draws them from a seed.
- `models`: the models and losses of cases, and fault injection.
- `oracle`: the expected results of a case according to the documentation, in float64.
- `run`: runs cases with the engine on real ranks.
- `states`: collects the state of an engine from all ranks.
- `judge`: compares the results of the engine with those of the oracle.
- `shrink`: makes a failing case smaller.
- `mutants`: seeded bugs, which the cases have to find.

`python -m tests.adversary --cases 5000 --seed 7` runs random cases, and
`python -m tests.adversary --replay '<JSON>'` repeats a failing one.
"""
