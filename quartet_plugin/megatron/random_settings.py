"""The settings by which a model draws at random in every forward pass, and how they are set aside."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Layers keep the probability they were built with; some read the configuration in every pass.
DROPOUTS = ("hidden_dropout", "attention_dropout")
# Jitter of the router's inputs, and routing by chance; each with the value that is off.
ROUTER: dict[str, Any] = {
    "moe_input_jitter_eps": None,
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
}


@dataclass(slots=True)
class RandomSettings:
    """The sources of randomness in a built model: the objects with the settings, and their values."""

    _values: list[tuple[Any, str, Any]]

    @classmethod
    def of(cls, model: Any) -> "RandomSettings":
        """Those of every module of the model's chunks that are on."""
        return cls(list(_all_settings(model)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the settings, each once."""
        return tuple(sorted({name for _, name, _ in self._values}))

    def set_aside(self) -> None:
        """Switch them off."""
        for holder, name, _ in self._values:
            setattr(holder, name, ROUTER.get(name, 0.0))

    def restore(self) -> None:
        """Give each the value that it had."""
        for holder, name, value in self._values:
            setattr(holder, name, value)


def _all_settings(model: Any) -> Iterator[tuple[Any, str, Any]]:
    from torch.nn.modules.dropout import _DropoutNd

    configs: dict[int, Any] = {}
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, _DropoutNd) and module.p > 0.0:
                yield module, "p", module.p
            for name in DROPOUTS:
                value = vars(module).get(name)
                if isinstance(value, int | float) and value > 0.0:
                    yield module, name, value
            config = vars(module).get("config")
            if config is not None:
                configs[id(config)] = config
    for config in configs.values():
        for name in DROPOUTS:
            value = getattr(config, name, None)
            if isinstance(value, int | float) and value > 0.0:
                yield config, name, value
        for name, off in ROUTER.items():
            if getattr(config, name, off) != off:
                yield config, name, getattr(config, name)
