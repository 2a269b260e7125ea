"""The frameworks that plans are made for, and how they differ for searches and commands."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The plans that fit a framework; defaults are Megatron's. `framework` is its name in plans.

    Plans are said in flags (`has_flags`) or in a ds_config. `quartet recheck` works with `has_recheck` alone.
    `stock_schedules` need no parity receipt. `changes_num_layers`: a trial can run a model of fewer layers.
    """

    framework: str
    title: str
    has_flags: bool = True
    has_recheck: bool = False
    stock_schedules: frozenset[str] = frozenset({"no-pipelining", "1f1b", "interleaved"})
    changes_tensor_parallel: bool = True
    changes_num_layers: bool = True


MEGATRON = Capabilities(framework="megatron-core", title="Megatron", has_recheck=True)
DEEPSPEED = Capabilities(
    framework="deepspeed",
    title="DeepSpeed",
    has_flags=False,
    stock_schedules=frozenset({"no-pipelining", "1f1b"}),
    changes_tensor_parallel=False,
    changes_num_layers=False,
)


def capabilities(framework: str) -> Capabilities:
    """The record of a plan's framework; of an unknown one only the name is known."""
    records = {record.framework: record for record in (MEGATRON, DEEPSPEED)}
    return records.get(framework) or Capabilities(framework=framework, title=framework)
