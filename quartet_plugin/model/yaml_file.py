"""Reading short YAML files with a safe loader."""

from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20


def load_yaml(path: Path) -> Any:
    """The data in a short YAML file, read by a safe loader. Raises ConfigError in one line."""
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_CONFIG_BYTES} bytes; a configuration is short")
    try:
        return yaml.load(text, Loader=_unique_loader())  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{at}: not YAML that is safe to read: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not YAML that is safe to read: {words}") from error


def _unique_loader() -> type[Any]:
    """A safe loader that refuses a key given twice, and aliases, which can blow a small file up."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.constructor.ConstructorError(None, None, "aliases are not read", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    mark = node.value[at][0].start_mark
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {str(key)[:60]!r} appears twice", mark
                    )
            return super().construct_mapping(node, deep=deep)

    return Loader
