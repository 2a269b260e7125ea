"""The record of execution: what a rank of a trial did, as opposed to what it was asked to do."""

import hashlib
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Literal

from quartet_plugin.model.layout import SettingValue
from quartet_plugin.model.schema import ADDED, Length, Matches, record
from quartet_plugin.protocol.attempt_files import Count, Name, Rank

# A schedule that the plugin's runtime executes, action by action.
PROGRAM: Literal["program"] = "program"
RanSchedule = Literal["no-pipelining", "1f1b", "interleaved", "program", "other"]
_Digest = Annotated[str, Matches(pattern=r"[0-9a-f]{64}")]


@record
class BuiltStage:
    """A chunk of the model as a rank built it: its layers, of which the first counts from 0, and its ends.

    `mtp_layers` predict further tokens, beside its layers; None where it has none.
    """

    first_layer: Count
    num_layers: Count
    has_embedding: bool
    has_head: bool
    mtp_layers: Count | None = field(default=None, metadata=ADDED)


@record
class ExecutedActions:
    """The actions that the runtime executed on a device: the digest of those of the last training step.

    `num_steps` training steps ran. `num_full_backwards` and `num_split_backwards` are of all of them; a
    backward counts as split where its W computed a gradient that its I had left out.
    """

    digest: _Digest
    num_steps: Count
    num_full_backwards: Count
    num_split_backwards: Count


@record
class PipelineEnds:
    """The pipeline ranks that the framework itself names for the ends of the pipeline.

    `embedding_devices` share the gradients of the word embeddings, empty on ranks outside of them. `is_last`
    is what the framework answers where it asks whether this rank holds the last stage. `tied_copies_agree` is
    whether a rank with both ends has equal copies of a tied weight, None without two copies.
    """

    last_device: Rank
    is_last: bool
    embedding_devices: Annotated[tuple[Rank, ...], Length(most=65_536)]
    tied_copies_agree: bool | None


@record
class Execution:
    """What one rank did. `position` is its RANK in the framework's own groups.

    `schedule` is the function that ran the microbatches; `actions` are there where it was the plugin's
    runtime. `stages` are the chunks as built, in order; empty where the model has no list of layers. `knobs`
    are the values of the knobs in the parts that were built. `modules` are the classes of the modules whose
    forward ran in the first step. `ends` and `modules` are None where the adapter does not read them.
    `ramps_batch`: the number of microbatches grows while the job trains.
    """

    schedule: RanSchedule
    position: Rank
    pipeline_rank: Rank
    num_microbatches: Count
    stages: Annotated[tuple[BuiltStage, ...], Length(most=65_536)]
    knobs: Annotated[dict[Name, SettingValue], Length(most=1_000)]
    actions: ExecutedActions | None
    ends: PipelineEnds | None
    modules: Annotated[tuple[Name, ...], Length(most=10_000)] | None
    ramps_batch: bool | None = field(default=None, metadata=ADDED)


def digest_of_actions(actions: Iterable[object]) -> str:
    """The digest of a device's actions in order, each as text: `0F0`, `0I0`, `0W0`, `0B0`."""
    return hashlib.sha256(" ".join(map(str, actions)).encode("ascii")).hexdigest()
