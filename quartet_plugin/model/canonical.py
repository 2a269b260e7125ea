"""Canonical JSON, one text for one value: digests are taken of it.

Canonical JSON has sorted keys, no spaces, UTF-8 unescaped, and neither NaN nor infinity.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from quartet_plugin.errors import ConfigError

DIGEST_KEY = "digest"


def canonical_json(value: Any) -> str:
    """The canonical text of `value`: dicts with text keys, lists, tuples, text, numbers, booleans, None.

    Equal values give equal text. Raises ConfigError for what has no canonical form: NaN, infinity, keys
    that are not text, lone surrogates, other types.
    """
    try:
        _refuse_other_keys(value)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"canonical JSON: text with {error.object[error.start]!a}: must be UTF-8, so no lone surrogate"
        ) from error
    except RecursionError as error:
        raise ConfigError("canonical JSON: the value is nested too deeply, or contains itself") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"canonical JSON: {error}") from error
    return text


def digest(value: Mapping[str, Any]) -> str:
    """The sha256, as 64 hex digits, of `value`'s canonical JSON without its key "digest"."""
    content = {key: item for key, item in value.items() if key != DIGEST_KEY}
    return hashlib.sha256(canonical_json(content).encode("utf-8")).hexdigest()


def _refuse_other_keys(value: Any) -> None:
    """Raise TypeError for a key that is no text.

    `json` would turn the key 1 into "1", so two different values would share a text.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r}: keys must be text")
            if isinstance(item, dict | list | tuple):
                _refuse_other_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict | list | tuple):
                _refuse_other_keys(item)


def derived_seed(seed: int, number: int, purpose: str) -> int:
    """A seed for one purpose of the trial `number`, derived from the study's seed."""
    text = f"{seed}/{number}/{purpose}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
