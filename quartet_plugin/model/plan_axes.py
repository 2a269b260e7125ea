"""The axes of a plan under their standard names, for tools that compare plans axis by axis."""

from dataclasses import fields

from quartet_plugin.model.plan import Plan

type AxisValue = int | str | bool


def plan_axes(plan: Plan) -> dict[str, AxisValue]:
    """Every axis of a plan by name: degrees, sizes and switches as they are, the other parts as labels.

    All fields of the layout are here; one that is None, such as a bucket size that the ds_config keeps, is
    left out. A setting that the plan changes stands under the name of its knob. The stage of multi-token
    prediction is here where the model has it in a pipeline.
    """
    layout = {part.name: getattr(plan.layout, part.name) for part in fields(plan.layout)}
    layout |= {setting.name: setting.value for setting in layout.pop("settings") or ()}
    if plan.layout.tensor_partition is not None:
        layout["tensor_partition"] = plan.layout.tensor_partition.label
    custom = plan.schedule.custom
    has_mtp_stage = plan.made_for.mtp_layers is not None and plan.layout.num_stages > 1
    mtp_stage = "before_last" if plan.split.mtp_before_last else "last"
    return {
        **{name: value for name, value in layout.items() if value is not None},
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule.name if custom is None else custom.label,
        **({} if plan.schedule.group is None else {"group": plan.schedule.group}),
        "split": plan.split.label,
        **({"mtp_stage": mtp_stage} if has_mtp_stage else {}),
        "mapping": plan.mapping.label,
        "shape": plan.shape_label,
        "num_layers": plan.shape.num_layers,
        "hidden_size": plan.shape.hidden_size,
    }
