"""A PipelineModule with a plan's stages: any boundaries, several on one device, ranks in any order.

DeepSpeed fixes all three when the module is made, so a planned module is one whose class is exchanged, before
its constructor runs, for a subclass of the same name.
"""

import contextlib
import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from quartet_plugin.deepspeed.pipeline import PipelineSpec


class PlannedModule(PipelineModule):  # type: ignore[misc]
    """Mixed in front of the user's own class by `planned_class`; `quartet_pipeline` is set beforehand.

    `quartet_stock_bounds` are the boundaries of DeepSpeed's own stages, one on every device; None where the
    script's partition method is not known.
    """

    quartet_pipeline: PipelineSpec
    quartet_stock_bounds: tuple[int, ...] | None
    parts: list[int]
    forward_funcs: list[Any]
    is_checkpointable_results: list[bool]
    _local_start: int
    _local_stop: int

    def _partition_layers(self, method: str = "uniform") -> None:
        # Stock first: by parameters it builds layers, which moves the random generator on.
        with contextlib.redirect_stdout(io.StringIO()):
            super()._partition_layers(method)
        self.quartet_stock_bounds = tuple(self.parts)
        self.parts = list(self.quartet_pipeline.bounds)
        edges = [self._stage_bounds(stage) for stage in self.quartet_pipeline.stages_of(self.stage_id)]
        self._set_bounds(start=edges[0][0], stop=edges[-1][1])

    def _stage_bounds(self, stage: int) -> tuple[int, int]:
        return self.quartet_pipeline.bounds[stage], self.quartet_pipeline.bounds[stage + 1]

    def _build(self) -> None:
        bounds = self._local_start, self._local_stop
        self._functions: dict[int, list[Any]] = {}
        self._checkpointable: dict[int, list[bool]] = {}
        self._numbers: list[int] = []
        for stage in self.quartet_pipeline.stages_of(self.stage_id):
            start, stop = self._stage_bounds(stage)
            before = len(self.forward_funcs)
            self._set_bounds(start=start, stop=stop)
            super()._build()
            self._functions[stage] = self.forward_funcs[before:]
            self._numbers += range(start, stop)
        self._set_bounds(*bounds)

    def built_bounds(self) -> list[tuple[int, int]]:
        """The entries of each stage that was built on this device: the first, and the one behind the last."""
        return [
            (self.quartet_pipeline.bounds[stage], self.quartet_pipeline.bounds[stage] + len(functions))
            for stage, functions in self._functions.items()
        ]

    def stage_owner(self, layer_idx: int) -> int:
        """The device that holds a layer: what DeepSpeed calls a stage."""
        for stage, (start, stop) in enumerate(pairwise(self.quartet_pipeline.bounds)):
            if start <= layer_idx < stop:
                return self.quartet_pipeline.placement[stage]
        raise IndexError(f"layer {layer_idx} of {self.quartet_pipeline.bounds[-1]}")

    @contextlib.contextmanager
    def running(self, stage: int) -> Iterator[None]:
        """While a stage computes, or recomputes, the module consists of its layers alone."""
        kept = self.forward_funcs, self._local_start, self.is_checkpointable_results
        self.forward_funcs = self._functions[stage]
        self._local_start = self.quartet_pipeline.bounds[stage]
        self.is_checkpointable_results = self._checkpointable.get(stage, kept[2])
        try:
            yield
        finally:
            self.forward_funcs, self._local_start, self.is_checkpointable_results = kept

    def _precompute_checkpointable_values(self) -> None:
        super()._precompute_checkpointable_values()
        if self.activation_checkpoint_interval <= 0:
            return
        kept = self.is_checkpointable_results
        for stage in self._functions:
            with self.running(stage):
                self.is_checkpointable_results_interval = None
                super()._precompute_checkpointable_values()
                self._checkpointable[stage] = self.is_checkpointable_results
        self.is_checkpointable_results = kept

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> Any:
        """A checkpoint names weights by the layer's number in the whole model, so they fit every plan.

        Its optimizer state has no names: see `checkpoints`.
        """
        return super().ckpt_layer_path(ckpt_dir, self._numbers[local_layer_idx] - self._local_start)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> Any:
        """The same, to read."""
        return super().ckpt_layer_path_list(ckpt_dir, self._numbers[local_layer_idx] - self._local_start)

    def _synchronize_tied_weights(self) -> None:
        # Stock's source, the lowest rank, is the first stage only in the launcher's order. Other stages may
        # have a copy that no checkpoint loads.
        for key, tied in self.tied_comms.items():
            source = self._grid.stage_to_global(self.stage_owner(self._first_use(key)))
            for name in tied["weight_attr"]:
                weight = self._recursive_getattr(tied["module"], name)
                dist.broadcast(weight, src=source, group=tied["group"])

    def _first_use(self, key: str) -> int:
        tied = enumerate(self._layer_specs)
        return next(number for number, spec in tied if isinstance(spec, TiedLayerSpec) and spec.key == key)


def planned_class(cls: type) -> type:
    """`cls` with planned stages. It keeps its name, by which DeepSpeed tells some models."""
    return type(cls.__name__, (PlannedModule, cls), {"__module__": cls.__module__})


def planned_topology(pipeline: PipelineSpec, *, world_size: int) -> Any:
    """DeepSpeed's pipeline x data topology with the plan's ranks."""
    devices = pipeline.num_devices
    topology = PipeDataParallelTopology(num_pp=devices, num_dp=world_size // devices)
    if pipeline.rank_of is not None:
        topology.mapping = {coord: pipeline.rank_of[rank] for coord, rank in topology.mapping.items()}
    return topology
