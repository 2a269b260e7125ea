"""Reads the text that `quartet partition show` prints back to its partition."""

import re
from typing import Any

from quartet_plugin.partition.files import partition_from_json
from quartet_plugin.partition.table import Partition, Phase


def partition_from_text(text: str) -> Partition:
    head: dict[str, list[str]] = {}
    homes: dict[str, Any] = {}
    rows: dict[str, list[list[str]]] = {str(phase): [] for phase in Phase}
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] == "step":
            continue
        if words[0] == "home":
            homes[words[1]] = {"parts": int(words[2]), "blocks": words[3:]}
        elif words[0][0] in rows and words[0][1:].isdigit():
            rows[words[0][0]].append(re.split(" {2,}", line.strip())[1:])
        else:
            head[words[0]] = [word for word in words[1:] if word != "-"]
    assert head.keys() == {"partition", "mesh", "pieces", "carried", "kept"}
    return partition_from_json(
        {
            "schema_version": 1,
            "name": head["partition"][0],
            "mesh": list(map(int, head["mesh"])),
            "pieces": dict(zip("MNK", map(int, head["pieces"]), strict=True)),
            "carried": head["carried"],
            "kept": head["kept"],
            "homes": homes,
            "steps": rows,
        }
    )
