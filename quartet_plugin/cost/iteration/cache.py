"""The iteration models of all plans of a run; what plans share is computed once."""

from dataclasses import replace
from functools import cache

import numpy as np

from quartet_plugin.cost import communication
from quartet_plugin.cost.coefficients import MachineModel
from quartet_plugin.cost.core_sharing import core_sharing_of
from quartet_plugin.cost.iteration.model import IterationModel
from quartet_plugin.cost.iteration.orders import device_of_stages, orders_of
from quartet_plugin.cost.iteration.plan_terms import (
    GroupsApart,
    UnitArrays,
    domains_of,
    groups_apart,
    groups_of,
    run_of_plan,
    stage_seconds,
    step_seconds,
    step_terms_of,
    unit_arrays,
)
from quartet_plugin.cost.iteration.replay import blocks_on_sends
from quartet_plugin.cost.iteration.split_model import LayerWeights, RawTimes, SplitModel
from quartet_plugin.cost.iteration.step import experts_start_s, tensor_start_s, tensors_of_layer
from quartet_plugin.cost.iteration.terms import COLLECTIVES, UnitParts, unit_parts
from quartet_plugin.cost.memory import layer_weights, weights_of_stages
from quartet_plugin.cost.run import (
    TrainingRun,
)
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, PlanIdentity
from quartet_plugin.model.shape import ModelShape

# Plans whose iteration model is kept.
MAX_KEPT = 20_000


