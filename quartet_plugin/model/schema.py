"""Frozen dataclasses to and from JSON data, strictly."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.canonical import canonical_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Fields that were added to files which have digests: left out where they say nothing, so that the digest of
# older content stays what it was.
_ADDED = frozenset(
    {"custom", "reduce_bucket_size", "allgather_bucket_size", "batching_features", "crowds", "cores"}
)


def dump(value: "DataclassInstance") -> dict[str, Any]:
    """A dataclass as plain data, nested ones included."""
    return asdict(value, dict_factory=_without_silent)


def _without_silent(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in items if value is not None or name not in _ADDED}


def parse[T](adapter: TypeAdapter[T], data: Mapping[str, Any], *, where: str) -> T:
    """Data that was read from `where` as a checked object.

    Raises ConfigError in one line that names the field, the value and the rule.
    """
    try:
        return adapter.validate_json(canonical_json(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ConfigError(f"{where}: {field}: {str(first['input'])[:80]!r}: {first['msg']}{more}") from error
