"""`deepspeed.initialize` with a plan: the module gets the plan's stages, the engine its schedule."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import PipelineModule

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.checkpoints import guard_checkpoints
from quartet_plugin.deepspeed.config import (
    as_config,
    clipping_notice,
    clips_by_first_stage,
    planned_config,
)
from quartet_plugin.deepspeed.engine import make_planned_engine
from quartet_plugin.deepspeed.module import planned_class, planned_topology
from quartet_plugin.deepspeed.pipeline import PipelineSpec
from quartet_plugin.deepspeed.planning import AgreedPlan, decide
from quartet_plugin.errors import PlanError, QuartetError
from quartet_plugin.protocol.ds_config import SECTION, Settings, parse_settings
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.rank.session import print_notes, write_command_failure

# Arguments of PipelineModule's constructor that the module keeps under the same name.
_CONSTRUCTOR_ATTRIBUTES = (
    *("loss_fn", "seed_layers", "seed_fn", "base_seed", "dynamic_shape", "checkpointable_layers"),
    *("activation_checkpoint_interval", "activation_checkpoint_func"),
)

Edit = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Initialized:
    """The `results` of `deepspeed.initialize`, and the plan's key (None: no plan).

    `config` is the ds_config with the plan's layout, `left_out` names the settings that a trial dropped.
    """

    results: Any
    config: dict[str, Any]
    left_out: list[str]
    plan_key: str | None


def initialize(*positional: Any, **call: Any) -> Any:
    """See `quartet_plugin.deepspeed.initialize`. Records an error where `quartet train` reads it."""
    if session_initialize is not None:
        return session_initialize(*positional, **call)
    try:
        return initialize_planned(deepspeed.initialize, named_arguments(positional, call)).results
    except QuartetError as error:
        write_command_failure(error, rank_env=RankEnv.of(os.environ))
        raise


# Under the plugin's entry: the replacement of `deepspeed.initialize`, for scripts that call `initialize`.
session_initialize: Callable[..., Any] | None = None


def named_arguments(positional: tuple[Any, ...], call: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `deepspeed.initialize` by name. Raises TypeError for more than it takes."""
    names = seams.INITIALIZE_ARGUMENTS.split()
    if len(positional) > len(names):
        raise TypeError(f"initialize() takes {len(names)} positional arguments; {len(positional)} were given")
    return {**dict(zip(names, positional, strict=False)), **call}


def initialize_planned(
    stock_initialize: Callable[..., Any],
    call: dict[str, Any],
    *,
    settings: Settings | None = None,
    edit: Edit | None = None,
    on_module: Callable[[Any], None] | None = None,
) -> Initialized:
    """`stock_initialize(**call)` with the plan that the call's config, `settings` or its module names.

    `edit` makes a trial's config and names the settings that it leaves out. `on_module` gets the module with
    the plan's stages, before DeepSpeed's engine does.
    """
    model, config = call.get("model"), config_of(call)
    if config is None or not isinstance(model, PipelineModule):
        if edit is not None or (settings is not None and not settings.is_empty):
            raise PlanError(
                f"{type(model).__name__}: a plan needs a deepspeed.pipe.PipelineModule and a config"
            )
        return Initialized(results=stock_initialize(**call), config={}, left_out=[], plan_key=None)
    rank_env, is_under_entry = RankEnv.of(os.environ), settings is not None
    agreed: AgreedPlan | None = getattr(model, "quartet_agreed", None)
    settings = settings or parse_settings(config)
    if agreed is None and not settings.is_empty:
        settings.refuse_auto()
        seams.check()
        agreed = decide(
            settings,
            specs=model._layer_specs,
            config=config,
            script_stages=model.num_stages,
            topology=model.topology(),
            rank_env=rank_env,
        )
        print_notes(agreed.notes, rank_env=rank_env)
        _apply_to_built_module(model, agreed, call)
    plan = None if agreed is None else agreed.plan
    changed = {name: value for name, value in config.items() if name != SECTION}
    if plan is not None:
        changed = planned_config(
            config, layout=plan.layout, global_batch_size=plan.made_for.global_batch_size
        )
    if clips_by_first_stage(changed, pipeline_parallel=getattr(model, "num_stages", 1)):
        print_notes([clipping_notice(changed)], rank_env=rank_env)
    final, left_out = (changed, []) if edit is None else edit(changed)
    if on_module is not None:
        on_module(model)
    results = stock_initialize(**{**_without_config(call), "config": final})
    if hasattr(model, "quartet_agreed"):
        make_planned_engine(results[0], model.quartet_agreed.pipeline)
    if edit is None and (is_under_entry or agreed is not None):
        guard_checkpoints(results[0], has_plan=agreed is not None)
    return Initialized(
        results=results, config=changed, left_out=left_out, plan_key=None if plan is None else plan.key
    )


