"""The runs of `live_accuracy.py`: those that calibrate, and those that are predicted from them alone.

No predicted run has the shape of a calibrating run; all have another split or number of microbatches, too.
GPipe and ZB-V are only predicted. The calibrating shapes are the corners: few and many tokens, narrow and
wide layers, small and large vocabularies, so that every term is large somewhere.
"""

import shlex
from dataclasses import dataclass
from typing import Literal

from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.run import (
    ON_CPU,
    ScheduleKind,
    TrainingRun,
    UniformCluster,
    run_of,
    uniform_cluster_of_device,
)
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.shape import ModelShape

Role = Literal["calibrate", "predict"]
Schedule = Literal["stock", "zb-h1", "zb-v", "gpipe", "interleaved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model: layers, hidden size, heads, sequence and vocabulary."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of two processes. `split`: transformer layers a stage, by stage order."""

    size: Size
    how: Literal["pp2", "tp2", "dp2"] = "pp2"
    split: tuple[int, ...] = ()
    schedule: Schedule = "stock"
    micro_batch: int = 2
    num_microbatches: int = 8
    role: Role = "predict"

    @property
    def name(self) -> str:
        """The run's key in the results."""
        size = self.size
        split = "+".join(map(str, self.layers_per_stage))
        return (
            f"L{size.layers} h{size.hidden} a{size.heads} s{size.seq} v{size.vocab} {self.how} {split} "
            f"{self.schedule} mb{self.micro_batch} m{self.num_microbatches}"
        )

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of each stage."""
        if self.split:
            return self.split
        return (self.size.layers // 2,) * 2 if self.how == "pp2" else (self.size.layers,)

    @property
    def is_custom(self) -> bool:
        """Whether the plugin's runtime executes the schedule."""
        return self.schedule not in ("stock", "interleaved")

    @property
    def chunks(self) -> int:
        """Stages a pipeline rank."""
        return len(self.layers_per_stage) // 2 if self.how == "pp2" else 1

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return (0, 1, 1, 0) if self.schedule == "zb-v" else (0, 1) * self.chunks

    @property
    def flags(self) -> list[str]:
        """Megatron's flags."""
        size = self.size
        copies = 2 if self.how == "dp2" else 1
        words = (
            f"--num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads {size.heads} "
            f"--seq-length {size.seq} --max-position-embeddings {size.seq} --vocab-size {size.vocab - 1} "
            f"--micro-batch-size {self.micro_batch} "
            f"--global-batch-size {self.micro_batch * self.num_microbatches * copies} "
            "--mock-data --tokenizer-type NullTokenizer --train-iters 1000 --lr 1e-4 --min-lr 1e-5 "
            "--lr-decay-style cosine --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 "
            "--log-interval 100000 --eval-interval 1000000 --eval-iters 0 "
        )
        if self.how == "tp2":
            words += "--tensor-model-parallel-size 2"
        if self.how == "pp2":
            stages = "|".join("t" * count for count in self.layers_per_stage)
            words += f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E{stages}L"
        return shlex.split(words)

    def run(self, cluster: UniformCluster) -> TrainingRun:
        """The case as a training run of the cost model."""
        size = self.size
        kinds = {"zb-h1": ScheduleKind.ZB_H1, "zb-v": ScheduleKind.ZB_V, "gpipe": ScheduleKind.GPIPE}
        return run_of(
            ModelShape(
                num_layers=size.layers,
                hidden_size=size.hidden,
                ffn_hidden_size=4 * size.hidden,
                num_attention_heads=size.heads,
                num_query_groups=size.heads,
                kv_channels=size.hidden // size.heads,
                seq_length=size.seq,
                vocab_size=size.vocab,
                max_position_embeddings=size.seq,
                gated_ffn=False,
                tied_embeddings=True,
                position_embedding="learned_absolute",
            ),
            Layout(
                tensor_parallel=2 if self.how == "tp2" else 1,
                pipeline_parallel=2 if self.how == "pp2" else 1,
                data_parallel=2 if self.how == "dp2" else 1,
                virtual_stages=self.chunks,
                context_parallel=1,
                expert_parallel=1,
                micro_batch_size=self.micro_batch,
                sequence_parallel=False,
                distributed_optimizer=False,
                recompute="none",
            ),
            global_batch_size=self.micro_batch * self.num_microbatches * (2 if self.how == "dp2" else 1),
            layers_per_stage=self.layers_per_stage,
            cluster=cluster,
            schedule=kinds.get(self.schedule),
            precision="fp32",
            software=ON_CPU,
        )


def two_cores(*, flops: float = 5e10, memory: float = 1e10, link: float = 2e9) -> UniformCluster:
    """Two processes on one machine; the defaults are only where the calibration starts."""
    device = DeviceSpec(
        schema_version=1,
        name="a processor core",
        generation="cpu",
        peak_flops={"fp32": flops},
        matmul_ceiling={"fp32": 1.0},
        memory_bytes=8 * 2**30,
        memory_bandwidth_bytes_per_s=memory,
        scale_up_bandwidth_bytes_per_s=link,
        scale_up_topology="switch",
        scale_up_devices=2,
        scale_out_bandwidth_bytes_per_s=link,
        devices_per_node=2,
        compute_units=1,
        source="the benchmark's own",
    )
    return uniform_cluster_of_device(device, num_devices=2)


_A = Size(layers=8, hidden=256, heads=4, seq=64, vocab=4096)
_B = Size(layers=6, hidden=384, heads=6, seq=64, vocab=6144)
_C = Size(layers=8, hidden=128, heads=4, seq=128, vocab=4096)
_D = Size(layers=4, hidden=256, heads=8, seq=128, vocab=12288)
_E = Size(layers=12, hidden=192, heads=6, seq=48, vocab=2048)
_F = Size(layers=4, hidden=512, heads=8, seq=48, vocab=3072)
_G = Size(layers=12, hidden=96, heads=2, seq=32, vocab=1536)


def _cases(size: Size, role: Role, *runs: str) -> tuple[Case, ...]:
    """Each run in words: `pp2 4+2 zb-h1 mb2 m4`; the split and the stock schedule may be left out."""
    cases = []
    for words in runs:
        how, *rest = words.split()
        split = tuple(int(count) for word in rest if "+" in word for count in word.split("+"))
        named = [word for word in rest if "+" not in word and not word.startswith("m")]
        sizes = {word.rstrip("0123456789"): int(word.lstrip("mb")) for word in rest if word.startswith("m")}
        cases.append(
            Case(
                size=size,
                how=how,  # type: ignore[arg-type]
                split=split,
                schedule=named[0] if named else "stock",  # type: ignore[arg-type]
                micro_batch=sizes["mb"],
                num_microbatches=sizes["m"],
                role=role,
            )
        )
    return tuple(cases)


CALIBRATING = (
    *_cases(_A, "calibrate", "pp2 mb2 m4", "pp2 mb1 m10", "tp2 mb2 m3", "dp2 mb2 m2"),
    *_cases(_B, "calibrate", "pp2 4+2 mb2 m3", "dp2 mb1 m1"),
    *_cases(_C, "calibrate", "pp2 2+2+2+2 interleaved mb2 m6", "tp2 mb1 m3"),
    *_cases(_D, "calibrate", "pp2 3+1 zb-h1 mb1 m6", "tp2 mb2 m2"),
    *_cases(_E, "calibrate", "pp2 zb-h1 mb2 m4", "dp2 mb4 m3"),
    *_cases(_F, "calibrate", "pp2 mb1 m6", "tp2 mb1 m3"),
    *_cases(_G, "calibrate", "pp2 mb1 m8", "dp2 mb4 m4"),
)

_P = Size(layers=8, hidden=288, heads=6, seq=80, vocab=3584)
_Q = Size(layers=6, hidden=336, heads=6, seq=64, vocab=7168)
_R = Size(layers=10, hidden=160, heads=4, seq=96, vocab=8192)
_S = Size(layers=4, hidden=416, heads=8, seq=56, vocab=5120)
_T = Size(layers=14, hidden=128, heads=2, seq=64, vocab=2560)
_U = Size(layers=8, hidden=224, heads=4, seq=112, vocab=6144)

PREDICTED = (
    *_cases(
        _P, "predict", "pp2 mb1 m6", "pp2 5+3 mb2 m3", "pp2 zb-h1 mb1 m5", "tp2 mb1 m2", "dp2 mb1 m2",
        "pp2 2+2+2+2 interleaved mb1 m4",
    ),
    *_cases(
        _Q, "predict", "pp2 mb2 m5", "pp2 4+2 mb1 m8", "pp2 1+2+2+1 zb-v mb1 m6", "tp2 mb1 m4", "dp2 mb2 m2",
        "pp2 4+2 gpipe mb1 m4",
    ),
    *_cases(
        _R, "predict", "pp2 6+4 mb2 m3", "pp2 mb1 m9", "pp2 6+4 zb-h1 mb2 m3", "tp2 mb2 m2", "dp2 mb2 m3",
        "pp2 3+3+2+2 interleaved mb1 m6",
    ),
    *_cases(_S, "predict", "pp2 mb2 m5", "pp2 3+1 mb1 m7", "pp2 gpipe mb2 m3", "tp2 mb2 m4", "dp2 mb4 m1"),
    *_cases(
        _T, "predict", "pp2 mb2 m6", "pp2 8+6 mb1 m12", "pp2 3+4+4+3 zb-v mb2 m4", "tp2 mb4 m2", "dp2 mb2 m4"
    ),
    *_cases(_U, "predict", "pp2 mb2 m2", "pp2 5+3 mb1 m6", "pp2 zb-h1 mb1 m7", "tp2 mb1 m3", "dp2 mb1 m5"),
)  # fmt: skip

# Under a custom schedule a backward is not a layer's: only Megatron's schedules are profiled.
PROFILED = tuple(case for case in CALIBRATING if not case.is_custom)
CASES = {case.name: case for case in (*CALIBRATING, *PREDICTED)}
