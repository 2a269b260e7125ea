"""What autograd saves of a microbatch of real Megatron on CPUs, and its weights, are the memory model's.

With `pytest -s` the bytes of every case are printed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live_cases import two_cores
from quartet_plugin.cost.memory import loss_bytes, peak_memory, weights_of_stages
from quartet_plugin.cost.run import (
    ON_CPU,
    HalfPrecision,
    Software,
    TrainingRun,
    run_of,
    uniform_cluster_of_device,
)
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.layout import Recompute
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.model.tensor_partition import partition_from_label
from tests.cost.live import cpu_run
from tests.megatron import support
from tests.space.jobs import make_layout

pytestmark = pytest.mark.timeout(180)

# What is left out: token, position and target numbers.
_TOLERANCE = 0.01
# The router's own tensors, and lengths of experts' batches, beside these.
_EXPERT_TOLERANCE = 0.02
_LAYERS, _HIDDEN, _HEADS, _SEQ, _VOCAB = 2, 64, 8, 64, 1024
_FLAGS = (
    f"--num-layers {_LAYERS} --hidden-size {_HIDDEN} --num-attention-heads {_HEADS} --seq-length {_SEQ} "
    f"--max-position-embeddings {_SEQ} --vocab-size {_VOCAB} --attention-dropout 0 --hidden-dropout 0 "
    "--lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the test's sizes, by what differs from a GPT."""

    is_gated: bool = False
    is_rotary: bool = False
    has_rms_norms: bool = False
    num_groups: int = _HEADS
    micro_batch: int = 1
    recompute: Recompute = "none"
    precision: HalfPrecision = "fp32"
    mtp_layers: int = 0
    experts: Experts | None = None
    has_whole_experts: bool = False
    latent: LatentAttention | None = None

    @property
    def shape(self) -> ModelShape:
        """The shape that Megatron makes of the flags."""
        return ModelShape(
            num_layers=_LAYERS,
            hidden_size=_HIDDEN,
            ffn_hidden_size=128 if self.is_gated else 4 * _HIDDEN,
            num_attention_heads=_HEADS,
            num_query_groups=self.num_groups,
            kv_channels=_HIDDEN // _HEADS if self.latent is None else self.latent.v_head_dim,
            seq_length=_SEQ,
            vocab_size=_VOCAB,
            max_position_embeddings=_SEQ,
            gated_ffn=self.is_gated,
            tied_embeddings=not self.mtp_layers,
            position_embedding="rope" if self.is_rotary else "learned_absolute",
        )

    @property
    def flags(self) -> str:
        """The flags of Megatron."""
        parts = {
            _FLAGS: True,
            "--swiglu": self.is_gated,
            "--position-embedding-type rope": self.is_rotary,
            "--normalization RMSNorm": self.has_rms_norms,
            f"--group-query-attention --num-query-groups {self.num_groups}": self.num_groups != _HEADS,
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.micro_batch}": True,
            f"--recompute-granularity {self.recompute}": self.recompute != "none",
            "--bf16": self.precision == "bf16",
            f"--untie-embeddings-and-output-weights --mtp-num-layers {self.mtp_layers}": self.mtp_layers > 0,
            self._expert_flags: self.experts is not None,
            "--expert-tensor-parallel-size 1": self.has_whole_experts,
            self._latent_flags: self.latent is not None,
        }
        return " ".join(words for words, is_there in parts.items() if is_there)

    @property
    def _expert_flags(self) -> str:
        if self.experts is None:
            return ""
        shared = self.experts.shared_ffn_hidden_size
        sizes = {
            "--num-experts": self.experts.num_experts,
            "--moe-router-topk": self.experts.experts_per_token,
            "--moe-ffn-hidden-size": self.experts.ffn_hidden_size,
            "--moe-shared-expert-intermediate-size": shared,
            "--moe-router-load-balancing-type": "seq_aux_loss",
            "--moe-aux-loss-coeff": 0.01,
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-router-dtype": "fp32",
        }
        words = [f"{name} {value}" for name, value in sizes.items() if value]
        return " ".join(["--disable-bias-linear", *words])

    @property
    def _latent_flags(self) -> str:
        if self.latent is None:
            return ""
        sizes = {name: getattr(self.latent, name) for name in dump(self.latent)}
        words = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items()]
        return " ".join(["--multi-latent-attention --qk-layernorm", *words])


