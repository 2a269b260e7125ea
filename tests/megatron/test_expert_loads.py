"""The tokens of experts, counted at routers of a model that is none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet_plugin.megatron import expert_loads
from quartet_plugin.megatron.expert_loads import ExpertLoads


class Router(torch.nn.Module):  # type: ignore[misc]
    """Sends token n to experts n and n + 1 of four."""

    def forward(self, tokens: Any) -> Any:
        places = torch.arange(len(tokens)) % 4
        routing = torch.nn.functional.one_hot(places, 4) + torch.nn.functional.one_hot((places + 1) % 4, 4)
        return tokens, routing.bool()


def test_a_pass_that_is_made_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    monkeypatch.setattr(expert_loads, "_routers", lambda _: [("layer.1", router)])
    loads = ExpertLoads()
    loads.begin([SimpleNamespace()])
    with torch.no_grad():
        router(torch.zeros(3))
    router(torch.zeros(3))
    router(torch.zeros(2))
    assert loads.take() == {"layer.1": (2, 4, 3, 1)}
    assert loads.take() == {}
    router.eval()(torch.zeros(3))
    assert loads.take() == {}
    loads.end()
    router.train()(torch.zeros(3))
    assert loads.take() == {}
