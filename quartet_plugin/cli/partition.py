"""`quartet partition`: list, show and check ways to cut a linear layer; no torch, no processes."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import JsonSwitch, refuse_user_command
from quartet_plugin.cli.output import show
from quartet_plugin.errors import UsageError

if TYPE_CHECKING:
    from quartet_plugin.partition.table import Partition


class PartitionFormat(StrEnum):
    """How a partition is shown."""

    TEXT = "text"
    JSON = "json"
    PNG = "png"


PartitionName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name that `quartet partition list` shows, or a PARTITION.json.",
        show_default=False,
    ),
]
# A table's line is for reading back: not even one of a thousand devices is cut.
MAX_TABLE_LINE = 1_000_000

partition_command = typer.Typer(
    name="partition",
    help="List, show and check partitions of a linear layer over devices.",
    no_args_is_help=True,
    callback=refuse_user_command,
)


@partition_command.command("list")
def list_partitions(as_json: JsonSwitch = False) -> None:
    """List the named partitions, with what a device sends in all phases of one linear and microbatch."""
    from quartet_plugin.partition.named import FAMILIES, named_partition
    from quartet_plugin.partition.traffic import messages, sent_in_shares
    from quartet_plugin.report.summary import aligned

    rows, records = [["name", "example", ">devices", ">messages", "sends", "meaning"]], []
    for family in FAMILIES:
        partition = named_partition(family.example)
        count = sum(messages(partition).values())
        shares = sent_in_shares(partition)
        records.append(
            {
                "name": family.form,
                "example": family.example,
                "num_devices": partition.num_devices,
                "num_messages": float(count),
                "sends": {dims: float(share) for dims, share in shares.items()},
                "meaning": family.meaning,
            }
        )
        rows.append(
            [
                family.form,
                family.example,
                str(partition.num_devices),
                f"{float(count):g}",
                " + ".join(f"{share} {dims}" for dims, share in shares.items()),
                family.meaning,
            ]
        )
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "partitions": records}, indent=1))
        return
    show(
        *aligned(rows),
        "",
        "what a device of the example sends in forward, input gradient and weight gradient: messages, and "
        "elements as shares of the input (MN), the weight (NK) and the output (MK)",
    )


@partition_command.command("show")
def show_partition(
    name: PartitionName,
    form: Annotated[
        PartitionFormat, typer.Option("--format", metavar="FORM", help="text, json or png.")
    ] = PartitionFormat.TEXT,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The file to write; png needs one.")
    ] = None,
) -> None:
    """Check a partition's table, and show which device multiplies which blocks in each step."""
    from quartet_plugin.model.files import write_bytes_atomic, write_text_atomic
    from quartet_plugin.partition.files import partition_to_json, partition_to_text, write_partition

    if form is PartitionFormat.PNG and output is None:
        raise UsageError("--format png: a picture needs a file; add -o FILE")
    partition = checked_partition(name)
    if form is PartitionFormat.PNG and output is not None:
        from quartet_plugin.report.partition_picture import partition_png

        write_bytes_atomic(output, partition_png(partition))
    elif form is PartitionFormat.JSON:
        if output is None:
            typer.echo(json.dumps(partition_to_json(partition)))
        else:
            write_partition(output, partition)
    elif output is None:
        show(*partition_to_text(partition).split("\n"), limit=MAX_TABLE_LINE)
    else:
        write_text_atomic(output, partition_to_text(partition) + "\n")
    if output is not None:
        show(f"wrote {output}")


def checked_partition(name: str) -> "Partition":
    """The partition with this name, or in this file, valid. Raises ConfigError or PlanError."""
    from quartet_plugin.partition.files import read_partition
    from quartet_plugin.partition.named import named_partition
    from quartet_plugin.partition.validate import validate

    partition = read_partition(name) if name.endswith(".json") else named_partition(name)
    validate(partition)
    return partition


@partition_command.command()
def price(
    hidden: Annotated[int, typer.Option(min=1, max=2**20, metavar="H", help="Hidden size.")],
    tokens: Annotated[int, typer.Option(min=1, max=2**20, metavar="T", help="Tokens per microbatch.")],
    devices: Annotated[
        int, typer.Option(min=2, max=1024, metavar="N", help="Number of devices that share a layer.")
    ],
    device: Annotated[str, typer.Option(metavar="NAME", help="A device of the library.")] = "H100-SXM-80GB",
    as_json: JsonSwitch = False,
) -> None:
    """Predict a layer's linears in every form that fits: milliseconds, what is exposed, and bytes sent.

    The layer has as many key and value heads as query heads, and an FFN of four times the hidden size.
    """
    from quartet_plugin.cost.partition_table import price_rows, price_table
    from quartet_plugin.report.summary import aligned

    content = price_table(hidden=hidden, tokens=tokens, num_devices=devices, device=device)
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        show(*aligned(price_rows(content)), "", *content["remarks"])


@partition_command.command()
def search(
    hidden: Annotated[int, typer.Option(min=1, max=2**20, metavar="H", help="Hidden size.")],
    heads: Annotated[int, typer.Option(min=1, max=2**16, metavar="A", help="Attention heads.")],
    batch: Annotated[int, typer.Option(min=1, max=2**16, metavar="B", help="Samples per microbatch.")],
    tokens: Annotated[int, typer.Option(min=1, max=2**20, metavar="T", help="Tokens per sample.")],
    devices: Annotated[int, typer.Option(min=2, max=32, metavar="N", help="Devices: 2, 4, ... 32.")],
    device: Annotated[str, typer.Option(metavar="NAME", help="A device of the library.")] = "H100-SXM-80GB",
    as_json: JsonSwitch = False,
) -> None:
    """Search the cheapest partition sequence of each operator of a layer, by PrimePar's dynamic programming.

    Each letter is a cut: B batch, M tokens, N and K columns in and out, P2 and P4 grids of rings.
    Weight gradients are reduced in every microbatch.
    """
    from quartet_plugin.cost.devices import device_named
    from quartet_plugin.cost.partition_search import search_layer
    from quartet_plugin.cost.partition_table import rates_of
    from quartet_plugin.report.summary import aligned

    result = search_layer(
        hidden=hidden,
        num_heads=heads,
        batch=batch,
        tokens=tokens,
        num_devices=devices,
        rates=rates_of(device_named(device)),
    )
    if as_json:
        content = {"schema_version": 1, "sequences": result.sequences, "cost_s": result.cost_s}
        typer.echo(json.dumps(content, indent=1))
        return
    rows = [["operator", "sequence"], *([name, " ".join(cuts)] for name, cuts in result.sequences.items())]
    show(
        *aligned(rows),
        "",
        f"{1e3 * result.cost_s:.3f} ms of communication that no product hides, forward and backward: "
        "predicted by the cost model, not measured",
    )
