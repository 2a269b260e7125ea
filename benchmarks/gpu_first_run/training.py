"""Steps that train: the plugin's own commands on a small GPT, several ranks on one device.

NCCL refuses two ranks on one GPU, so that they meet over gloo and boundary tensors go through host memory.
"""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quartet_plugin.launchers.megatron_words import read_arguments
from quartet_plugin.model.megatron_arguments import layout_of, precision_of, schedule_of, shape_of, split_of
from quartet_plugin.model.plan import NodeInfo, Plan, ScheduleChoice, Split, write_plan
from quartet_plugin.model.receipt import receipt_path
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.space.schedules import custom_order

Keep = Callable[[dict[str, Any]], None]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("one_device.py")
_QUARTET = (sys.executable, "-c", "from quartet_plugin.cli.main import entry; entry()")
# Plain torch's layers: neither Apex nor Transformer Engine is needed.
_COMMON = shlex.split("""
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1023 --train-iters 1000 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style cosine --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --log-interval 1000
    --eval-interval 1000 --eval-iters 0 --num-workers 0 --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-rope-fusion
""")
_SIZE = {
    "cuda": shlex.split("""
        --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
        --max-position-embeddings 512
    """),
    "cpu": shlex.split("""
        --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    """),
}
_PRECISIONS = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16", "--initial-loss-scale", "4096"]}
# A tenth of 70B's layers, as one of 64 ranks has them under TP 8 and PP 8.
_STAGE_70B = shlex.split("""
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096
    --max-position-embeddings 4096 --bf16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --micro-batch-size 1 --global-batch-size 8
""")
_TUNING = {
    "run": "first",
    "search": {"schedule": ["1f1b", "zb-h1"], "pipeline_parallel": 2, "tensor_parallel": 1},
    "trial": {"warmup": 1, "measure": 3, "deadline_s": 120, "crop": "none"},
    "study": {"trials": 2, "top_k": 1, "rounds": 3},
}
_MAX_LINE = 300
_END_S = 15.0


def parity(device: str, folder: Path, keep: Keep) -> None:
    """ZB-H1 on two ranks against stock 1F1B, in each precision; on the CPU in fp32 alone."""
    words = [*_SIZE[device], *_COMMON, *batch(2, 8)]
    precisions = _PRECISIONS if device == "cuda" else {"fp32": _PRECISIONS["fp32"]}

    def check(name: str) -> tuple[str, dict[str, Any]]:
        return name, _check("zb-h1", [*words, *_PRECISIONS[name]], 2, device=device, place=folder / name)

    # Each takes a few cores and little of the device, and parity needs no quiet machine.
    with ThreadPoolExecutor(len(precisions)) as pool:
        for name, found in pool.map(check, precisions):
            faults = [f"{name}: {fault}" for fault in found.pop("faults")]
            keep({name: found, "faults": faults})


def several_ranks(device: str, folder: Path, keep: Keep) -> None:
    """ZB-V on PP 2 x DP 2 with overlapped reductions."""
    overlap = ["--overlap-grad-reduce", "--bf16"]
    words = [*_SIZE[device], *_COMMON, *batch(2, 16), *overlap]
    keep(_check("zb-v", words, 4, device=device, place=folder))


def layer_times(device: str, folder: Path, keep: Keep) -> None:
    """`quartet profile` of a small GPT; on a GPU also of one rank of 70B under TP 8 and PP 8."""
    small = [*_SIZE[device], *_COMMON, *batch(1, 4)]
    keep({"small": _profile(["--iterations", "2"], small, device=device, target=folder / "small.json")})
    if device == "cuda":
        options = ["--iterations", "4", "--stage", "0", "--world-size", "64"]
        words = [*_COMMON, *_STAGE_70B]
        keep({"70B, stage 0": _profile(options, words, device=device, target=folder / "stage-70b.json")})


