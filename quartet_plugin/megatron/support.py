"""What the Megatron that is here gives, by what a plan needs of it; no release is asked for.

A plan of native flags needs Megatron's parser alone. Measuring wraps functions whose parameters are known.
A custom schedule replaces functions, and needs a known source of each of them.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from quartet_plugin.errors import SeamError
from quartet_plugin.megatron.partition.refusals import argument_refusal
from quartet_plugin.megatron.seams import Seam, known_function, package_roots
from quartet_plugin.megatron.seams.declared import CUSTOM_SCHEDULE, GPT_MODEL_INIT, HYBRID_SEGMENT
from quartet_plugin.model.megatron_arguments import hybrid_pattern
from quartet_plugin.protocol.accepted_sources import accepts, function_text
from quartet_plugin.protocol.environment import ACCEPT_CHANGED_SOURCE
from quartet_plugin.rank.source_tree import KnownFunction, SourceTree

ReadFunction = Callable[[Seam], KnownFunction | None]


def accepts_changed_source(functions: Iterable[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user gives custom schedules back where these functions changed, under the parity gate.

    `functions` are texts of `protocol.accepted_sources`.
    """
    return accepts(environment.get(ACCEPT_CHANGED_SOURCE), functions)


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


def texts_of(read: ReadFunction, seams: Iterable[Seam]) -> dict[str, str]:
    """The functions by path, each as a text of `protocol.accepted_sources` with its source here."""
    return {seam.path: function_text(seam.path, _source(read, seam)) for seam in seams}


def _source(read: ReadFunction, seam: Seam) -> str:
    """The hash of a function's source; empty where there is none that can be read."""
    try:
        function = read(seam)
    except (SeamError, SyntaxError):
        return ""
    return "" if function is None else function.source


def has_known_parameters(*seams: Seam) -> bool:
    """Whether all of these functions are Megatron's own, with the parameters of some known release."""
    try:
        return all(seam.parameters_fault(known_function(seam)) is None for seam in seams)
    except SeamError:
        return False


@cache
def changed_functions(seams: tuple[Seam, ...] = CUSTOM_SCHEDULE) -> Mapping[str, str]:
    """Those of the functions whose source is not a known one, as `texts_of` has them.

    They are read from the files of the Megatron here.
    """
    tree = SourceTree(package_roots())

    def read(seam: Seam) -> KnownFunction | None:
        return tree.function(seam.module, seam.name)

    faults = source_faults(read, seams)
    return texts_of(read, (seam for seam in seams if seam.path in faults))


def changed_for_schedules(args: Namespace) -> Mapping[str, str]:
    """The functions of unknown source that a custom schedule of this job would replace or call."""
    of_pattern = changed_functions((HYBRID_SEGMENT,)) if hybrid_pattern(args) else {}
    return {**changed_functions(), **of_pattern}


def accepted_functions(args: Namespace) -> tuple[str, ...]:
    """The changed functions that the user accepts in this job, as texts of `protocol.accepted_sources`."""
    if not accepts_changed_source(()):
        return ()
    changed = {**changed_for_schedules(args), **changed_functions((GPT_MODEL_INIT,))}
    return tuple(text for text in changed.values() if accepts_changed_source((text,)))


def read_sources() -> None:
    """Compare once what every description of a job asks for: a rank that is forked then has the answers."""
    changed_functions()
    changed_functions((GPT_MODEL_INIT,))


def changed_source_reason(changed: Mapping[str, str]) -> str | None:
    """Why functions of unknown source keep custom schedules off, and what to do; None where they do not.

    `changed` are functions as `changed_functions` has them.
    """
    if not changed or accepts_changed_source(changed.values()):
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
    seams = tuple(seams)
    faults = source_faults(known_function, seams)
    changed = texts_of(known_function, (seam for seam in seams if seam.path in faults))
    if not faults or accepts_changed_source(changed.values()):
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
