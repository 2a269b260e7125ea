"""Refuses to load a checkpoint where it would silently give layers each other's state.

The stages of a run (split, placement, experts of a rank, tensor partition) are kept with every checkpoint:
among its arguments, where every format of Megatron's has room, and readable beside it as `quartet.json`.
Megatron's default form of the distributed optimizer keys its state by rank and buffer, its old format by rank
and local layer number, and both check sizes only; a checkpoint of either is loaded only onto the same stages.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quartet_plugin.errors import QuartetError
from quartet_plugin.megatron.seams import Seam, Wrapper
from quartet_plugin.megatron.seams.declared import LOAD, SAVE
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.megatron_arguments import expert_degrees_of, split_of
from quartet_plugin.rank.rendezvous import AgreedRefusalError

FILE = "quartet.json"
ATTRIBUTE = "quartet_stages"
# Optimizer state that names the weight it belongs to, and so finds it under any layout.
_RESHARDABLE = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
# The type of checkpoints of Megatron-FSDP.
_FSDP_DTENSOR = "FSDP_DTENSOR"
# The format of each other type, as messages name it.
_FORMATS = {"LEGACY": "torch", "LOCAL": "local", "GLOBAL": "torch_dist", "TORCH_DCP": "torch_dcp"}
# The forms whose files are the ranks', weights included.
_BY_RANK = ("LEGACY", "LOCAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The layers of every pipeline rank, what a rank has of them, and the slots of the ranks.

    `layers` counts each stage's transformer layers (or is a hybrid model's own pattern), `placement` is the
    pipeline rank of each stage. `slots` is the mapping, None for the launcher's order. `experts` are EP and
    expert TP, None without experts; `partition` is the label of the tensor partition, None for stock.
    `mtp_before_last`: multi-token prediction lies on the stage before the last one, None where it does not.
    """

    tensor_parallel: int
    pipeline_parallel: int
    layers: tuple[int, ...] | str
    placement: tuple[int, ...]
    slots: tuple[tuple[int, int], ...] | None = None
    experts: tuple[int, int] | None = None
    partition: str | None = None
    mtp_before_last: bool | None = None

    @property
    def digest(self) -> str:
        """sha256 of all but the slots, with the degrees that the layers are spread over."""
        kept = {name: value for name, value in asdict(self).items() if name != "slots" and value is not None}
        return digest(kept)

    @property
    def text(self) -> str:
        """Degrees and split for messages, as `TP1 PP2 split 3+3`; the placement where it is not the loop."""
        layers = self.layers if isinstance(self.layers, str) else "+".join(map(str, self.layers))
        text = f"TP{self.tensor_parallel} PP{self.pipeline_parallel} split {layers}"
        if self.mtp_before_last:
            text += " multi-token prediction before the last stage"
        if self.placement != loop(len(self.placement), self.pipeline_parallel):
            text += f" placed on {','.join(map(str, self.placement))}"
        if self.experts is not None:
            degree, tensor = self.experts
            text += f" EP{degree} expert TP{tensor}"
        return text if self.partition is None else f"{text} partition {self.partition}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object that is kept with a checkpoint."""
        return {"schema_version": 1, "digest": self.digest, **asdict(self)}


