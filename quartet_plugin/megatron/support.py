"""What the Megatron that is here gives, by what a plan needs of it; no release is asked for.

A plan of native flags needs Megatron's parser alone. Measuring wraps functions whose parameters are known.
A custom schedule replaces functions, and needs a known source of each of them.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.partition.refusals import argument_refusal
from quartet_plugin.megatron.seams import Seam, known_function, package_roots
from quartet_plugin.megatron.seams.declared import CUSTOM_SCHEDULE, GPT_MODEL_INIT, HYBRID_SEGMENT
from quartet_plugin.model.megatron_arguments import hybrid_pattern
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.rank.source_tree import KnownFunction, SourceTree

ReadFunction = Callable[[Seam], KnownFunction | None]


def accepts_changed_source(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user gives custom schedules back where functions have changed, under the parity gate."""
    return bool(environment.get(ACCEPT_CHANGED_SOURCE))


def source_faults(read: ReadFunction, seams: Iterable[Seam] = CUSTOM_SCHEDULE) -> dict[str, str]:
    """The functions whose source is not a known one, by path, each with the difference in one line."""
    faults = {}
    for seam in seams:
        try:
            fault = seam.source_fault(read(seam))
        except (SeamError, SyntaxError) as error:
            fault = f"{seam.path}: {error}" if isinstance(error, SyntaxError) else str(error)
        if fault is not None:
            faults[seam.path] = fault
    return faults


def has_known_parameters(*seams: Seam) -> bool:
    """Whether all of these functions are Megatron's own, with the parameters of some known release."""
    try:
        return all(seam.parameters_fault(known_function(seam)) is None for seam in seams)
    except SeamError:
        return False


@cache
def changed_functions(seams: tuple[Seam, ...] = CUSTOM_SCHEDULE) -> tuple[str, ...]:
    """Those of the functions whose source is not a known one, read from the files of the Megatron here."""
    tree = SourceTree(package_roots())
    return tuple(source_faults(lambda seam: tree.function(seam.module, seam.name), seams))


def changed_for_schedules(args: Namespace) -> tuple[str, ...]:
    """The functions of unknown source that a custom schedule of this job would replace or call."""
    of_pattern = changed_functions((HYBRID_SEGMENT,)) if hybrid_pattern(args) else ()
    return (*changed_functions(), *of_pattern)


def read_sources() -> None:
    """Compare once what every description of a job asks for: a rank that is forked then has the answers."""
    changed_functions()
    changed_functions((GPT_MODEL_INIT,))


def changed_source_reason(changed: Sequence[str]) -> str | None:
    """Why functions of unknown source keep custom schedules off, and what to do; None where they do not."""
    if not changed or accepts_changed_source():
        return None
    first, *more = changed
    others = f" and {len(more)} more" if more else ""
    return (
        f"changed source ({first}{others}): `quartet doctor` shows the difference, --accept-changed-source "
        "allows custom schedules under the parity gate"
    )


def require_known_sources(seams: Iterable[Seam] = CUSTOM_SCHEDULE) -> None:
    """Raise SeamError where one of these functions, which would be replaced or called, has an unknown source.

    A user who accepts changed sources gets a SeamError only where a function is missing.
    """
    faults = source_faults(known_function, seams)
    if not faults or accepts_changed_source():
        return
    first, *more = faults.values()
    others = f" (and {len(more)} more)" if more else ""
    raise SeamError(
        f"{first}{others}; native schedules and all other axes work; `quartet doctor` shows the difference, "
        "--accept-changed-source allows custom schedules under the parity gate"
    )


def tensor_partition_reason(args: Namespace) -> str | None:
    """Why the layers of this job are cut in Megatron's own way alone; None where they need not be."""
    return argument_refusal(args) or changed_source_reason(changed_functions((GPT_MODEL_INIT,)))