_LLAMA = Model(is_gated=True, is_rotary=True, has_rms_norms=True, num_groups=4)
MODELS = {
    "gpt": Model(),
    "gated": Model(is_gated=True),
    "rotary": Model(is_rotary=True),
    "rms norms": Model(has_rms_norms=True),
    "groups": Model(num_groups=4),
    "groups, two sequences": Model(num_groups=4, micro_batch=2),
    "one group": Model(num_groups=1),
    "one group, two sequences": Model(num_groups=1, micro_batch=2),
    "one group, rotary": Model(num_groups=1, is_rotary=True),
    "gated, rotary": Model(is_gated=True, is_rotary=True),
    "all": _LLAMA,
    "all, two sequences": replace(_LLAMA, micro_batch=2),
    "all, recomputed scores": replace(_LLAMA, recompute="selective"),
    "groups, recomputed scores": Model(num_groups=4, recompute="selective"),
    "one group, recomputed scores": Model(num_groups=1, recompute="selective"),
    "all, bf16": replace(_LLAMA, precision="bf16"),
    "rotary, two tokens ahead": Model(is_rotary=True, mtp_layers=1),
    "all, two tokens ahead": replace(_LLAMA, mtp_layers=1),
    "all, two tokens ahead, two sequences": replace(_LLAMA, mtp_layers=1, micro_batch=2),
    "all, two tokens ahead, recomputed scores": replace(_LLAMA, mtp_layers=1, recompute="selective"),
    "all, two tokens ahead, bf16": replace(_LLAMA, mtp_layers=1, precision="bf16"),
}
EXPERTS = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=64)
SHARED = replace(EXPERTS, shared_ffn_hidden_size=64)
LATENT = LatentAttention(q_lora_rank=32, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
MODELS |= {
    "gpt, experts": Model(experts=EXPERTS),
    "all, experts": replace(_LLAMA, experts=EXPERTS),
    "all, experts with a shared one": replace(_LLAMA, experts=SHARED),
    "latent": replace(_LLAMA, num_groups=_HEADS, latent=LATENT),
    "latent, experts with a shared one": replace(_LLAMA, num_groups=_HEADS, experts=SHARED, latent=LATENT),
    "all, whole experts with a shared one": replace(_LLAMA, experts=SHARED, has_whole_experts=True),
}
# Four ranks: the layout's label, and whether sequences are split.
LAYOUTS = {"unsplit": ("stock", False), "stock": ("stock", True), "rings": ("rings", True),
           "grid": ("grid", True), "mlp grid": ("attention stock, mlp grid", True)}  # fmt: skip
_EVERY = ("gpt", "all")
SPLIT_CASES = (
    *((model, layout) for model in _EVERY for layout in LAYOUTS),
    *((model, "grid") for model in ("gated", "rotary", "rms norms", "groups", "all, two sequences")),
    ("all, experts with a shared one", "stock"),
    ("all, whole experts with a shared one", "stock"),
)


def measured(folder: Path, cases: list[tuple[str, str]], *, num_processes: int) -> list[tuple[int, int]]:
    """The most bytes saved, and the last rank's parameters, of each (flags, partition's label)."""
    result = folder / "saved.json"
    code, output = support.run_ranks(
        num_processes,
        "tests.cost.saved_tensors_rank",
        str(result),
        json.dumps(cases),
        timeout_s=150,
        log=folder / "log",
    )
    assert code == 0, output[-3000:]
    return [(int(size), int(count)) for size, count in json.loads(result.read_text())]


def run_for(
    model: Model,
    *,
    num_devices: int = 1,
    label: str = "stock",
    is_split: bool = False,
    software: Software = ON_CPU,
) -> TrainingRun:
    """The run of one microbatch of a model."""
    run = run_of(
        model.shape,
        make_layout(
            tensor_parallel=num_devices,
            pipeline_parallel=1,
            micro_batch_size=model.micro_batch,
            sequence_parallel=is_split,
            recompute=model.recompute,
            tensor_partition=partition_from_label(label),
        ),
        global_batch_size=model.micro_batch,
        layers_per_stage=(_LAYERS,),
        cluster=uniform_cluster_of_device(two_cores().device, num_devices=num_devices, devices_per_node=4),
        precision=model.precision,
        software=software,
    )
    normalization = "RMSNorm" if model.has_rms_norms else "LayerNorm"
    return replace(
        run,
        normalization=normalization,
        mtp_layers=model.mtp_layers,
        experts=model.experts,
        has_whole_experts=model.has_whole_experts,
        latent=model.latent,
    )


def predicted(model: Model, **settings: Any) -> float:
    """What the cost model says that autograd saves: activations, and the loss of the one microbatch."""
    run = run_for(model, **settings)
    return peak_memory(run).activations_bytes + loss_bytes(run)


def show(found: Mapping[Any, int], expected: Mapping[Any, float]) -> None:
    """Print bytes saved and predicted, by case."""
    for name, size in found.items():
        error = 100 * (expected[name] / size - 1)
        print(f"{name!s:40} saved {size:9,} predicted {expected[name]:11,.0f} {error:+.2f} %")


def test_one_process_saves_what_is_predicted(tmp_path: Path) -> None:
    cases = [(model.flags, "stock") for model in MODELS.values()]
    counted = dict(zip(MODELS, measured(tmp_path, cases, num_processes=1), strict=True))
    found = {name: size for name, (size, _) in counted.items()}
    expected = {name: predicted(model) for name, model in MODELS.items()}
    show(found, expected)
    for name, model in MODELS.items():
        limit = _TOLERANCE if model.experts is None else _EXPERT_TOLERANCE
        assert expected[name] == pytest.approx(found[name], rel=limit), name
        (weights,) = weights_of_stages(run_for(model))
        assert weights.num_total == pytest.approx(counted[name][1], rel=_TOLERANCE), name


@pytest.mark.parametrize("name", ["gated", "rotary", "rms norms", "groups", "all"])
def test_fused_kernels_are_predicted_to_save_less(name: str) -> None:
    """Only layers of plain operations save the operands of each: elsewhere nothing is added."""
    fused = replace(ON_CPU, plain_operations=False)
    gpt, model = MODELS["gpt"], MODELS[name]
    assert predicted(model, software=fused) < predicted(model) * 0.97
    assert predicted(gpt, software=fused) == pytest.approx(predicted(gpt), rel=_TOLERANCE)
    assert not Software().plain_operations


def test_norms_that_are_not_known_are_those_of_models_with_their_positions() -> None:
    run = cpu_run()
    rotary = replace(run, shape=replace(run.shape, position_embedding="rope"))
    assert (run.has_rms_norms, rotary.has_rms_norms) == (False, True)
    assert not replace(rotary, normalization="LayerNorm").has_rms_norms
    assert replace(run, normalization="RMSNorm").has_rms_norms


def test_ranks_of_every_partition_save_what_is_predicted(tmp_path: Path) -> None:
    """Stock with and without split sequences, rings and grids; with split sequences all save the same.

    Ranks that share an expert save its tokens whole, each of them; ranks with whole experts their own.
    """
    cases = []
    for model, layout in SPLIT_CASES:
        label, is_split = LAYOUTS[layout]
        split = " --sequence-parallel" if is_split else ""
        cases.append((f"{MODELS[model].flags} --tensor-model-parallel-size 4{split}", label))
    sizes = [size for size, _ in measured(tmp_path, cases, num_processes=4)]
    found = dict(zip(SPLIT_CASES, sizes, strict=True))
    expected = {
        (model, layout): predicted(
            MODELS[model], num_devices=4, label=LAYOUTS[layout][0], is_split=LAYOUTS[layout][1]
        )
        for model, layout in SPLIT_CASES
    }
    show(found, expected)
    for model, layout in SPLIT_CASES:
        limit = _TOLERANCE if MODELS[model].experts is None else _EXPERT_TOLERANCE
        assert expected[model, layout] == pytest.approx(found[model, layout], rel=limit), (model, layout)
    for model in _EVERY:
        assert len({found[model, layout] for layout in LAYOUTS if layout != "unsplit"}) == 1
        assert found[model, "grid"] <= 0.75 * found[model, "unsplit"]
