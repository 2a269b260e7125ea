"""Interleaved 1F1B with overlapped pairs is the order of Megatron's own combined 1F1B."""

from types import SimpleNamespace

import pytest

from quartet_plugin.schedule.named import named

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("p", "m", "v", "group"),
    [(2, 4, 2, 2), (4, 8, 2, 4), (4, 8, 3, 4), (4, 16, 2, 8), (3, 9, 2, 3), (4, 4, 2, 4), (8, 16, 4, 8)],
)
def test_every_device_has_megatrons_order(p: int, m: int, v: int, group: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    schedule = named(
        "interleaved", num_devices=p, num_microbatches=m, num_chunks=v, group=group, with_pairs=True
    )
    table = get_schedule_table(m, v, group)
    for device in range(p):
        ranks = SimpleNamespace(size=lambda: p, rank=lambda device=device: device)
        total, _, warm, steady = get_pp_rank_microbatches(
            m,
            v,
            group,
            overlap_moe_expert_parallel_comm=True,
            p2p_communicator=SimpleNamespace(pp_group=ranks, virtual_pipeline_model_parallel_size=v),
        )
        forward = [f"{chunk * p + device}F{i}" for i, chunk in table]
        backward = [f"{(v - 1 - chunk) * p + device}B{i}" for i, chunk in table]
        expected = forward[:warm]
        expected += [f"({forward[warm + k]};{backward[k]})OVERLAP_F_B" for k in range(steady)]
        expected += backward[steady:total]
        assert [str(entry) for entry in schedule.entries(device)] == expected
