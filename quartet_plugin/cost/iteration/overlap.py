"""Overlap as terms of its own: the communication that compute hides, beside the terms that stay exposed.

A collective's time is that of its traffic alone; what `predict` counts of it is the exposed rest.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quartet_plugin.cost import activation_offload, communication, compute
from quartet_plugin.cost.compute import Rates
from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.orders import stages_of_devices
from quartet_plugin.cost.iteration.replay import blocks_on_sends, hidden_by_pairs
from quartet_plugin.cost.iteration.step import (
    busiest_rank,
    fullest_rank,
    held_layers,
    held_weights,
    transfers_s,
)
from quartet_plugin.cost.iteration.terms import StageParts, stage_parts, with_repeated
from quartet_plugin.cost.memory import Weights, weights_of_stages
from quartet_plugin.cost.run import Overlap, TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.job_description import Experts

# A number of like layers, the run whose layers are all like these, and their experts.
type CountedLayers = tuple[int, TrainingRun, Experts | None]


def hidden_terms(run: TrainingRun, constants: Constants) -> dict[str, float]:
    """Seconds an iteration of the busiest rank's communication behind its compute, by the exposed term.

    Transfers that do not block are hidden as a whole: the waiting that they cause is in the bubble. Copies of
    activations between device and host count as communication.
    """
    parts = stage_parts(run, constants)
    sums = [Times.sum_of(part.values()) for part in parts]
    rank = busiest_rank(run, [stage.total_s for stage in sums])
    stages, count = list(stages_of_devices(run)[rank]), run.num_microbatches
    weights = weights_of_stages(run)
    held = held_weights(run, fullest_rank(run, weights), weights)
    layers = [
        (count * num, kind_run, experts)
        for num, (kind_run, experts) in zip(held_layers(run, rank), run.runs_by_kind, strict=True)
    ]
    forward_s = sum(sums[k].forward_s for k in stages)
    backward_s = sum(sums[k].input_grad_s + sums[k].weight_grad_s for k in stages)
    sent = sum(float(seconds[stages].sum()) for seconds in transfers_s(run, constants))
    hidden = {
        "tp_comm_s": _num_pairs(layers) * _tensor_s(run, constants),
        "cp_comm_s": _context_s(layers, constants),
        "ep_comm_s": (
            _in_pairs_s(run, constants, parts, sums, rank)
            if run.has_pairs
            else sum(num * _exchange_s(kind_run, constants, experts) for num, kind_run, experts in layers)
        ),
        "offload_s": sum(num * _copies_s(kind_run, constants, experts) for num, kind_run, experts in layers),
        "pp_comm_s": 0.0 if blocks_on_sends(run) else count * sent,
        "fsdp_comm_s": count * _sharded_s(run, constants, held, forward_s=forward_s, backward_s=backward_s),
        "dp_comm_s": _gradients_s(run, constants, held, forward_s=forward_s, backward_s=backward_s),
    }
    return {name: seconds for name, seconds in hidden.items() if seconds > 0.0}


def _tensor_s(run: TrainingRun, constants: Constants) -> float:
    plain = replace(run, software=replace(run.software, tensor_overlap=Overlap.NONE))
    alone, exposed = (communication.tensor_parallel(each, constants)[0].total_s for each in (plain, run))
    return alone - exposed


def _num_pairs(layers: Sequence[CountedLayers]) -> float:
    """Tensor-parallel collectives of layers, in those of a dense transformer layer."""
    dense = sum(num * kind_run.num_sublayers / 2 for num, kind_run, _ in layers)
    return dense + sum(
        num * ((sum(communication.ffn_pairs(kind_run, experts)) - 1.0) / 2.0)
        for num, kind_run, experts in layers
        if experts is not None
    )


def _in_pairs_s(
    run: TrainingRun, constants: Constants, parts: Sequence[StageParts], sums: Sequence[Times], rank: int
) -> float:
    """What the overlapped pairs of a rank hide of the experts' exchanges in an iteration."""
    hideable = communication.hideable_s(constants, [part.get("ep_comm", Times()) for part in parts])
    return float(hidden_by_pairs(run, np.array(sums).T, hideable)[rank])


def _exchange_s(run: TrainingRun, constants: Constants, experts: Experts | None) -> float:
    """What a layer's exchanges hide behind its other work, or behind another microbatch's."""
    if experts is None:
        return 0.0
    layer = compute.layer_times(run, constants, Rates(run, constants), experts=experts)
    whole = with_repeated(run, "moe", communication.expert_parallel(run, constants, experts))
    return whole.total_s - communication.beside_compute(run, constants, whole, layer).total_s


def _copies_s(run: TrainingRun, constants: Constants, experts: Experts | None) -> float:
    """The seconds of copies of activations, to the host and back, that a layer hides."""
    if not run.software.offloaded_modules:
        return 0.0
    layer = compute.layer_times(run, constants, Rates(run, constants), experts=experts)
    left = activation_offload.exposed(run, layer, experts=experts)
    return 2.0 * activation_offload.copies_s(run, experts=experts) - left.total_s


def _context_s(layers: Sequence[CountedLayers], constants: Constants) -> float:
    """What attention hides of what ranks that share sequences send each other."""
    num = sum(num for num, kind_run, _ in layers if kind_run.has_attention)
    run = next((kind_run for _, kind_run, _ in layers if kind_run.has_attention), None)
    if run is None:
        return 0.0
    layer = compute.layer_times(run, constants, Rates(run, constants), experts=None)
    alone, exposed = (
        with_repeated(run, "core_attn", communication.context_parallel(run, constants, beside)).total_s
        for beside in (Times(), layer.attention)
    )
    return num * (alone - exposed)


def _sharded_s(
    run: TrainingRun, constants: Constants, held: Weights, *, forward_s: float, backward_s: float
) -> float:
    alone, exposed = (
        communication.sharded_parameters_s(
            run,
            constants,
            num_dense=held.num_dense,
            num_expert=held.num_expert,
            forward_s=beside * forward_s,
            backward_s=beside * backward_s,
        )
        for beside in (0.0, 1.0)
    )
    return alone - exposed


def _gradients_s(
    run: TrainingRun, constants: Constants, held: Weights, *, forward_s: float, backward_s: float
) -> float:
    alone, exposed = (
        communication.data_parallel_s(
            run,
            constants,
            num_dense=held.num_dense,
            num_expert=held.num_expert,
            forward_s=beside * forward_s,
            backward_s=beside * backward_s,
        )
        for beside in (0.0, 1.0)
    )
    return alone - exposed
