"""The keys of the family: one vector of parameters becomes offsets of stages and progress of microbatches."""

from quartet_plugin.model.costs import FloatArray, IntArray
from quartet_plugin.schedule.kernel import compiled

# Scalars in a vector of parameters, after the 4 v numbers of the chunks.
W_GAP, GROUP, SLACK, MEMORY_CAP, W_LIMIT, W_FILL, PATIENCE = range(7)
NUM_SCALARS = 7


@compiled
def fill_keys(
    params: FloatArray,
    whole: IntArray,
    chunk: IntArray,
    cost: FloatArray,
    send: FloatArray,
    beat: float,
    forward_key: FloatArray,
    backward_key: FloatArray,
    progress: FloatArray,
) -> None:
    """Fill offsets of F and I [stages] and the progress of microbatches, in microbatches.

    A vector of parameters for v chunks: stretch_forward, stretch_backward, shift_forward, shift_backward
    [v each], then w_gap, group, slack, memory_cap, w_limit, w_fill, patience, as `family.Family` explains.
    `beat`: the busiest device's seconds a microbatch.
    """
    num_stages = len(chunk)
    v = (len(params) - NUM_SCALARS) // 4
    reached = 0.0
    for stage in range(num_stages):
        c = chunk[stage]
        forward_key[stage] = reached / beat + params[2 * v + c]
        reached += (cost[0, stage] + send[0, stage]) * params[c]
    returned = 0.0
    for stage in range(num_stages - 1, -1, -1):
        c = chunk[stage]
        backward_key[stage] = (reached + returned) / beat + params[3 * v + c]
        own = cost[3, stage] if whole[stage] else cost[1, stage]
        returned += (own + send[1, stage]) * params[v + c]
    group = max(1, int(params[4 * v + GROUP]))
    for i in range(len(progress)):
        progress[i] = i // group * group + i % group / (v if group > 1 else 1.0)
