"""Sends the losses of multi-token prediction from the last stage to every device of its pipeline.

Megatron collects them on the device of the last stage, and prints and plots what the last global rank has.
"""

from collections.abc import Callable
from typing import Any

from quartet_plugin.megatron.placement.loss_broadcast import LossBroadcast
from quartet_plugin.megatron.train_step import around_train_step

# Tensors of one number for each further token; the names have changed with 0.19.
_METRICS = ("values", "loss_values", "correct_values", "total_values")


def with_mtp_metrics(broadcast: LossBroadcast, original: Callable[..., Any]) -> Callable[..., Any]:
    """`train_step`, after which every rank of a pipeline has the metrics of the pipeline's last stage."""

    def spread(*_: Any) -> None:
        from megatron.training import get_args

        if getattr(get_args(), "mtp_num_layers", None):
            _spread(broadcast)

    return around_train_step(original, after=spread)


def _spread(broadcast: LossBroadcast) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    collected = {
        f"{name} {token}": value
        for name in _METRICS
        if name in tracker
        for token, value in enumerate(tracker[name])
    }
    received = broadcast.over_pipeline(collected)
    if received is collected:
        return
    for metric in _METRICS:
        values = [value for name, value in received.items() if name.rpartition(" ")[0] == metric]
        if values:
            tracker[metric] = torch.stack(values)
    # Replicas are averaged where the metrics are read, among the ranks of one device, as the last stage does.
    tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