def loop(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Stock's placement: stage k is chunk k // PP of pipeline rank k % PP.

    Also of one stage on several ranks: a hybrid model's pattern without pipes, which Megatron divides itself.
    """
    return tuple(stage % num_ranks for stage in range(num_stages))


def stages_of(args: Namespace) -> Stages | None:
    """The stages that stock Megatron builds from its arguments; None for incomplete arguments."""
    try:
        pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(
            args, "hybrid_override_pattern", None
        )
        split = None if pattern else split_of(args)
        layers = str(pattern) if split is None else split.transformer_layers_per_stage
        pipeline = int(args.pipeline_model_parallel_size)
        num_stages = max(1, str(pattern).count("|") + 1) if pattern else len(layers)
        return Stages(
            tensor_parallel=int(args.tensor_model_parallel_size),
            pipeline_parallel=pipeline,
            layers=layers,
            placement=loop(num_stages, pipeline),
            experts=_experts_of(args),
            mtp_before_last=None if split is None else split.mtp_before_last,
        )
    except (AttributeError, TypeError, ValueError, QuartetError):
        return None


def stages_kept(saved: Namespace) -> Stages | None:
    """The stages of a checkpoint, from its arguments: as the guard kept them, else as stock builds them."""
    kept, of_arguments = getattr(saved, ATTRIBUTE, None), stages_of(saved)
    if kept is None:
        return of_arguments
    try:
        layers = kept["layers"]
        slots = kept["slots"]
        return Stages(
            tensor_parallel=int(kept["tensor_parallel"]),
            pipeline_parallel=int(kept["pipeline_parallel"]),
            layers=layers if isinstance(layers, str) else tuple(int(count) for count in layers),
            placement=tuple(int(rank) for rank in kept["placement"]),
            slots=None if slots is None else tuple((int(node), int(local)) for node, local in slots),
            # Earlier versions kept none of these. A partition is taken for stock's; the others are arguments.
            experts=_experts_of(saved),
            partition=kept.get("partition"),
            mtp_before_last=None if of_arguments is None else of_arguments.mtp_before_last,
        )
    except (KeyError, TypeError, ValueError):
        return None


def _experts_of(args: Namespace) -> tuple[int, int] | None:
    """EP and expert TP, by which ranks have other experts at equal sizes; None without experts."""
    return expert_degrees_of(args) if getattr(args, "num_experts", None) else None


class CheckpointGuard:
    """Keeps and checks the stages of one run. `placement` is the rank of each stage, None for stock.

    `slots` is the mapping of the plan, None for the launcher's order, `partition` the label of its tensor
    partition, None for stock.
    """

    def __init__(
        self,
        *,
        placement: Sequence[int] | None = None,
        slots: Sequence[tuple[int, int]] | None = None,
        partition: str | None = None,
        has_plan: bool = False,
    ) -> None:
        self._placement = None if placement is None else tuple(placement)
        self._slots = None if slots is None else tuple(slots)
        self._partition = partition
        self._has_plan = has_plan

    @property
    def wrappers(self) -> dict[Seam, Wrapper]:
        """The wrappers, to be installed with the run's others."""
        return {SAVE: self._wrap_save, LOAD: self._wrap_load}

    def stages(self, args: Namespace) -> Stages | None:
        """This run's stages."""
        stock = stages_of(args)
        if stock is None:
            return None
        placement = self._placement or stock.placement
        return replace(stock, placement=placement, slots=self._slots, partition=self._partition)

    def _wrap_save(self, save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def save_with_stages(iteration: int, *args: Any, **kwargs: Any) -> Any:
            from megatron.training.global_vars import get_args

            megatron_args = get_args()
            stages = self.stages(megatron_args)
            if stages is not None:
                setattr(megatron_args, ATTRIBUTE, stages.to_json())
            result = save_checkpoint(iteration, *args, **kwargs)
            if stages is not None and not kwargs.get("non_persistent_ckpt"):
                _write_beside(megatron_args.save, iteration, stages, release=bool(kwargs.get("release")))
            return result

        return save_with_stages

    def _wrap_load(self, load_base_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def load_onto_same_stages(load_dir: Any, args: Namespace, *rest: Any, **kwargs: Any) -> Any:
            loaded = load_base_checkpoint(load_dir, args, *rest, **kwargs)
            state, name, release, kind = loaded
            # Before its arguments are validated, Megatron only reads those of the checkpoint.
            if state is not None and hasattr(args, "params_dtype"):
                self.check(
                    state, args, name=str(name), form=getattr(kind, "name", str(kind)), release=release
                )
            return loaded

        return load_onto_same_stages

    def check(
        self, state: dict[str, Any], args: Namespace, *, name: str, form: str, release: bool = False
    ) -> None:
        """Raise AgreedRefusalError where this checkpoint would give a layer another one's state.

        `form` is Megatron's CheckpointType. All ranks see the same and come to the same answer.
        """
        if self._has_plan and (reason := _format_refusal(args, form)) is not None:
            raise AgreedRefusalError(f"checkpoint {name}: {reason}")
        saved_args = state.get("args")
        if saved_args is None:
            if form not in _BY_RANK:
                return
            saved_args = Namespace()
        bound = _bound(state, args, saved_args, form=form, release=release)
        if bound is None:
            return
        reason, cure = bound
        then, now = stages_kept(saved_args), self.stages(args)
        if then is None or now is None:
            if not self._has_plan:
                return
            raise AgreedRefusalError(
                f"checkpoint {name}: {reason}, but it does not record those stages; {cure}"
            )
        if then.digest != now.digest:
            raise AgreedRefusalError(
                f"checkpoint {name}: {reason} ({then.text}); this run has {now.text}, so layers would load "
                f"the wrong state; {cure}"
            )
        were_grouped = _has_grouped_experts(saved_args)
        if form == "GLOBAL" and were_grouped != _has_grouped_experts(args):
            order = "grouped by product" if were_grouped else "one expert after the other"
            raise AgreedRefusalError(
                f"checkpoint {name}: its optimizer state stores expert weights {order}; "
                f"keep --moe-grouped-gemm as it was, or {cure}"
            )
        if form == "LOCAL" and then.slots != now.slots:
            raise AgreedRefusalError(
                f"checkpoint {name}: it is stored on the nodes of another mapping; train with the plan that "
                "saved it, or start from a global checkpoint"
            )


def _format_refusal(args: Namespace, form: str) -> str | None:
    """Why a checkpoint of this type does not load with or without Megatron-FSDP; None where it may."""
    if getattr(args, "use_megatron_fsdp", False):
        if form == _FSDP_DTENSOR:
            return None
        return (
            f"its format is {_FORMATS.get(form, 'not known')}; --use-megatron-fsdp loads only fsdp_dtensor; "
            "train with a plan that turns Megatron-FSDP off, or start without --load"
        )
    # Without the switch Megatron takes the format for that of PyTorch's FSDP.
    if form not in (_FSDP_DTENSOR, "TORCH_DCP") or getattr(args, "use_torch_fsdp2", False):
        return None
    return (
        "its format is fsdp_dtensor, which loads only with --use-megatron-fsdp; train with a plan that turns "
        "it on, or start without --load"
    )


def _bound(
    state: dict[str, Any], args: Namespace, saved: Namespace, *, form: str, release: bool
) -> tuple[str, str] | None:
    """The reason that binds a checkpoint to its stages, and its cure; None if it loads onto any stages."""
    if form == "LEGACY":
        return (
            "its format (--ckpt-format torch) can be loaded only with the stages it was saved with",
            "`quartet convert` it, --to the plan that saved it (or stock), or load it with that layout and "
            "save it with --ckpt-format torch_dist",
        )
    if form == "LOCAL":
        return (
            "a local checkpoint can be loaded only with the stages it was saved with",
            "start from a global checkpoint (--load)",
        )
    loads_optimizer = not (
        release
        or getattr(args, "finetune", False)
        or getattr(args, "no_load_optim", False)
        or getattr(saved, "no_save_optim", False)
    )
    if form != "GLOBAL" or not loads_optimizer or not getattr(args, "use_distributed_optimizer", False):
        return None
    sharding = (state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if sharding in _RESHARDABLE or (sharding is None and getattr(saved, "ckpt_fully_parallel_save", False)):
        return None
    return (
        f"its optimizer state ({sharding or 'an old form'}) can be loaded only with the stages it was saved "
        "with",
        "save it with --dist-ckpt-optim-fully-reshardable (as `quartet convert` does, --to the plan that "
        "saved it), or load the weights alone with --no-load-optim",
    )


def _has_grouped_experts(args: Namespace) -> bool:
    """Whether a layer has its experts' weights by product, then by expert, and not the other way around."""
    has_experts = getattr(args, "num_experts", None) and getattr(args, "moe_grouped_gemm", False)
    return bool(has_experts) and getattr(args, "transformer_impl", None) == "transformer_engine"


def _write_beside(folder: str, iteration: int, stages: Stages, *, release: bool) -> None:
    """Write `quartet.json` into the checkpoint's folder, for those who do not read checkpoints."""
    import torch.distributed as dist
    from megatron.training.checkpointing import get_checkpoint_name

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    checkpoint = Path(get_checkpoint_name(folder, iteration, release=release, return_base_dir=True))
    if checkpoint.is_dir():
        write_json_atomic(checkpoint / FILE, stages.to_json())
