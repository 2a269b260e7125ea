"""The backend of a tuning run: the protocol for running plans, and its implementation with processes."""

import contextlib
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from quartet_plugin.errors import ConfigError, InterruptedByUserError, QuartetError
from quartet_plugin.launchers.command import Command
from quartet_plugin.launchers.device_slices import DeviceSlice, SliceLauncher
from quartet_plugin.launchers.local import LocalLauncher, free_port
from quartet_plugin.launchers.protocol import Launcher, NodesLauncher
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.model.plan import CoreGroup, NodeInfo, Plan
from quartet_plugin.model.receipt import Receipt
from quartet_plugin.protocol.rank_files import CoreLimit, RankReport, num_cores_of
from quartet_plugin.trial.compared_start import ComparedSteps
from quartet_plugin.trial.devices import DeviceGuard
from quartet_plugin.trial.request import MIN_FREE_BYTES, Device, Outcome, Progress, TrialRequest, TrialResult

if TYPE_CHECKING:
    from quartet_plugin.trial.node_speed import NodeSpeed
    from quartet_plugin.trial.parity import ParityGate

# What a trial can end as and stay so; everything else is launched again by a resumed run.
SETTLED = frozenset({Outcome.OK, Outcome.UNSTABLE, Outcome.INFEASIBLE, Outcome.WRONG, Outcome.NOT_AS_PLANNED})

ShouldStop = Callable[[], bool]

# Of a checkpoint of weights alone, in full precision, with room for its files.
_BYTES_A_PARAMETER = 5
# Local ranks that an error lists.
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCheck:
    """A plan for the parity gate; its runs go to `folder`, the weights that they start from to `weights`."""

    plan: Plan
    command: Command
    folder: Path
    weights: Path
    device: Device
    deadline_s: float
    cwd: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTrial:
    """A plan's trial after the parity gate has compared its first iterations.

    `receipt` is None where that could not be; `result` is a trial's that is not measured where the plan does
    not train as stock does. `steps` are what the ranks wrote.
    """

    receipt: Receipt | None
    result: TrialResult
    steps: ComparedSteps


