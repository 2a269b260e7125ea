"""When the gathers of parameters are started, in a step of three chunks."""

from types import SimpleNamespace
from typing import Any

from quartet_plugin.megatron.runtime.param_gather import ParamGather


class BucketGroup:
    """In place of DDP's: it notes its name when its gather is started."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events
        self.param_gather_dispatched = False

    def start_param_sync(self) -> None:
        """Start the gather."""
        assert not self.param_gather_dispatched
        self.param_gather_dispatched = True
        self.events.append(self.name)


def chunks_of(events: list[str], *, has_hooks: bool) -> list[Any]:
    """Three chunks, of which the first has two bucket groups, the last layers' first, as DDP has them."""
    names = (["0 late", "0 early"], ["1"], ["2"])
    return [
        SimpleNamespace(
            bucket_groups=[BucketGroup(name, events) for name in groups],
            expert_parallel_bucket_groups=[],
            remove_forward_pre_hook_handles={"module": "handle"} if has_hooks else {},
            parameters=lambda number=number: f"parameters of {number}",
        )
        for number, groups in enumerate(names)
    ]


def forwards(gather: ParamGather, events: list[str]) -> list[str]:
    """The events of a step up to the first forward of every chunk."""
    for chunk in range(3):
        gather.before_forward(chunk)
        events.append(f"F{chunk}")
    return events


def test_a_chunk_is_gathered_one_ahead() -> None:
    events: list[str] = []
    chunks = chunks_of(events, has_hooks=True)
    gather = ParamGather(chunks, [events.append] * 3)
    assert forwards(gather, events) == [
        "parameters of 0", "parameters of 1", "F0", "parameters of 2", "F1", "F2",
    ]  # fmt: skip


def test_without_alignment_the_first_groups_are_started_and_hooks_do_the_others() -> None:
    events: list[str] = []
    chunks = chunks_of(events, has_hooks=True)
    # A gather that somebody else has started.
    chunks[2].bucket_groups[0].param_gather_dispatched = True
    assert forwards(ParamGather(chunks, []), events) == ["0 early", "1", "F0", "F1", "F2"]


def test_nothing_is_gathered_where_no_hook_would_wait_for_it() -> None:
    events: list[str] = []
    assert forwards(ParamGather(chunks_of(events, has_hooks=False), []), events) == ["F0", "F1", "F2"]
    # A model without DDP has neither hooks nor groups.
    ParamGather([SimpleNamespace()], [])