def make_planned_module(model: Any, agreed: AgreedPlan, constructor: Any, arguments: dict[str, Any]) -> None:
    """Run a PipelineModule's constructor on `model` with the stages of the agreed plan."""
    _mark_planned(model, agreed)
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    topology = planned_topology(agreed.pipeline, world_size=world_size)
    stages = {"layers": agreed.specs, "num_stages": None, "topology": topology}
    constructor(model, **{**arguments, **stages})
    # DeepSpeed names checkpoints, and finds the stage that clips, by the place among a replica's sorted
    # ranks: in the launcher's order that is the stage.
    model._grid.ds_model_rank = model.stage_id


def _mark_planned(model: Any, agreed: AgreedPlan) -> None:
    # Before torch's constructor has run, a module takes attributes by `object.__setattr__` alone.
    object.__setattr__(model, "__class__", planned_class(type(model)))
    object.__setattr__(model, "quartet_pipeline", agreed.pipeline)
    object.__setattr__(model, "quartet_agreed", agreed)


def _apply_to_built_module(model: Any, agreed: AgreedPlan, call: dict[str, Any]) -> None:
    """Give a module that is built the plan's stages: kept where it has them already, else built again."""
    is_same_degree = model.num_stages == agreed.pipeline.num_devices
    stock_bounds = tuple(model.parts) if is_same_degree else None
    if agreed.specs is model._layer_specs and _has_stages_of(model, agreed.pipeline):
        if agreed.pipeline.schedule is not None:
            _mark_planned(model, agreed)
            model._functions = {model.stage_id: model.forward_funcs}
            model._checkpointable = {}
            model._numbers = list(range(model._local_start, model._local_stop))
            model.quartet_stock_bounds = stock_bounds
        return
    optimizer, parameters = call.get("optimizer"), call.get("model_parameters")
    hint = (
        "start the script with `-m quartet_plugin.deepspeed` and `--deepspeed_config FILE`: then its module "
        "is built with the plan's stages"
    )
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer: made for the module's own stages; {hint}")
    if parameters is not None:
        parameters = list(parameters)
        if any(isinstance(group, Mapping) for group in parameters):
            raise PlanError(f"model_parameters: groups of the module's own stages; {hint}")
    arguments = {name: getattr(model, name) for name in _CONSTRUCTOR_ATTRIBUTES}
    arguments["partition_method"] = "uniform"
    make_planned_module(model, agreed, PipelineModule.__init__, arguments)
    model.quartet_stock_bounds = stock_bounds
    if parameters is not None:
        call["model_parameters"] = [parameter for parameter in model.parameters() if parameter.requires_grad]


def _has_stages_of(model: Any, pipeline: PipelineSpec) -> bool:
    return (
        pipeline.num_stages == pipeline.num_devices == model.num_stages
        and list(model.parts) == list(pipeline.bounds)
        and (pipeline.rank_of is None or list(pipeline.rank_of) == sorted(pipeline.rank_of))
    )


def config_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ds_config that a call of `deepspeed.initialize` gives, in any of its forms; None without one."""
    for value in (call.get("config"), call.get("config_params")):
        if value is not None:
            return as_config(value)
    args = call.get("args")
    return as_config(getattr(args, "deepspeed_config", None))


def _without_config(call: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in call.items() if name not in ("config", "config_params")}
    args = kept.get("args")
    if getattr(args, "deepspeed_config", None) is not None:
        kept["args"] = Namespace(**{**vars(args), "deepspeed_config": None})
    return kept
