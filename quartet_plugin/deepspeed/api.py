"""`deepspeed.initialize` with a plan: the module gets the plan's stages, the engine its schedule."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.module import PipelineModule

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.choice import Choice
from quartet_plugin.deepspeed.config import clipping_notice, clips_by_first_stage, planned_config
from quartet_plugin.deepspeed.engine import adopt
from quartet_plugin.deepspeed.module import planned_class, planned_topology
from quartet_plugin.deepspeed.place import place_of
from quartet_plugin.deepspeed.planning import Planned, decide
from quartet_plugin.deepspeed.settings import AUTO, SECTION, Settings, as_config, parse_settings
from quartet_plugin.errors import ConfigError, PlanError, QuartetError
from quartet_plugin.rank.session import write_command_failure

_ARGUMENTS = ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler")
# Arguments of PipelineModule's constructor that the module keeps under the same name.
_CONSTRUCTOR_ATTRIBUTES = (
    *("loss_fn", "seed_layers", "seed_fn", "base_seed", "dynamic_shape", "checkpointable_layers"),
    *("activation_checkpoint_interval", "activation_checkpoint_func"),
)

Edit = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]


def initialize(*positional: Any, **call: Any) -> Any:
    """See `quartet_plugin.deepspeed.initialize`. Leaves the error where `quartet train` asks for it."""
    if session_initialize is not None:
        return session_initialize(*positional, **call)
    try:
        return initialize_planned(deepspeed.initialize, named_arguments(positional, call))
    except QuartetError as error:
        write_command_failure(error, rank_env=place_of())
        raise


# Under the plugin's entry: the replacement of `deepspeed.initialize`, for scripts that call `initialize`.
session_initialize: Callable[..., Any] | None = None


def named_arguments(positional: tuple[Any, ...], call: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `deepspeed.initialize` by name."""
    return {**dict(zip(_ARGUMENTS, positional, strict=False)), **call}


def initialize_planned(
    stock_initialize: Callable[..., Any],
    call: dict[str, Any],
    *,
    settings: Settings | None = None,
    edit: Edit | None = None,
    on_module: Callable[[Any], None] | None = None,
) -> Any:
    """`stock_initialize(**call)` with the plan that the call's config, `settings` or its module names.

    `edit` makes a trial's config and names what it leaves out. `on_module` gets the module with the stages
    it will have, before DeepSpeed's engine does. The results are those of `deepspeed.initialize`.
    """
    model, config = call.get("model"), _config_of(call)
    if config is None or not isinstance(model, PipelineModule):
        if settings is not None and not settings.is_empty:
            raise PlanError(
                f"{type(model).__name__}: a plan needs a deepspeed.pipe.PipelineModule and a config"
            )
        return stock_initialize(**call)
    planned: Planned | None = getattr(model, "quartet_planned", None)
    if planned is None:
        planned = _plan_of(settings or parse_settings(config), model=model, config=config)
        if planned is not None:
            tell(planned)
            _take(model, planned, call)
    changed = {name: value for name, value in config.items() if name != SECTION}
    if planned is not None and planned.plan is not None:
        size = planned.plan.made_for.global_batch_size
        changed = planned_config(config, layout=planned.plan.layout, global_batch_size=size)
    _notice_clipping(model, changed)
    given, left_out = (changed, []) if edit is None else edit(changed)
    if on_module is not None:
        on_module(model)
    results = stock_initialize(**{**_without_config(call), "config": given})
    engine = results[0]
    if planned is not None and hasattr(model, "quartet_choice"):
        adopt(engine, planned.choice)
    engine.quartet_config = changed
    engine.quartet_neutralised = left_out
    engine.quartet_plan_key = None if planned is None or planned.plan is None else planned.plan.key
    return results


def _plan_of(settings: Settings, *, model: Any, config: Mapping[str, Any]) -> Planned | None:
    if settings.is_empty:
        return None
    if settings.is_auto:
        raise ConfigError(
            f"{SECTION}.plan: {AUTO!r} is for trials of `quartet tune`; name a plan file to train with it"
        )
    seams.check()
    return decide(
        settings,
        specs=model._layer_specs,
        config=config,
        script_stages=model.num_stages,
        rank_env=place_of(),
    )


def make_planned(model: Any, planned: Planned, constructor: Any, arguments: dict[str, Any]) -> None:
    """Run a PipelineModule's constructor on `model` with the stages of the choice."""
    choice = planned.choice
    object.__setattr__(model, "__class__", planned_class(type(model)))
    object.__setattr__(model, "quartet_choice", choice)
    object.__setattr__(model, "quartet_planned", planned)
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    topology = planned_topology(choice, world_size=world_size)
    constructor(model, **{**arguments, "num_stages": None, "topology": topology})


def _take(model: Any, planned: Planned, call: dict[str, Any]) -> None:
    """Give a finished module the plan's stages: kept where they are the module's already, else made again."""
    choice = planned.choice
    if _has_stages_of(model, choice):
        if choice.recipe is not None:
            _dress(model, planned)
        return
    optimizer, parameters = call.get("optimizer"), call.get("model_parameters")
    hint = (
        "start the script with `-m quartet_plugin.deepspeed`, which makes the module with the plan's stages"
    )
    if isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"optimizer: made for the module's own stages; {hint}")
    if parameters is not None:
        parameters = list(parameters)
        if any(isinstance(group, Mapping) for group in parameters):
            raise PlanError(f"model_parameters: groups of the module's own stages; {hint}")
    make_planned(
        model,
        planned,
        PipelineModule.__init__,
        {
            "layers": model._layer_specs,
            "partition_method": "uniform",
            **{name: getattr(model, name) for name in _CONSTRUCTOR_ATTRIBUTES},
        },
    )
    if parameters is not None:
        call["model_parameters"] = [parameter for parameter in model.parameters() if parameter.requires_grad]


def _has_stages_of(model: Any, choice: Choice) -> bool:
    return (
        choice.num_stages == choice.num_devices == model.num_stages
        and list(model.parts) == list(choice.bounds)
        and (choice.rank_of is None or list(choice.rank_of) == sorted(choice.rank_of))
    )


def _dress(model: Any, planned: Planned) -> None:
    """The planned class on a module whose stages are the plan's already: its weights stay."""
    object.__setattr__(model, "__class__", planned_class(type(model)))
    model.quartet_choice = planned.choice
    model.quartet_planned = planned
    model._functions = {model.stage_id: model.forward_funcs}
    model._checkpointable = {}
    model._numbers = list(range(model._local_start, model._local_stop))


def tell(planned: Planned) -> None:
    """Print the notes once."""
    if int(os.environ.get("RANK", "0")) == 0:
        for note in planned.notes:
            print(f"quartet: {note}", file=sys.stderr, flush=True)


def _notice_clipping(model: Any, config: Mapping[str, Any]) -> None:
    stages = getattr(model, "num_stages", 1)
    if int(os.environ.get("RANK", "0")) == 0 and clips_by_first_stage(config, pipeline_parallel=stages):
        print(f"quartet: {clipping_notice(config)}", file=sys.stderr, flush=True)


def _config_of(call: Mapping[str, Any]) -> dict[str, Any] | None:
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
