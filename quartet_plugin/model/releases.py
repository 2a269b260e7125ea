"""Releases of a framework, compared by their numbers."""

import re

from packaging.version import InvalidVersion, Version

_NUMBERS = re.compile(r"\d+(?:\.\d+)*", re.ASCII)


def release_of(version: str) -> Version:
    """The release that a framework's version names.

    Builds of a vendor may add words that PEP 440 does not know (`0.18.0-vendor24`): then it is the numbers at
    the start, or 0 without any.
    """
    try:
        return Version(version)
    except InvalidVersion:
        numbers = _NUMBERS.match(version)
        return Version(numbers.group() if numbers else "0")
