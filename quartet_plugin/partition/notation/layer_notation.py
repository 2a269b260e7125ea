"""A layer's partition in another system's words: each linear's homes, and signatures where it has them."""

from typing import Any, Literal

from quartet_plugin.partition.layer import Linear
from quartet_plugin.partition.notation.colossal import to_colossal
from quartet_plugin.partition.notation.dtensor import layer_to_dtensor
from quartet_plugin.partition.notation.gspmd import to_gspmd
from quartet_plugin.partition.notation.sbp import product_to_sbp, to_sbp
from quartet_plugin.partition.table import AXES, Partition, Phase, Tensor
from quartet_plugin.partition.tiles import home_tiles, signature
from quartet_plugin.partition.traffic import check_divides

Notation = Literal["sbp", "gspmd", "dtensor", "colossal"]


def layer_notation(
    notation: Notation, cut: list[tuple[Linear, Partition]], *, form: str, devices: int, stages: int
) -> dict[str, Any]:
    """The layer as `cut`, which is called `form`, as JSON.

    Raises PlanError where the sizes do not divide, or where the notation cannot say the form.
    """
    for linear, partition in cut:
        check_divides(partition, linear.sizes)
    content: dict[str, Any] = {
        "schema_version": 1,
        "notation": notation,
        "partition": form,
        "tensor_parallel": devices,
    }
    if notation == "colossal":
        return content | {"configuration": to_colossal(form, devices, stages=stages)}
    if notation == "dtensor":
        return content | {"plan": layer_to_dtensor(cut)}
    return content | {"linears": [_linear(notation, linear, partition) for linear, partition in cut]}


def notation_lines(content: dict[str, Any]) -> list[str]:
    """The lines for reading of what `layer_notation` made."""
    if "configuration" in content:
        return [content["configuration"]]
    if "plan" in content:
        plan = content["plan"]
        rows = [f"mesh = {plan['mesh']}"]
        for kind in ("parameter", "forward"):
            rows.append(f"{kind} = {{")
            rows += [f'    "{name}": [{", ".join(words)}],' for name, words in plan[kind].items()]
            rows.append("}")
        return rows
    rows = []
    for linear in content["linears"]:
        rows.append(
            f"# {linear['name']}: {linear['partition']}, M x N x K = {' x '.join(map(str, linear['sizes']))}"
        )
        homes = linear["homes"]
        for tensor, text in homes.items():
            if text != homes.get(tensor.removeprefix("d")) or tensor in ("I", "W", "O"):
                rows.append(f"{linear['name']}.{tensor}{linear['shapes'][tensor]} {text}")
        rows += [f"{linear['name']}.{phase}: {text}" for phase, text in linear.get("products", {}).items()]
    return rows


def _linear(notation: Notation, linear: Linear, partition: Partition) -> dict[str, Any]:
    write = to_sbp if notation == "sbp" else to_gspmd
    content: dict[str, Any] = {
        "name": linear.name,
        "partition": partition.name,
        "sizes": list(linear.sizes),
        "shapes": {str(tensor): [linear.sizes[axis] for axis in AXES[tensor]] for tensor in Tensor},
        "homes": {str(tensor): write(home_tiles(partition, tensor)) for tensor in Tensor},
    }
    if notation == "sbp":
        signatures = {phase: signature(partition, phase) for phase in Phase}
        content["products"] = {
            str(phase): product_to_sbp(phase, known)
            for phase, known in signatures.items()
            if known is not None
        }
    return content
