"""One rank of `quartet probe`: `torchrun ... -m quartet_plugin.probe FINDINGS.json {cpu,cuda} LIMIT_S`.

Rank 0 writes the measurements of all ranks; the command line makes a cluster file of them.
"""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from quartet_plugin.model.cluster import segment_name
from quartet_plugin.model.files import write_json_atomic


def main() -> None:
    """Measure together with the other ranks."""
    output, device, limit_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    import torch
    import torch.distributed as dist

    from quartet_plugin.probe import devices, links
    from quartet_plugin.probe.node_names import node_names
    from quartet_plugin.protocol.node_identity import recorded_boot_id

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    if device == "cuda":
        # An all-reduce through NVLink SHARP is faster than any link: point-to-point transfers never get it.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        backend="nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=limit_s)
    )
    try:
        where = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
        rank = {"host": socket.gethostname(), "machine": recorded_boot_id(), "local_rank": local_rank}
        rank |= devices.describe(where) | devices.place_of_node()
        dist.barrier()
        rank |= devices.measure_rates(where)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, rank)
        for each, name in zip(ranks, node_names(ranks), strict=True):
            each["host"] = name
            del each["machine"]
        measured = links.measure_links(
            where,
            hosts=[rank["host"] for rank in ranks],
            segments=[segment_name(rank.get("topology"), rank.get("topology_pattern")) for rank in ranks],
        )
        if dist.get_rank() == 0:
            content = {"schema_version": 1, "device": device, "ranks": ranks, "links": measured}
            write_json_atomic(output, content)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
