"""A rank's side of a trial whose first iterations the parity gate compares, before it goes on to be measured.

The trial starts from weights that every plan of the study starts from, or keeps its own for them. Dropout and
router jitter are set aside for the compared iterations, which belong to the warm-up, and restored after them:
from then on the rank runs what the user's command says. Nothing of the comparison is left in a measured
iteration, nor in the peak of memory.
"""

import functools
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quartet_plugin.megatron.expert_loads import ExpertLoads
from quartet_plugin.megatron.measure import step_result
from quartet_plugin.megatron.parity import can_save_weights, part_squares, save_weights
from quartet_plugin.megatron.random_settings import RandomSettings
from quartet_plugin.megatron.train_step import around_train_step
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.attempt_files import KEPT_FILE, KeptWeights
from quartet_plugin.rank.device import keep_peak_memory, reset_peak_memory
from quartet_plugin.rank.files import RankFileWriter

# Bytes of a saved parameter in full precision, with room for its files.
_BYTES_A_PARAMETER = 5
# What is left free for the trials after this one.
_LEAST_FREE_BYTES = 3 * 2**30
_REASON_KEY = "quartet/weights-not-kept"
# How Megatron saves weights alone, in the form that loads under any layout.
_FORM: dict[str, Any] = {
    "ckpt_format": "torch_dist",
    "use_dist_ckpt": True,
    "no_save_optim": True,
    "no_save_rng": True,
    "async_save": False,
}


class ComparedIterations:
    """Wraps `train_step` and the reading of checkpoints for one rank of such a trial."""

    def __init__(self, files: RankFileWriter) -> None:
        self._files = files
        self._steps: list[dict[str, float]] = []
        self._settings = RandomSettings([])
        self._loads = ExpertLoads()
        self._tokens: list[dict[str, tuple[int, ...]]] = []
        self._weights_s = 0.0
        self._unavailable: str | None = None
        self._has_begun = False
        self._is_comparing = False

    def load_timer(self) -> Mapping[Any, Callable[[Any], Any]]:
        """A wrapper of the function that reads a checkpoint, which counts its seconds; none where unknown."""
        from quartet_plugin.megatron import seams
        from quartet_plugin.megatron.seams.declared import LOAD

        return {} if seams.known_function(LOAD) is None else {LOAD: self._timed}

    def _timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def timed_load(*args: Any, **kwargs: Any) -> Any:
            if not self._weights_s:
                keep_peak_memory()
            begin = time.perf_counter()
            try:
                return load(*args, **kwargs)
            finally:
                self._weights_s += time.perf_counter() - begin

        return timed_load

    def wrap_beginning(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step`, preceded in its first call by what the comparison needs; outside of the meter."""
        return around_train_step(train_step, before=self._begin)

    def wrap_steps(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step` itself, with the gradients of its first calls noted; inside of the meter."""
        return around_train_step(train_step, after=self._note)

    def _begin(self, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        folder = self._files.spec.save_weights
        if folder is not None:
            self._unavailable = self._agreed(_reason_not_to_keep(model, folder=Path(folder)))
        if folder is not None and self._unavailable is None:
            keep_peak_memory()
            begin = time.perf_counter()
            keep_weights(model, optimizer, opt_param_scheduler, folder=folder)
            if self._files.rank == 0:
                kept = KeptWeights(attempt_id=self._files.spec.attempt_id)
                write_json_atomic(Path(folder) / KEPT_FILE, dump(kept))
            self._weights_s += time.perf_counter() - begin
        if self._unavailable is None:
            self._settings = RandomSettings.of(model)
            self._settings.set_aside()
            self._loads.begin(model)
            self._is_comparing = True
        else:
            self._write()
        reset_peak_memory()

    def _note(self, model: Any, optimizer: Any, results: Any) -> None:
        if not self._is_comparing:
            return
        self._steps.append(_parts_if_known(model, optimizer, step_result(results).grad_norm))
        self._tokens.append(self._loads.take())
        if len(self._steps) == self._files.spec.num_compared:
            self._is_comparing = False
            self._loads.end()
            self._settings.restore()
            self._write()

    def _write(self) -> None:
        self._files.write_gradients(
            self._steps,
            settings=self._settings.names,
            weights_s=self._weights_s,
            unavailable=self._unavailable,
            expert_tokens=self._tokens,
        )

    def _agreed(self, reason: str | None) -> str | None:
        """RANK 0's reason on every rank: saving is collective."""
        from torch.distributed import distributed_c10d

        if not distributed_c10d.is_initialized() or distributed_c10d.get_world_size() == 1:
            return reason
        store = distributed_c10d._get_default_store()
        if self._files.rank == 0:
            store.set(_REASON_KEY, reason or "")
        return bytes(store.get(_REASON_KEY)).decode("utf-8") or None


def keep_weights(model: Any, optimizer: Any, opt_param_scheduler: Any, *, folder: str) -> None:
    """Write the model as it is into `folder`; Megatron's arguments are afterwards what they were."""
    from megatron.training.global_vars import get_args

    args = get_args()
    asked = {name: value for name, value in {**_FORM, "save": folder}.items() if hasattr(args, name)}
    before = {name: getattr(args, name) for name in asked}
    vars(args).update(asked)
    try:
        save_weights(model, optimizer, opt_param_scheduler)
    finally:
        vars(args).update(before)


def _reason_not_to_keep(model: Any, *, folder: Path) -> str | None:
    """Why this trial's first iterations are compared with nothing; None where they can be."""
    from megatron.core import mpu
    from megatron.training.global_vars import get_args

    args = get_args()
    if not can_save_weights():
        return "this release of Megatron saves weights in another format"
    graphs = getattr(args, "cuda_graph_impl", "none") or "none"
    is_captured = graphs != "none" or any(
        getattr(args, name, False) for name in ("enable_cuda_graph", "external_cuda_graph")
    )
    is_random = bool(
        args.hidden_dropout or args.attention_dropout or getattr(args, "moe_input_jitter_eps", None)
    )
    if is_captured and is_random:
        return "CUDA graphs keep the dropout that they were captured with"
    num_parameters = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    replicas = mpu.get_data_parallel_world_size(with_context_parallel=True)
    ranks = max(1, int(args.world_size) // max(1, replicas))
    needed = _LEAST_FREE_BYTES + _BYTES_A_PARAMETER * num_parameters * ranks
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        needs = f"the initial weights of compared runs need {needed >> 20} MiB"
        return f"{needs}, and {place} has {free >> 20} MiB free"
    return None


def _parts_if_known(model: Any, optimizer: Any, grad_norm: Any) -> dict[str, float]:
    """The squared gradient norms by part, which name the stage of a fault; {} where the model hides them."""
    try:
        return part_squares(model, optimizer, grad_norm)
    except (AttributeError, KeyError, IndexError, TypeError, RuntimeError):
        return {}