class IterationModelCache:
    """Makes the iteration model of any plan of a run; what plans share is computed once."""

    def __init__(self, machine_model: MachineModel) -> None:
        self.machine_model = machine_model
        self._models: dict[PlanIdentity, IterationModel] = {}
        self._units: dict[object, UnitArrays] = {}
        self._links: dict[tuple[ModelShape, Layout], tuple[float, float, float]] = {}

    def of(self, plan: Plan) -> IterationModel:
        """The plan's iteration model; the one made before, where it is kept."""
        key = plan.identity
        if key not in self._models:
            if len(self._models) >= MAX_KEPT:
                self._models.clear()
            self._models[key] = self._made(plan)
        return self._models[key]

    def _made(self, plan: Plan) -> IterationModel:
        run = run_of_plan(plan, self.machine_model)
        return IterationModel(
            plan,
            machine_model=self.machine_model,
            run=run,
            units=self._units_of(plan, run),
            links=self._links_of(plan, run),
            orders=orders_of(run),
        )

    def recomputed_share(self, plan: Plan) -> float:
        """The share, from 0 to 1, of a plan's layers that full recompute repeats.

        Plans that differ in split and mapping alone have one split model if their shares are equal.
        """
        # To make a run takes far longer than the look-up that asks for this.
        if plan.layout.recompute != "full":
            return 0.0
        return run_of_plan(plan, self.machine_model).recomputed_share

    def split_model(self, plan: Plan) -> SplitModel:
        """The plan's iteration model as a function of its split and mapping. It has a pipeline.

        Every split has the plan's own share of recomputed layers.

        The layers of a hybrid model's pattern count by their kinds. Layers with experts count as alike. What
        the dense ones before them take otherwise counts on the first stage, where a stage's share of the
        layers holds them; else layers of both kinds count as alike.
        """
        model = self.of(plan)
        run = model.run
        num_stages, sharing = plan.layout.num_stages, core_sharing_of(plan, self.machine_model.nodes)
        held = np.zeros((2, num_stages))
        held[0, 0] = held[1, -1] = 1.0
        is_hybrid = bool(run.kinds)
        share, num_first = (0.0, 0) if is_hybrid else self._dense_layers(plan)
        intra_s, inter_s, latency_s = self._links_of(plan, run)

        placement, orders = np.array(device_of_stages(run), dtype=np.int64), orders_of(run)
        constants = self.machine_model.constants
        # Dense layers before those with experts are counted with the starts of the layers with experts.
        kind_runs = run.runs_by_kind if is_hybrid else run.runs_by_kind[-1:]
        start_s = tensor_start_s(run, constants)
        layer_start_s = [
            tensors_of_layer(each) * start_s + experts_start_s(each, constants, experts)
            for each, experts in kind_runs
        ]
        core_slowdown = (
            np.ones(plan.layout.pipeline_parallel) if sharing is None else sharing.greatest_slowdown
        )

        @cache
        def raw_of(apart: GroupsApart) -> RawTimes:
            units = self._units_under(plan, run, apart)
            other_fixed = np.einsum("urd,us->rds", units.unslowed[-2:], held)
            other_fixed[-1] += units.action[:, None]
            compute_layer, other_layer = units.compute[:-2], units.unslowed[:-2]
            first, last = (compute_layer[0], other_layer[0]), (compute_layer[-1], other_layer[-1])
            other_fixed[:, :, 0] += num_first * (first[1] - last[1])
            compute_fixed = np.einsum("ucd,us->cds", units.compute[-2:], held)
            if run.is_mtp_before_last:
                other_fixed[:, :, -2] += units.further_unslowed
                compute_fixed[:, :, -2] += units.further_compute
            compute_fixed[:, :, 0] += num_first * (first[0] - last[0])
            if not is_hybrid:
                compute_layer = (share * first[0] + (1 - share) * last[0])[None]
                other_layer = (share * first[1] + (1 - share) * last[1])[None]
            return RawTimes(
                compute_fixed=compute_fixed,
                compute_layer=compute_layer,
                other_fixed=other_fixed,
                other_layer=other_layer,
                intra_s=intra_s,
                inter_s=inter_s,
                latency_s=latency_s,
                core_slowdown=core_slowdown,
                placement=placement,
                orders=orders,
                is_blocking=blocks_on_sends(run),
                share=model.share,
                layer_start_s=np.array(layer_start_s),
            )

        return SplitModel(
            plan,
            run=run,
            raw_of=raw_of,
            groups=groups_of(run),
            weights=_layer_weights(run),
            slot_index=self.machine_model.slowdown_index_of_slot,
            domain_of_slot=self.machine_model.domain_of_slot,
            step_terms_of=self._step_seconds_of,
        )

    def _step_seconds_of(self, plan: Plan) -> FloatArray:
        """`IterationModel.step_seconds` of a plan, of which nothing else may be needed."""
        known = self._models.get(plan.identity)
        if known is not None:
            return known.step_seconds
        run = run_of_plan(plan, self.machine_model)
        compute, unslowed = stage_seconds(run, self._units_of(plan, run))
        terms = step_terms_of(plan, run, self.machine_model, compute.sum(axis=0) + unslowed.sum(axis=0))
        return step_seconds(terms, self.machine_model)

    def _dense_layers(self, plan: Plan) -> tuple[float, int]:
        """The share of dense layers in each, and how many dense layers the first stage has beside."""
        experts, num_layers = self.machine_model.experts, plan.shape.num_layers
        if experts is None:
            return 1.0, 0
        if experts.num_dense_layers <= num_layers // plan.layout.num_stages:
            return 0.0, experts.num_dense_layers
        return experts.num_dense_layers / num_layers, 0

    def _units_of(self, plan: Plan, run: TrainingRun) -> UnitArrays:
        """The units with the links that the plan's groups take."""
        domains = domains_of(plan, self.machine_model)
        return self._units_under(plan, run, groups_apart(domains, groups_of(run)))

    def _units_under(self, plan: Plan, run: TrainingRun, apart: GroupsApart) -> UnitArrays:
        """The units where the groups of a collective are or are not in several domains."""
        # A layer's times have the share of all layers that is recomputed, which the split decides.
        recomputed = run.recomputed_share
        is_before_last = run.is_mtp_before_last
        key = (plan.shape, plan.layout, run.is_custom, run.splits_backward, recomputed, apart, is_before_last)
        if key not in self._units:
            constants = self.machine_model.constants
            parts = unit_parts(run, constants)
            if any(apart):
                parts = self._over_links(run, parts, apart)
            self._units[key] = unit_arrays(parts)
        return self._units[key]

    def _over_links(self, run: TrainingRun, parts: UnitParts, apart: GroupsApart) -> UnitParts:
        """The units with the links between domains for the groups that are apart.

        Ranks that exchange heads stay in their domain where they are not apart, when the rings leave it.
        """
        inter_node, constants = self.machine_model.inter_node, self.machine_model.constants
        tensor = experts = context = unit_parts(replace(run, cluster=inter_node), constants)
        if apart.heads is False:
            neighbours = run.exchanging_ranks * run.layout.tensor_parallel
            cluster = replace(inter_node, scale_up_devices=neighbours)
            context = unit_parts(replace(run, cluster=cluster), constants)
        there = dict(zip(COLLECTIVES, (tensor, context, experts), strict=True))
        names = [name for name, is_apart in zip(there, apart, strict=False) if is_apart]
        return replace(
            parts,
            layers=tuple(
                layer | {name: there[name].layers[kind][name] for name in names}
                for kind, layer in enumerate(parts.layers)
            ),
            # Layers of multi-token prediction count with the head.
            embedding=parts.embedding
            | {name: there[name].embedding[name] for name in names if name in parts.embedding},
            head=parts.head | {name: there[name].head[name] for name in names if name in parts.head},
            further=parts.further
            | {name: there[name].further[name] for name in names if name in parts.further},
        )

    def _links_of(self, plan: Plan, run: TrainingRun) -> tuple[float, float, float]:
        """Seconds of a boundary tensor inside a domain and between two, without latency, and the latency."""
        key = (plan.shape, plan.layout)
        if key not in self._links:
            constants = self.machine_model.constants
            latency = communication.transfer_latency_s(constants)
            intra_node = communication.transfer_s(run, constants, sender=0, receiver=1)
            run = replace(run, cluster=self.machine_model.inter_node)
            inter_node = communication.transfer_s(run, constants, sender=0, receiver=1)
            self._links[key] = (intra_node - latency, inter_node - latency, latency)
        return self._links[key]


def _layer_weights(run: TrainingRun) -> LayerWeights:
    """The weights of a layer, of each kind in a hybrid model, and those that the ends have beside theirs."""
    counts = run.layers_per_stage
    weights = [held.num_total for held in weights_of_stages(run)]
    if run.kinds:
        layers = np.array(
            [layer_weights(each, experts=experts).num_total for each, experts in run.runs_by_kind]
        )
        ends = [weights[end] - float(layers @ run.layer_counts[end]) for end in (0, -1)]
        return LayerWeights(layers=layers, first=ends[0], last=ends[1])
    fullest = max(range(len(counts)), key=lambda stage: counts[stage])
    fewer = tuple(count - (stage == fullest) for stage, count in enumerate(counts))
    without = weights_of_stages(replace(run, layers_per_stage=fewer))[fullest].num_total
    per_layer = weights[fullest] - without
    return LayerWeights(
        layers=np.array([per_layer]),
        first=weights[0] - per_layer * counts[0],
        last=weights[-1] - per_layer * counts[-1],
        # Of two stages the first one has it beside the embedding.
        mtp=weights[-2] - per_layer * counts[-2] if run.is_mtp_before_last and len(counts) > 2 else 0.0,
    )
