"""The steps of the first run, as data: what each of them measures, for how long, and on which devices."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu"]
BOTH: tuple[Device, ...] = ("cuda", "cpu")
GPU: tuple[Device, ...] = ("cuda",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, which runs in a process of its own.

    `holds` says what must come out. The process is ended after `limit_s` seconds. `least_s` are the seconds
    without which it is not begun, on a GPU and on the CPU. A `brief` step is also one of a shortened run.
    """

    name: str
    holds: str
    limit_s: float
    least_s: tuple[float, float]
    devices: tuple[Device, ...] = BOTH
    is_brief: bool = False


# In the order of their worth for their time: what a short window leaves out stands last.
STEPS = (
    Step(
        name="versions",
        holds="torch sees the device; versions of CUDA, NCCL, cuDNN, driver, frameworks",
        limit_s=60,
        least_s=(5, 5),
        is_brief=True,
    ),
    Step(
        name="communicators",
        holds="a batched send and receive with itself; MB that a process group takes at its first use",
        limit_s=60,
        least_s=(10, 10),
        devices=GPU,
    ),
    Step(
        name="events",
        holds="the recorder takes under 1 % of a step; event times agree with the host's within 2 %",
        limit_s=40,
        least_s=(10, 10),
        devices=GPU,
    ),
    Step(
        name="memory",
        holds="four counts of a layer's step: saved tensors, allocated, reserved, outside of torch",
        limit_s=60,
        least_s=(10, 10),
        devices=GPU,
    ),
    Step(
        name="failures",
        holds="every provoked failure has its kind: no memory, a lost peer, two ranks on one device",
        limit_s=180,
        least_s=(20, 30),
        is_brief=True,
    ),
    Step(
        name="parity",
        holds="ZB-H1 on two ranks of one device trains as stock does: fp32, bf16, fp16 with scaling",
        limit_s=180,
        least_s=(60, 120),
    ),
    Step(
        name="layer_times",
        holds="forward and both parts of the backward of every part of the model, in seconds",
        limit_s=150,
        least_s=(30, 60),
        is_brief=True,
    ),
    Step(
        name="several_ranks",
        holds="ZB-V on four ranks of one device, PP 2 x DP 2 with overlapped reductions, trains as stock",
        limit_s=240,
        least_s=(60, 180),
    ),
    Step(
        name="trial",
        holds="one tuning run of two plans ends with a report, on the device and not on the CPU's",
        limit_s=180,
        least_s=(60, 150),
    ),
)