def trial(device: str, folder: Path, keep: Keep) -> None:
    """`quartet tune` with two plans, and where its ranks ran."""
    config = folder / "q.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({**_TUNING, "device": device}))
    runs = folder / "runs"
    words = [*_SIZE[device], *_COMMON, *batch(2, 8)]
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), *words]
    code, lines = _quartet(["tune", "--config", str(config), "--run-dir", str(runs), "--", *command], folder)
    ranks = [json.loads(path.read_text()) for path in sorted(runs.rglob("rank-0.json"))]
    devices = sorted({str(rank.get("device")) for rank in ranks})
    keep({"exit code": code, "devices of the ranks": devices, "last lines": lines[-6:]})
    faults = [] if code == 0 else [f"quartet tune ended with exit code {code}: {lines[-1]}"]
    if not ranks or ("cpu" in devices) != (device == "cpu"):
        faults.append(f"the ranks ran on {devices}, not on {device}")
    if not (runs / "first" / "report.html").exists():
        faults.append("there is no report.html")
    keep({"faults": faults})


def batch(micro: int, whole: int) -> list[str]:
    """The flags of a micro-batch and a global batch."""
    return ["--micro-batch-size", str(micro), "--global-batch-size", str(whole)]


def custom_plan(name: str, words: Sequence[str], *, num_processes: int) -> Plan:
    """A plan of a command with a custom schedule on two pipeline ranks, made without starting anything."""
    chunks = 2 if name == "zb-v" else 1
    args, _ = read_arguments(words)
    shape, layout = shape_of(args, vocab_size=1024), layout_of(args, world_size=num_processes)
    job = TrainingJob(
        framework="megatron-core",
        framework_version=version("megatron-core"),
        torch_version=version("torch"),
        shape=shape,
        layout=layout,
        split=split_of(args),
        schedule=schedule_of(args),
        global_batch_size=args.global_batch_size,
        train_iters=1000,
        precision=precision_of(args),  # type: ignore[arg-type]
        features=(),
        neutralised=(),
    )
    node = NodeInfo(host=socket.gethostname(), node_class="first run", num_slots=num_processes)
    plan = baseline_plan(job, nodes=[node], run="first-run", seed=0)
    order = custom_order(
        name,
        shape=shape,
        num_devices=2,
        num_chunks=chunks,
        num_microbatches=layout.num_microbatches(args.global_batch_size),
        end_loads=None,
        split=None,
    )
    return replace(
        plan,
        layout=replace(layout, virtual_stages=chunks),
        split=Split(transformer_layers_per_stage=order.split),
        schedule=ScheduleChoice(name="custom", custom=order.custom),
    )


def _check(
    name: str, words: Sequence[str], num_processes: int, *, device: str, place: Path
) -> dict[str, Any]:
    """The receipt of `quartet check`: the largest deviations from stock, and what does not hold."""
    place.mkdir(parents=True, exist_ok=True)
    words = [*words, "--pipeline-model-parallel-size", "2"]
    path = place / "plan.json"
    write_plan(custom_plan(name, words, num_processes=num_processes), path=path)
    command = ["torchrun", "--nproc-per-node", str(num_processes), str(SCRIPT), *words]
    code, lines = _quartet(["check", str(path), "--device", device, "--", *command], place)
    receipt = receipt_path(path)
    found: dict[str, Any] = {"schedule": name, "exit code": code, "faults": []}
    if receipt.exists():
        steps = json.loads(receipt.read_text())["steps"]
        for quantity in ("loss", "grad_norm"):
            found[f"{quantity} deviation"] = max(float(step[f"{quantity}_deviation"]) for step in steps)
    if code:
        found["faults"] = [lines[-1]]
    return found


def _profile(options: Sequence[str], words: Sequence[str], *, device: str, target: Path) -> dict[str, Any]:
    """What `quartet profile` says of a command of one process."""
    command = ["torchrun", "--nproc-per-node", "1", str(SCRIPT), *words]
    start = ["profile", *options, "--device", device, "-o", str(target), "--", *command]
    code, lines = _quartet(start, target.parent)
    if code:
        raise SystemExit(f"quartet profile ended with exit code {code}: {lines[-1]}")
    return {"file": target.name, "lines": lines}


def _quartet(words: Sequence[str], place: Path) -> tuple[int, list[str]]:
    """Exit code and output of a quartet command, the latter also as quartet.txt."""
    process = subprocess.Popen(
        [*_QUARTET, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        text, _ = process.communicate()
    except KeyboardInterrupt:
        # It had the signal too, and ends its ranks before it goes.
        process.wait(timeout=_END_S)
        raise
    (place / "quartet.txt").write_text(text)
    lines = [line[:_MAX_LINE] for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return process.returncode, lines or ["no output"]
