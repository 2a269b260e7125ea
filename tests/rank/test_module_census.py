"""Which modules ran: noticed while they run, and without a trace afterwards."""

import torch
from torch.nn.modules import module as hooks

from quartet_plugin.rank.module_census import ModuleCensus


def test_only_modules_that_run_inside_of_it_are_noticed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Dropout())
    census = ModuleCensus()
    before = len(hooks._global_forward_pre_hooks)
    with census:
        model[:2](torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert census.names == ("Linear", "ReLU", "Sequential")
    assert len(hooks._global_forward_pre_hooks) == before
