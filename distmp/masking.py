"""Hides secrets in everything that distmp writes or prints.

A value is hidden if its name looks like that of a secret (`api_key`, `DB_PASSWORD`, `auth`), or if
it is part of a URL (`https://user:password@host`). Only names are checked: a secret under another
name is not recognized. Values of names of columns (`text_key`), special tokens (`pad_token`) and
numbers of tokens (`max_tokens`) are shown, unless these are environment variables.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

# How the names of secrets end.
_SECRETS = re.compile(
    r"(?:key|token|(?:^|_)(?:auth|authorization|bearer|cookies?|creds?|dsn|headers?|keys|pat|pats|"
    r"sig|signature|tokens))$"
)
# Columns, special tokens, and numbers of tokens. All others remain secrets, because a key or token
# may have the name of any service.
_NO_SECRETS = re.compile(
    r"(?:(?:answer|audio|caption|chosen|column|context|feature|image|input|instruction|label|"
    r"mask|messages|metric|output|prompt|query|question|rejected|response|sort|target|text|video)"
    r"_keys?|(?:batch|bos|class|cls|context|end|eos|image|mask|max|max_new|min|num|pad|sep|special|"
    r"start|stop|text|total|unk|until|video)_tokens?)"
)
# Anywhere in a name. For these names, numbers are hidden too.
_ANYWHERE = re.compile(r"secret|passw|passphrase|passcode|credential|pwd|(?:^|_)pass(?:_|$)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# The user and password of a URL; a password may contain characters that should be escaped.
_USER_INFO = re.compile(r"(?<=://)(?:[^\s/@:]*:(?!\d+/)[^\s\"']*@|[^\s/@\"']+@)")
# A name and a separator. After ": " the name has to begin a line or an entry: it may be prose.
_NAME = re.compile(
    r"""(?P<begins>^\s*|[{,\[(]\s*|["'])?(?<![\w-])(?P<name>[A-Za-z_][\w.-]*)"""
    r"""(?P<separator>["']?\s*=\s*|["']\s*:\s*|:\s+)""",
    re.MULTILINE,
)
_GROUP = r"""\[.*\]|\{.*\}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
_VALUE = re.compile(_GROUP + r"|(?:(?:basic|bearer|digest|token)\s+)?[^\s,;}\]&]+", re.I | re.S)
_ENTRY_VALUE = re.compile(_GROUP + r"|[^,;}\]\n]+", re.S)
_ASSIGNMENT = re.compile(r"(-{0,2}[A-Za-z_][\w.-]*)=(?=.)", re.S)
_SCHEME = re.compile(r"(?<=\b[Bb]earer )[\w.~+/=-]{6,}|(?<=\b[Bb]asic )[\w+/=]{8,}(?!\w)")
# Placeholders of values in messages about the syntax of a setting.
_PLACEHOLDER = re.compile(r"\.\.\.|VALUE\b")
# Layers and columns in a list may be named key or token.
_LONE_NAME = re.compile(r"(?!(?:key|token)s?$)-{0,2}[A-Za-z_][\w.-]*")


def is_secret(name: str) -> bool:
    """Return whether a setting, an environment variable or a header of this name is a secret."""
    words, last = _words(name), name.rpartition(".")[2]
    # Names of environment variables are in upper case.
    is_shown = not last.isupper() and _NO_SECRETS.fullmatch(_words(last)) is not None
    return (not is_shown and _SECRETS.search(words) is not None) or _is_strong(words)


def masked(value: Any, name: str = "") -> Any:
    """Return a value without the secrets in it.

    Args:
        value: A text, a number, or mappings and lists of these. In a list, the item after the name
            of a secret is hidden (`["--api-key", "..."]`).
        name: The name of the value.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, _inner(name, str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        before = ["", *value]
        items = [masked(item, _inner(name, _lone(before[i], item))) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return HIDDEN if _is_strong(_words(name)) else value
    if is_secret(name):
        return "" if isinstance(value, str) and not value else HIDDEN
    if isinstance(value, str) and (text := masked_text(value)) != value:
        return text
    return value  # the same object, because its class may determine how it is shown


def masked_text(text: str) -> str:
    """Return a text without passwords in URLs, and without the values of named secrets."""
    assignment = _ASSIGNMENT.match(text)
    if assignment is not None and is_secret(assignment[1]):
        return f"{assignment[0]}{HIDDEN}"
    text = _SCHEME.sub(HIDDEN, _USER_INFO.sub(f"{HIDDEN}@", text))
    parts: list[str] = []
    end = 0
    for match in _NAME.finditer(text):
        if match.start() < end or not is_secret(match["name"]) or _is_no_name(match):
            continue
        value = (_VALUE if match["begins"] is None else _ENTRY_VALUE).match(text, match.end())
        if value is not None and not _PLACEHOLDER.match(value[0]):
            parts += text[end : match.end()], HIDDEN
            end = value.end()
    return "".join(parts) + text[end:]


def print_message(text: str) -> None:
    """Print a message without secrets to standard error, in a single write; ignores errors."""
    with contextlib.suppress(OSError):  # the watchdog ends this rank afterwards
        sys.stderr.write(f"distmp: {masked_text(text)}\n")
        sys.stderr.flush()


def _is_no_name(name: re.Match[str]) -> bool:
    """Return whether a match may be prose, or ends a path or value: `--to = 'x/tokens': exists`."""
    quote = name["separator"][0]
    if quote == ":":
        return name["begins"] is None
    if quote not in "\"'" or ":" not in name["separator"]:
        return False
    opening = name.string.rfind(quote, 0, name.start("name"))
    before = name.string[: max(opening, 0)].rstrip()
    is_path = "/" in name.string[opening : name.start("name")] and before[-1:] not in ("{", ",")
    return opening >= 0 and (is_path or before.endswith("="))


def mask_record(record: logging.LogRecord) -> bool:
    """Hide secrets in a message of a logger; a filter for `logging.Logger.addFilter`."""
    record.msg, record.args = masked_text(record.getMessage()), ()
    return True


def is_masked(value: Any) -> bool:
    """Return whether a value contains one that was hidden, so that it cannot be used."""
    if isinstance(value, Mapping):
        return any(map(is_masked, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(is_masked, value))
    if not isinstance(value, str) or HIDDEN not in value:
        return False
    # Other texts may contain these characters: only where a secret would be hidden they count.
    return value in (HIDDEN, masked_text(value.replace(HIDDEN, "x" * 8)))


def _words(name: str) -> str:
    """Return a name in lower case, with its words separated by "_", without a trailing number."""
    spaced = _CAMEL.sub("_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_").rstrip("0123456789").rstrip("_")


def _is_strong(words: str) -> bool:
    return _ANYWHERE.search(words) is not None or (
        words.endswith("pass") and not words.endswith("bypass")
    )


def _inner(outer: str, name: str) -> str:
    """Return the name that decides about a value in a mapping or list of the name `outer`."""
    return outer if is_secret(outer) else name


def _lone(before: Any, item: Any) -> str:
    """Return the name that an item of a list gives to the next one; "" if it is no name."""
    if not isinstance(before, str) or not _LONE_NAME.fullmatch(before):
        return ""
    # In `--columns api_key --steps 6`, `api_key` is a value, because an option follows.
    follows = not before.startswith("-") and isinstance(item, str) and item.startswith("--")
    return "" if follows else before
