from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distmp.utils.settings.convert import digest, flat

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SETTINGS = st.recursive(
    st.dictionaries(st.text("abc", min_size=1), VALUES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1), inner, min_size=1, max_size=3),
)


@given(SETTINGS)
def test_every_setting_has_its_dotted_name(settings: dict[str, Any]) -> None:
    for name, value in flat(settings).items():
        found = settings
        for part in name.split("."):
            found = found[part]
        assert found is value
    assert len(flat(settings)) == _leaves(settings)


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) else 1


def test_a_hash_tells_settings_apart_and_not_their_order() -> None:
    settings = {"steps": 3, "optim": {"lr": 0.1, "name": "sgd"}}
    same = {"optim": {"name": "sgd", "lr": 0.1}, "steps": 3}
    assert digest(settings) == digest(same)
    text = b'{"optim.lr": 0.1, "optim.name": "sgd", "steps": 3}'
    assert digest(settings) == hashlib.sha256(text).hexdigest()
    assert digest(settings) != digest({**settings, "steps": 4})
    assert digest({"a": "1"}) != digest({"a": 1})