class TrialBackend(Protocol):
    """Runs plans, and knows the plans that have already run."""

    def recover(self, folder: Path, *, should_stop: ShouldStop, skip: Collection[Path] = ()) -> None:
        """See to their end what an earlier process started below `folder`; `skip` trials are another's."""

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """The settled result of this plan in a trial's folder."""

    def supersede(self, folder: Path) -> bool:
        """Let no measurement in a trial's folder count from now on; returns whether one did. All files stay.

        A result that is not measured, such as a plan that does not fit, counts on.
        """

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """Launch a plan and measure it."""

    def check(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> Receipt:
        """Compare a plan with stock. Raises what `ParityGate.check` does, and InterruptedByUserError."""

    def adopt(self, request: ParityCheck, result: TrialResult, *, should_stop: ShouldStop) -> ComparedSteps:
        """Let trial 0, whose first iterations are compared, be the reference of the parity gate."""

    def compare(
        self,
        request: ParityCheck,
        result: TrialResult,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> ComparedTrial:
        """Compare the first iterations of a measured trial with trial 0's. Raises what `check` does."""

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """The nodes and slots a measured trial ran on."""

    def node_speeds(self, result: TrialResult) -> "tuple[NodeSpeed, ...]":
        """The speeds of the nodes that a measured trial ran on; those that its ranks have timed."""

    def modules(self, result: TrialResult) -> tuple[str, ...] | None:
        """The classes of the modules that a measured trial ran; None where its ranks do not say."""


class LocalBackend:
    """Runs plans with `trial.runner` on this machine or on a slice of it, or on the nodes of a launcher.

    One parity gate, of one command, serves a study. With `warm_starts` its processes are forked from a trial
    server where they can be; `close` ends it. `fence` is called before a trial's files are written.
    """

    def __init__(
        self,
        *,
        device_slice: DeviceSlice | None = None,
        warm_starts: bool = False,
        nodes_launcher: NodesLauncher | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self._slice = device_slice
        self._fence = fence
        self._launcher: Launcher
        if nodes_launcher is not None:
            self._launcher = nodes_launcher
        else:
            cold = LocalLauncher() if device_slice is None else SliceLauncher(device_slice)
            self._launcher = WarmLauncher(cold) if warm_starts else cold
        self._devices = DeviceGuard(shown=None if device_slice is None else device_slice.environment)
        self._gate: ParityGate | None = None

    def close(self) -> None:
        """End the trial server, if there is one."""
        if isinstance(self._launcher, WarmLauncher):
            self._launcher.close()

    def __enter__(self) -> Self:
        """Enter the block without a trial server: the first warm start makes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the trial server."""
        self.close()

    def recover(self, folder: Path, *, should_stop: ShouldStop, skip: Collection[Path] = ()) -> None:
        """See `TrialBackend`."""
        from quartet_plugin.trial.recover import recover

        if folder.is_dir():
            recover(folder, stop=should_stop, skip=skip)

    def recorded(self, folder: Path, *, plan_key: str | None) -> TrialResult | None:
        """See `TrialBackend`."""
        from quartet_plugin.trial.attempt import PREFIX, attempt_number

        # A file that breaks its format is worth nothing: the plan is launched again, in a new folder.
        for attempt in sorted(folder.glob(f"{PREFIX}*"), key=attempt_number, reverse=True):
            result = read_judged(attempt)
            if result is None or result.is_superseded:
                continue
            if result.plan_key == plan_key and result.outcome in SETTLED:
                return result
        return None

    def supersede(self, folder: Path) -> bool:
        """See `TrialBackend`."""
        from quartet_plugin.trial.attempt import PREFIX, supersede_result

        results = [read_judged(attempt) for attempt in folder.glob(f"{PREFIX}*")]
        counting = [
            result for result in results if result and result.is_measured and not result.is_superseded
        ]
        for result in counting:
            supersede_result(result)
        return bool(counting)

    def run(
        self, request: TrialRequest, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> TrialResult:
        """See `TrialBackend`."""
        from quartet_plugin.trial.runner import run_trial

        return _judged(
            run_trial(
                request,
                launcher=self._launcher,
                devices=self._devices,
                on_progress=on_progress,
                stop=should_stop,
                pick_port=free_port if self._slice is None else self._slice.free_port,
                is_subreaper=True,
                fence=self._fence,
            )
        )

    def check(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> Receipt:
        """See `TrialBackend`. A plan that passes has left records of its own schedule's actions."""
        _check_disk(request)
        gate = self._gate_of(request, on_progress=on_progress, should_stop=should_stop)
        with _interruptible(should_stop):
            return gate.check(request.plan)

    def adopt(self, request: ParityCheck, result: TrialResult, *, should_stop: ShouldStop) -> ComparedSteps:
        """See `TrialBackend`."""
        from quartet_plugin.trial.compared_start import read_compared_steps

        compared = read_compared_steps(result)
        if compared.unavailable is None and any(
            math.isnan(value) for step in compared.steps for value in (step.loss, step.grad_norm)
        ):
            compared = ComparedSteps(unavailable="trial 0 reported no loss or gradient norm")
        if compared.unavailable is None:
            gate = self._gate_of(request, on_progress=lambda _: None, should_stop=should_stop)
            gate.adopt_trial(result, compared.steps)
        return compared

    def compare(
        self,
        request: ParityCheck,
        result: TrialResult,
        *,
        on_progress: Callable[[Progress], None],
        should_stop: ShouldStop,
    ) -> ComparedTrial:
        """See `TrialBackend`."""
        from quartet_plugin.trial.attempt import refuse_result
        from quartet_plugin.trial.compared_start import read_compared_steps

        compared = read_compared_steps(result)
        if compared.unavailable is not None:
            return ComparedTrial(receipt=None, result=result, steps=compared)
        gate = self._gate_of(request, on_progress=on_progress, should_stop=should_stop)
        with _interruptible(should_stop):
            receipt = gate.compare_trial(request.plan, result, compared.steps)
        if receipt.failure is not None:
            result = refuse_result(result, receipt.failure.reason)
        return ComparedTrial(receipt=receipt, result=result, steps=compared)

    def _gate_of(
        self, request: ParityCheck, *, on_progress: Callable[[Progress], None], should_stop: ShouldStop
    ) -> "ParityGate":
        """The gate of the study's command."""
        from quartet_plugin.trial.parity import ParityGate

        if self._gate is None:
            self._gate = ParityGate(
                command=request.command,
                folder=request.folder,
                weights=request.weights,
                device=request.device,
                deadline_s=request.deadline_s,
                launcher=self._launcher,
                devices=self._devices,
                stop=should_stop,
                cwd=request.cwd,
                fence=self._fence,
            )
        self._gate.on_progress = lambda _, progress: on_progress(progress)
        return self._gate

    def nodes(self, result: TrialResult) -> tuple[NodeInfo, ...]:
        """See `TrialBackend`."""
        return nodes_of(result.rank_files().reports.values())

    def node_speeds(self, result: TrialResult) -> "tuple[NodeSpeed, ...]":
        """See `TrialBackend`."""
        from quartet_plugin.trial.node_speed import node_speeds

        return node_speeds(result.rank_files().reports.values())

    def modules(self, result: TrialResult) -> tuple[str, ...] | None:
        """See `TrialBackend`."""
        from quartet_plugin.trial.as_planned import ran_modules

        return ran_modules(result.rank_files().reports.values())


def trial_weights(weights: Path) -> Path:
    """The folder in which trial 0 keeps its weights, where the gate looks for those of the command."""
    return weights / "stock"


@contextlib.contextmanager
def _interruptible(should_stop: ShouldStop) -> Iterator[None]:
    """Turn the end of a check that the user has asked for into its own error."""
    try:
        yield
    except KeyboardInterrupt:
        if not should_stop():
            raise
        raise InterruptedByUserError(
            "stopped in a parity check; all measurements are kept: the same command with --resume continues"
        ) from None


def read_judged(attempt: Path) -> TrialResult | None:
    """The result in an attempt's folder as the search takes it; None where there is none that can be read."""
    from quartet_plugin.trial.attempt import read_result

    with contextlib.suppress(QuartetError):
        result = read_result(attempt)
        return None if result is None else _judged(result)
    return None


def _check_disk(request: ParityCheck) -> None:
    """Raise ParityUnavailableError where the weights do not fit on the disk beside what a trial needs."""
    from quartet_plugin.trial.parity import ParityUnavailableError

    needed = MIN_FREE_BYTES + _BYTES_A_PARAMETER * request.plan.shape.num_parameters
    place = next(path for path in (request.folder, *request.folder.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ParityUnavailableError(
            f"{place}: {free >> 20} MiB free; the initial weights of both runs need {needed >> 20} MiB; "
            "free disk space"
        )


def _judged(result: TrialResult) -> TrialResult:
    """Treat a plan that the adapter refuses for this command as infeasible, not as an error of the plugin."""
    if result.outcome is not Outcome.HARNESS or result.plan_key is None:
        return result
    kinds = {err.kind for err in result.rank_files().errs.values() if err.kind != "network"}
    return replace(result, outcome=Outcome.INFEASIBLE) if kinds == {"plan"} else result


def nodes_of(reports: Iterable[RankReport]) -> tuple[NodeInfo, ...]:
    """The nodes that ranks ran on, in the launcher's order of ranks.

    Raises ConfigError where a host name does not have each local rank from 0 on once. Mappings and speeds
    know a node by its host name: nodes that share it could change places unseen.
    """
    by_host: dict[str, list[RankReport]] = {}
    for report in sorted(reports, key=lambda report: report.launch_rank):
        by_host.setdefault(report.host, []).append(report)
    for host, ranks in by_host.items():
        local_ranks = sorted(report.local_rank for report in ranks)
        if local_ranks != list(range(len(ranks))):
            shown = ", ".join(map(str, local_ranks[:_MAX_SHOWN]))
            more = ", ..." if len(ranks) > _MAX_SHOWN else ""
            raise ConfigError(
                f"host {host}: local ranks {shown}{more}; must be 0 to {len(ranks) - 1}, each once, because "
                "nodes are distinguished by their host names: give every node or container its own "
                "(docker run --hostname NAME), and let the launcher count LOCAL_RANK on each"
            )
    return tuple(
        NodeInfo(
            host=host,
            node_class=f"{ranks[0].device} x{len(ranks)}",
            num_slots=len(ranks),
            crowds=_core_groups(ranks),
            network_namespaces=_network_namespaces(ranks),
        )
        for host, ranks in by_host.items()
    )


def _network_namespaces(reports: Sequence[RankReport]) -> tuple[tuple[int, ...], ...] | None:
    """The local ranks of each network namespace; None where a host has one, or where a rank names none."""
    by_namespace: dict[int, list[int]] = {}
    for report in sorted(reports, key=lambda report: report.local_rank):
        if report.network_namespace is None:
            return None
        by_namespace.setdefault(report.network_namespace, []).append(report.local_rank)
    return tuple(map(tuple, by_namespace.values())) if len(by_namespace) > 1 else None


def _core_groups(reports: Sequence[RankReport]) -> tuple[CoreGroup, ...] | None:
    """Groups of one host's ranks that share fewer cores than they have members; None without one.

    No rank is in two groups. Ranks of one control group share the cores of its limit. Other ranks that may
    use the same cores share these, unless the limits of all of them fit on these cores together.
    """
    by_limit: dict[CoreLimit, list[RankReport]] = {}
    by_cores: dict[tuple[int, ...], list[RankReport]] = {}
    for report in reports:
        if report.cores and report.core_limit is not None:
            by_limit.setdefault(report.core_limit, []).append(report)
    of_limits = (_core_group_of(ranks, num_cores=num_cores_of(ranks)) for ranks in by_limit.values())
    groups = [group for group in of_limits if group is not None]
    limited = {local for group in groups for local in group.locals}
    for report in reports:
        if report.cores and report.local_rank not in limited:
            by_cores.setdefault(report.cores, []).append(report)
    for cores, ranks in sorted(by_cores.items()):
        group = None if _fit_on(len(cores), ranks) else _core_group_of(ranks, num_cores=len(cores))
        groups += [] if group is None else [group]
    return tuple(groups) or None


def _core_group_of(ranks: Sequence[RankReport], *, num_cores: int) -> CoreGroup | None:
    if len(ranks) <= num_cores:
        return None
    return CoreGroup(locals=tuple(sorted(rank.local_rank for rank in ranks)), num_cores=num_cores)


def _fit_on(num_cores: int, ranks: Sequence[RankReport]) -> bool:
    """Whether all of the ranks have limits, which together leave them no more than these cores."""
    limits = {rank.core_limit for rank in ranks}
    # Shares of a core are rounded: three thirds may be a little more than one.
    most = num_cores + 1e-6
    return None not in limits and sum(limit.num_cores for limit in limits if limit is not None) <= most
