"""Checkpoints of the distributed optimizer with torch's Adam, to which Megatron falls back without a GPU.

With Apex's and Transformer Engine's Adam a run resumes as if it had never stopped. With torch's, Megatron
0.19.2 fails three times while it loads the checkpoint, and would then count the steps wrongly without a word.
"""

import functools
from typing import Any

from quartet_plugin.rank.seams import Redirect


def redirects() -> list[Redirect]:
    """The three methods of Megatron's `DistributedOptimizer` that loading goes through."""
    from megatron.core.optimizer import distrib_optimizer

    wrappers = {
        "sharded_state_dict": _with_state,
        "load_state_dict": _with_step_counts,
        "_set_main_param_and_optimizer_states": _all_but_the_step,
    }
    return [
        Redirect(distrib_optimizer.__name__, f"DistributedOptimizer.{name}", wrap)
        for name, wrap in wrappers.items()
        if not distrib_optimizer.HAVE_APEX_OR_TE
    ]


def _with_state(sharded_state_dict: Any) -> Any:
    @functools.wraps(sharded_state_dict)
    def with_state(self: Any, model: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        # The step count is read from the state before anything is loaded, and torch's Adam has no state
        # before its first step. It is made as Megatron makes it for another format, by a step with zero
        # gradients; the weights that this decays are about to be loaded.
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, model, is_loading, *args, **kwargs)

    return with_state


def _with_step_counts(load_state_dict: Any) -> Any:
    import torch

    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: Any) -> Any:
        result = load_state_dict(self, state_dict)
        # Every parameter was given one and the same tensor as its step count, and then an old value in it.
        (step,) = {group["step"] for group in state_dict["optimizer"]["param_groups"]}
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(step))
        return result

    return load


def _all_but_the_step(set_states: Any) -> Any:
    import torch

    @functools.wraps(set_states)
    def set_all_but_the_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        # The fully reshardable form has no step count and then asks for it; what is no tensor is passed over.
        # In fp32 the optimizer's copy of a weight is a view of the weight, which autograd guards.
        with torch.no_grad():
            return set_states(self, model_param, {"step": None, **tensors})

    return set_all_but_the_step
