"""A custom pipeline schedule as a plan holds it: placement and costs of its stages, and its orders' origin.

The number of microbatches of a job changes (batch ramp-up, evaluation, another batch), so a plan says how the
order is made, not only what it is: by a schedule's name, by a point of the family, or written out for the
plan's own number.
"""

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from quartet_plugin.errors import PlanError
from quartet_plugin.model.schema import record

MAX_STAGES = 4_096
MAX_ACTIONS = 5_000_000
_ACTION = re.compile(
    r"(?:0|[1-9][0-9]{0,4})[FIWB](?:0|[1-9][0-9]{0,5})"
    r"|\((?:0|[1-9][0-9]{0,4})F(?:0|[1-9][0-9]{0,5});(?:0|[1-9][0-9]{0,4})[IB](?:0|[1-9][0-9]{0,5})\)OVERLAP_F_B",
    re.ASCII,
)
# Why no plan holds a schedule with overlapped pairs.
PAIRS_ONLY_SIMULATED = (
    "overlapped pairs can only be simulated: the runtime runs actions one after the other, which hides no "
    "all-to-all, and Megatron's combined 1F1B pairs only inside its own interleaved schedule"
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?", re.ASCII)


@record
class StageProfile:
    """The costs of one microbatch on each stage, in stage order; seconds and bytes.

    `forward_transfer_s[s]` is from stage s to s + 1, `backward_transfer_s[s]` from s to s - 1, 0 where both
    are on one device. `held_fraction` of a stage's activations stays between input and weight gradient.
    `memory_limit_bytes` is for the activations of each device, None for no limit. Times place receives and
    make the family's orders; they never decide whether an order is correct. Raises PlanError.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    forward_transfer_s: tuple[float, ...]
    backward_transfer_s: tuple[float, ...]
    held_fraction: float = 1.0
    memory_limit_bytes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        num_stages = len(self.forward_s)
        for name in PER_STAGE:
            values = getattr(self, name)
            if len(values) != num_stages:
                raise PlanError(
                    f"schedule.custom.profile.{name}: {len(values)} entries; "
                    f"one for each of {num_stages} stages"
                )
            if any(not 0 <= value <= 1e18 for value in values):
                raise PlanError(f"schedule.custom.profile.{name}: must be from 0 to 1e18")
        if not 0 <= self.held_fraction <= 1:
            raise PlanError(
                f"schedule.custom.profile.held_fraction: {self.held_fraction}; must be from 0 to 1"
            )


PER_STAGE = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "backward_s",
    "activation_bytes",
    "forward_transfer_s",
    "backward_transfer_s",
)


@record
class CustomSchedule:
    """A schedule that the plugin's runtime executes.

    `placement[s]` is the pipeline rank of stage s. `orders[d]` are the actions of pipeline rank d as
    `{stage}{F|I|W|B}{microbatch}`, for the plan's own number of microbatches; overlapped pairs of them are
    only there to be predicted. `named` (with `group` where the schedule takes one) or `family`, the
    parameters of a point of the family, make orders for any number; with neither, other numbers get the
    family's plain order. Raises PlanError for a placement that is not legal or a schedule that nothing makes.
    """

    placement: tuple[int, ...]
    profile: StageProfile
    named: str | None = None
    group: int | None = None
    family: Mapping[str, Any] | None = field(default=None, hash=False)
    orders: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        self._check_placement()
        if self.named is not None and (self.family is not None or _NAME.fullmatch(self.named) is None):
            raise PlanError(
                f"schedule.custom.named: {self.named[:40]!r}; must be a schedule's name, without `family`"
            )
        if self.named is None and self.family is None and self.orders is None:
            raise PlanError("schedule.custom: the order is missing; give named, family or orders")
        if self.group is not None and (self.named is None or not 1 <= self.group <= 65_536):
            raise PlanError(
                f"schedule.custom.group: {self.group}; from 1 to 65536, for a named schedule only"
            )
        if self.family is not None and len(self.family) > 32:
            raise PlanError(f"schedule.custom.family: {len(self.family)} parameters; at most 32")
        if self.orders is not None:
            self._check_orders(self.orders)

    @property
    def num_devices(self) -> int:
        """Pipeline ranks."""
        return max(self.placement) + 1

    @property
    def has_pairs(self) -> bool:
        """Whether the order has overlapped pairs, which nothing executes."""
        return any(text.startswith("(") for row in self.orders or () for text in row)

    @property
    def label(self) -> str:
        """How the order is made, for tables."""
        if self.named is not None:
            return self.named if self.group is None else f"{self.named} g{self.group}"
        return "family" if self.orders is None else "searched"

    @property
    def bare(self) -> "CustomSchedule":
        """The same actions without what they were made from; itself where the costs make the family's order.

        Costs also place receives, which changes when a tensor is asked for and not what is computed.
        """
        if self.named is None and self.orders is None:
            return self
        ones: dict[str, Any] = {name: (1.0,) * len(self.placement) for name in PER_STAGE}
        profile = replace(self.profile, **ones, held_fraction=1.0, memory_limit_bytes=None)
        return replace(self, profile=profile, family=None)

    def _check_placement(self) -> None:
        stages = self.placement
        known = range(len(stages))
        if not 2 <= len(stages) <= MAX_STAGES or stages[0] != 0 or any(d not in known for d in stages):
            raise PlanError(
                f"schedule.custom.placement: {len(stages)} stages from {list(stages[:1])}; "
                f"2 to {MAX_STAGES}, stage 0 on pipeline rank 0"
            )
        counts = [stages.count(device) for device in range(max(stages) + 1)]
        if len(set(counts)) != 1:
            raise PlanError(
                f"schedule.custom.placement: {counts[:16]} stages a rank; every rank must hold equally many"
            )
        if len(self.profile.forward_s) != len(stages):
            raise PlanError(
                f"schedule.custom.profile: {len(self.profile.forward_s)} stages; "
                f"the placement has {len(stages)}"
            )
        limits = self.profile.memory_limit_bytes
        if limits is not None and len(limits) != len(counts):
            raise PlanError(
                f"schedule.custom.profile.memory_limit_bytes: {len(limits)} entries; "
                f"one for each of {len(counts)} ranks"
            )

    def _check_orders(self, orders: tuple[tuple[str, ...], ...]) -> None:
        if len(orders) != self.num_devices or sum(map(len, orders)) > MAX_ACTIONS:
            raise PlanError(
                f"schedule.custom.orders: {len(orders)} lists; one for each of {self.num_devices} ranks, "
                f"at most {MAX_ACTIONS} actions in all"
            )
        for device, row in enumerate(orders):
            wrong = next((text for text in row if _ACTION.fullmatch(text) is None), None)
            if wrong is not None:
                raise PlanError(
                    f"schedule.custom.orders[{device}]: {wrong[:40]!r}; "
                    "expected {stage}{F|I|W|B}{microbatch}"
                )
