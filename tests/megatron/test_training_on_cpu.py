"""Unmodified Megatron on the CPU device: every layout trains the same model, and checkpoints come back."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron import support

# A relative difference in fp32. Tensor parallelism sums the parts of a matrix product in another order.
_TOLERANCE = 1e-6
_TOLERANCE_ACROSS_TP = 5e-6


@dataclass(frozen=True, slots=True)
class Reference:
    """One process's training, from weights that every layout loads."""

    data: Path
    loading: tuple[str, ...]
    run: support.Run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    data = support.dataset(folder)
    loading = support.save_weights(folder, data=data)
    run = support.train(folder / "one", *loading, num_processes=1, data=data)
    assert run.exit_code == 0, run.output[-3000:]
    assert "successfully loaded checkpoint" in run.output
    return Reference(data, loading, run)


@pytest.mark.parametrize(
    ("num_processes", "flags", "tolerance"),
    [
        pytest.param(2, "--pipeline-model-parallel-size 2", _TOLERANCE, id="pp2"),
        pytest.param(2, "--tensor-model-parallel-size 2", _TOLERANCE_ACROSS_TP, id="tp2"),
        pytest.param(4, "--pipeline-model-parallel-size 2", _TOLERANCE, id="pp2-dp2"),
        pytest.param(
            2,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            _TOLERANCE,
            id="pp2-interleaved",
        ),
        pytest.param(
            4,
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt|t|tL",
            _TOLERANCE,
            id="pp4-uneven",
        ),
        pytest.param(
            2,
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
            _TOLERANCE,
            id="dp2-distributed-optimizer",
        ),
    ],
)
def test_layout_trains_as_one_process(
    reference: Reference, tmp_path: Path, num_processes: int, flags: str, tolerance: float
) -> None:
    run = support.train(
        tmp_path / "run",
        *reference.loading,
        *shlex.split(flags),
        num_processes=num_processes,
        data=reference.data,
    )

    assert run.exit_code == 0, run.output[-3000:]
    assert "successfully loaded checkpoint" in run.output
    loss, grad_norm = support.largest_deviation(run, reference.run)
    assert loss <= tolerance
    assert grad_norm <= tolerance


def test_weights_matter_to_the_comparison(reference: Reference, tmp_path: Path) -> None:
    """Without the checkpoint a pipeline's stages start from other weights: the comparison must see it."""
    run = support.train(
        tmp_path / "run", "--pipeline-model-parallel-size", "2", num_processes=2, data=reference.data
    )

    assert run.exit_code == 0, run.output[-3000:]
    assert min(support.largest_deviation(run, reference.run)) > 100 * _TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"])
def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path, optimizer: str) -> None:
    data = support.dataset(tmp_path)
    flags = shlex.split(
        "--pipeline-model-parallel-size 2 --ckpt-format torch_dist "
        f"--hidden-dropout 0.1 --attention-dropout 0.1 {optimizer}"
    )
    folder = str(tmp_path / "checkpoints")
    whole = support.train(
        tmp_path / "whole", *flags, "--save", folder, "--save-interval", "2",
        num_processes=2, data=data, train_iters=4,
    )  # fmt: skip
    resumed = support.train(
        tmp_path / "resumed", *flags, "--load", folder, "--ckpt-step", "2", "--exit-on-missing-checkpoint",
        num_processes=2, data=data, train_iters=4,
    )  # fmt: skip

    assert whole.exit_code == 0, whole.output[-3000:]
    assert resumed.exit_code == 0, resumed.output[-3000:]
    assert resumed.losses() == whole.losses()[2:]
    assert resumed.grad_norms() == whole.grad_norms()[2:]


def test_gpu_command_is_rehearsed_as_it_is(tmp_path: Path) -> None:
    """Flags of an ordinary GPU command, bf16 among them, that name what a CPU does not have."""
    run = support.train(
        tmp_path / "run",
        *shlex.split(
            "--bf16 --distributed-backend nccl --transformer-impl transformer_engine "
            "--attention-backend fused --tensor-model-parallel-size 2 --use-distributed-optimizer"
        ),
        num_processes=2,
        data=support.dataset(tmp_path),
    )

    assert run.exit_code == 0, run.output[-3000:]
    assert len(run.losses()) == 3
