"""Gives the stages of Megatron's layout string, or of a hybrid model's pattern, to a placement's devices."""

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.seams import Seam, Wrapper
from quartet_plugin.megatron.seams.declared import FROM_STR, HYBRID_SEGMENT


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """`layout[pp_rank][chunk]` holds the layers of that chunk's stage."""

    def __init__(self, layout: str, pipeline_model_parallel_size: int, placement: StagePlacement) -> None:
        """Raises PlanError for a string with another number of stages."""
        super().__init__(layout, pipeline_model_parallel_size)
        by_rank: list[list[Any]] = self.layout
        in_loop_order = [
            by_rank[rank][chunk]
            for chunk in range(self.virtual_pipeline_model_parallel_size)
            for rank in range(pipeline_model_parallel_size)
        ]
        if (
            len(in_loop_order) != placement.num_stages
            or pipeline_model_parallel_size != placement.num_devices
        ):
            raise PlanError(
                f"--pipeline-model-parallel-layout: {len(in_loop_order)} stages on "
                f"{pipeline_model_parallel_size} ranks; the plan places {placement.num_stages} on "
                f"{placement.num_devices}"
            )
        self._placement = placement
        self._by_stage = in_loop_order
        self.layout: list[list[Any]] = [
            [in_loop_order[stage] for stage in placement.stages(rank)]
            for rank in range(placement.num_devices)
        ]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """The number of layers of this type in all stages before the stage (pp_rank, vp_stage)."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        stage = self._placement.stage(rank, vp_stage or 0)
        return sum(layers.count(layer_type) for layers in self._by_stage[:stage])

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int) -> bool:
        """Check the layers, and whether those of multi-token prediction have a stage without the head.

        Megatron asks whether the last stage's device is the last one, which it need not be here.
        """
        super().validate_layer_layout(num_layers=num_layers, mtp_num_layers=mtp_num_layers)
        return any(LayerType.mtp in layers for layers in self._by_stage[:-1])

    def __reduce__(self) -> tuple[Any, ...]:
        """Checkpoints pickle the arguments: as Megatron's class they load without the plugin."""
        return PipelineParallelLayerLayout, (self.input_data, self.pipeline_model_parallel_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlacedLayout":
        """Immutable after construction; copying by `__reduce__` would lose the placement."""
        return self


def wrappers(placement: StagePlacement, *, is_hybrid: bool = False) -> dict[Seam, Wrapper]:
    """Let `PipelineParallelLayerLayout.from_str` return placed layouts.

    Megatron parses the string for every configuration, so the class is replaced, not one configuration. A
    hybrid model's stages are the parts of its pattern instead: where they are not in Megatron's own order
    over the devices, a device selects its parts by the placement.
    """

    @cache
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PlacedLayout:
        return PlacedLayout(layout, pipeline_model_parallel_size, placement)

    needed: dict[Seam, Wrapper] = {FROM_STR: lambda _original: from_str}
    if is_hybrid and not placement.is_megatrons:
        needed[HYBRID_SEGMENT] = partial(_placed_segment, placement)
    return needed


def _placed_segment(placement: StagePlacement, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def select_pipeline_segment(
        main_pattern: str, pp_group: Any, vp_stage: int | None, *_: Any, **__: Any
    ) -> Any:
        """The layers of a stage, and the number of layers in all stages before it."""
        import torch.distributed as dist

        segments, num_devices = main_pattern.split("|"), dist.get_world_size(pp_group)
        if (len(segments), num_devices) != (placement.num_stages, placement.num_devices):
            raise PlanError(
                f"--hybrid-layer-pattern: {len(segments)} stages on {num_devices} ranks; the plan places "
                f"{placement.num_stages} on {placement.num_devices}"
            )
        stage = placement.stage(dist.get_rank(pp_group), vp_stage or 0)
        layers, _ = original(segments[stage], None, None)
        return layers, sum(map(len, segments[:stage]))

    return select_pipeline_segment
