"""Measures seconds and bytes of the embedding, each layer and the head on a rank, forward and backward.

Module hooks mark the boundaries in a forward, hooks on the tensors between layers mark them in the backward:
a gradient reaches a boundary when the backward of all later parts has ended. Every second iteration defers
weight gradients (see `split_backward`) and times each of them, so that input and weight gradients are
measured separately. Waiting for other ranks lies outside of every interval except those of `finalize`.
"""

import functools
import os
import re
import statistics
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch

from quartet_plugin.errors import SeamError, UsageError
from quartet_plugin.megatron import split_backward
from quartet_plugin.megatron.part_activations import part_activations
from quartet_plugin.megatron.te_layers import DelayedLayer, delayed_layers
from quartet_plugin.protocol.environment import PROFILE
from quartet_plugin.protocol.rank_files import PartTimes, RankProfile, StepPart
from quartet_plugin.rank.device import device_name, peak_memory_bytes
from quartet_plugin.rank.files import RankFileWriter
from quartet_plugin.runtime.records import Clock, CudaClock, HostClock

EMBEDDING, HEAD, OTHER = "embedding", "head", "other"
# An interval above this many medians was an accident of the machine, and counts as that many.
MOST_MEDIANS = 3.0
MAX_WORLD_SIZE = 65_536

Key = tuple[str, str]


class LayerProfiler:
    """Measures one rank of a trial; wraps `train_step` as the meters do."""

    def __init__(self, files: RankFileWriter, *, clock: Clock | None = None) -> None:
        self._files = files
        self._clock: Clock = clock or (HostClock() if device_name() == "cpu" else CudaClock())
        self._spans: dict[Key, list[tuple[Any, Any]]] = defaultdict(list)
        self._last: Any = None
        self._in_backward = self._is_counting = False
        self._chunks: list[_Chunk] = []
        self._gradients: split_backward.WeightGradients | None = None
        self._defers = False
        self.delays_te = False
        self._num_steps = 0
        self.activations = part_activations()

    def prepare(self, *, delays_te: bool) -> None:
        """Let linear layers defer their weight gradients, with `delays_te` Transformer Engine's too.

        Must run before models are built.
        """
        gradients = split_backward.WeightGradients()
        try:
            split_backward.install(gradients, delays_te=delays_te)
        except SeamError:
            return  # Megatron's functions are not as known: full backwards only
        self._gradients, self.delays_te = gradients, delays_te

    def wrap(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step` as Megatron calls it; the profile is written after the last step."""

        @functools.wraps(train_step)
        def profiled_train_step(*args: Any, **kwargs: Any) -> Any:
            names = ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler")
            call = {**dict(zip((*names, "config", "forward_backward_func"), args, strict=False)), **kwargs}
            if not self._chunks:
                self._attach(call["model"], call["optimizer"], call["config"])
            spec = self._files.spec
            self._is_counting = self._num_steps >= spec.warmup
            self._defers = self._gradients is not None and self._num_steps % 2 == 1
            for chunk in self._chunks:
                for layer in chunk.delayed:
                    layer.delay(is_on=self._defers)
            self.activations.is_open = self._num_steps == 0
            begin = self._clock.mark()
            rest = list(args)
            wrapped = self._timed(call["forward_backward_func"], "forward_backward")
            if len(rest) > 6:
                rest[6] = wrapped
            else:
                kwargs["forward_backward_func"] = wrapped
            results = train_step(*rest, **kwargs)
            self._span(("iteration", "step"), begin, self._clock.mark())
            self._num_steps += 1
            if self._num_steps >= spec.num_iterations:
                self.write()
            return results

        return profiled_train_step

    def write(self) -> None:
        """Write rank-K.profile.json: means of parts, medians of steps, and the numbers of intervals."""
        from megatron.core import mpu
        from megatron.training.global_vars import get_args as get_megatron_args

        from quartet_plugin.megatron.describe import describe_job

        profile = RankProfile(
            schema_version=1,
            attempt_id=self._files.spec.attempt_id,
            launch_rank=self._files.launch_rank,
            rank=self._files.rank,
            pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
            tensor_rank=mpu.get_tensor_model_parallel_rank(),
            device=device_name(),
            peak_memory_bytes=peak_memory_bytes(),
            parts=self._parts(),
            steps={name: self._summary((name, "step"), statistics.median) for name in get_args(StepPart)},
            job=describe_job(get_megatron_args(), as_written=Namespace(), neutralised=[]),
        )
        self._files.write(profile)

    def _parts(self) -> tuple[PartTimes, ...]:
        names = dict.fromkeys(name for name, kind in self._spans if kind != "step")
        return tuple(
            PartTimes(
                name=name,
                forward_s=self._summary((name, "F")),
                backward_s=self._summary((name, "B")),
                input_grad_s=self._summary((name, "I")),
                weight_grad_s=self._weight_grad_s(name),
                num_intervals=len(self._spans[name, "F"]),
                activation_bytes=self.activations.bytes_of(name),
            )
            for name in names
        )

    def _summary(self, key: Key, summarize: Callable[[list[float]], float] | None = None) -> float | None:
        """The seconds of the key's intervals, by default their cut mean; None where there are none."""
        seconds = [self._clock.seconds(*span) for span in self._spans.get(key, ())]
        return (summarize or cut_mean)(seconds) if seconds else None

    def _weight_grad_s(self, name: str) -> float | None:
        """Seconds a microbatch: the sum of the means over the part's weights."""
        keys = [key for key in self._spans if key[0] == name and key[1].startswith("W")]
        return sum(self._summary(key) or 0.0 for key in keys) if keys else None

    def _span(self, key: Key, begin: Any, end: Any) -> None:
        if self._is_counting:
            self._spans[key].append((begin, end))

    def _attach(self, model: Sequence[Any], optimizer: Any, config: Any) -> None:
        from megatron.core.utils import unwrap_model

        chunks = unwrap_model(list(model))
        self._chunks = [_Chunk(self, chunk) for chunk in chunks]
        for chunk in chunks:
            self.activations.leave_out(chunk.parameters())
        optimizer.step = self._timed(optimizer.step, "optimizer")
        if getattr(config, "finalize_model_grads_func", None) is not None:
            config.finalize_model_grads_func = self._timed(config.finalize_model_grads_func, "finalize")

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.mark()
            try:
                return function(*args, **kwargs)
            finally:
                self._span((name, "step"), begin, self._clock.mark())

        return timed

    @property
    def is_recomputing(self) -> bool:
        """Whether a running forward recomputes activations for a backward."""
        return self._in_backward

    def starts(self) -> None:
        """Mark the begin of a chunk's forward."""
        self._last = self._clock.mark()

    def passes(self, name: str, kind: str) -> None:
        """Count the interval since the last mark for the part `name`."""
        now = self._clock.mark()
        self._span((name, kind), self._last, now)
        self._last = now

    def backward_starts(self, chunk: "_Chunk") -> None:
        """Mark the begin of a chunk's backward, when its output's gradient has arrived."""
        self._in_backward = True
        if self._defers and self._gradients is not None:
            self._gradients.begin()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(chunk))
        self._last = self._clock.mark()

    def backward_passes(self, name: str) -> None:
        """Count the interval since the last mark for the backward of the part `name`."""
        self.passes(name, "I" if self._defers else "B")

    def _backward_ends(self, chunk: "_Chunk") -> None:
        self.backward_passes(EMBEDDING if chunk.has_embedding else OTHER)
        self._in_backward = False
        if not self._defers or self._gradients is None:
            for layer in chunk.delayed:
                layer.end_full_backward()
            return
        gradients = self._gradients
        pending, gradients.open = gradients.open or [], None
        for number, gradient in enumerate(pending):
            with self._weight_span(chunk, gradient.weight, number):
                gradients.accumulate(gradient)
        for number, layer in enumerate(chunk.delayed, start=len(pending)):
            layer.end_input_grad()
            with self._weight_span(chunk, layer.weights[0], number):
                layer.accumulate()

    @contextmanager
    def _weight_span(self, chunk: "_Chunk", weight: Any, number: int) -> Iterator[None]:
        begin = self._clock.mark()
        yield
        self._span((chunk.owners.get(id(weight), OTHER), f"W{number}"), begin, self._clock.mark())


def cut_mean(seconds: Sequence[float]) -> float:
    """The mean of intervals, each counted as at most MOST_MEDIANS medians: accidents are cut off.

    Medians would lose the time that collectives wait now and then.
    """
    most = MOST_MEDIANS * statistics.median(seconds)
    return statistics.fmean(min(interval, most) for interval in seconds)


class _Chunk:
    """The hooks on a model chunk."""

    def __init__(self, profiler: LayerProfiler, model: Any) -> None:
        self._profiler = profiler
        self.has_embedding = bool(getattr(model, "pre_process", True))
        self.has_head = bool(getattr(model, "post_process", True))
        # A schedule of the plan has its own use for them.
        self.delayed: list[DelayedLayer] = delayed_layers(model) if profiler.delays_te else []
        layers = list(model.decoder.layers)
        self._names = [f"layer.{layer.layer_number - 1}" for layer in layers]
        self.owners = {
            id(weight): name
            for layer, name in zip(layers, self._names, strict=True)
            for weight in layer.parameters()
        }
        if self.has_head:
            self.owners |= {id(weight): HEAD for weight in model.output_layer.parameters()}
            if getattr(model, "share_embeddings_and_output_weights", False):
                self.owners[id(model.shared_embedding_or_output_weight())] = HEAD
        model.register_forward_pre_hook(self._begin)
        if layers:
            layers[0].register_forward_pre_hook(self._first_layer, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._after_layer(index))
        model.register_forward_hook(self._end)

    @property
    def _first(self) -> str:
        return EMBEDDING if self.has_embedding else OTHER

    @property
    def _last(self) -> str:
        return HEAD if self.has_head else OTHER

    def _begin(self, module: Any, args: Any) -> None:
        del module, args
        if not self._profiler.is_recomputing:
            self._profiler.activations.enter(self._first)
            self._profiler.starts()

    def _first_layer(self, module: Any, args: Any, kwargs: Any) -> None:
        del module
        profiler = self._profiler
        if profiler.is_recomputing:
            return
        profiler.passes(self._first, "F")
        profiler.activations.enter(self._names[0])
        self._on_gradient(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], self._names[0])

    def _after_layer(self, index: int) -> Callable[..., None]:
        name = self._names[index]
        following = self._names[index + 1] if index + 1 < len(self._names) else self._last

        def hook(module: Any, args: Any, output: Any) -> None:
            del module, args
            profiler = self._profiler
            if profiler.is_recomputing:
                return
            profiler.passes(name, "F")
            profiler.activations.enter(following)
            self._on_gradient(output[0] if isinstance(output, tuple) else output, following)

        return hook

    def _end(self, module: Any, args: Any, output: Any) -> None:
        del module, args
        profiler = self._profiler
        if profiler.is_recomputing:
            return
        profiler.passes(self._last, "F")
        profiler.activations.leave()
        if output.requires_grad:
            output.register_hook(lambda _: profiler.backward_starts(self))

    def _on_gradient(self, tensor: Any, name: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._profiler.backward_passes(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRank:
    """A rank of a job larger than the machine, built and run alone: compute and memory, no communication."""

    rank: int
    world_size: int

    @classmethod
    def of(cls, text: str) -> "SimulatedRank | None":
        """The rank that `quartet profile` set as RANK/WORLD_SIZE; None for another text, with real processes.

        Raises UsageError.
        """
        if "/" not in text:
            return None
        match = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text, re.ASCII)
        rank, world = (int(match[1]), int(match[2])) if match else (0, 0)
        if not rank < world <= MAX_WORLD_SIZE:
            raise UsageError(f"{PROFILE}: {text[:40]!r}; must be RANK/WORLD_SIZE, RANK below WORLD_SIZE")
        return cls(rank=rank, world_size=world)

    def simulate(self) -> None:
        """Set the environment, which Megatron reads later, to this rank."""
        from torch.testing._internal.distributed import fake_pg

        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self.rank), str(self.world_size)
        os.environ["LOCAL_RANK"] = "0"
        # Megatron's store can be neither written nor read; this store can, inside the process.
        fake_pg.FakeStore = torch.distributed.HashStore
        # Buffers that nobody sent hold old memory; denormal numbers would be very slow.
        torch.set_flush_denormal(True)

    @staticmethod
    def wrap_arguments(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
        """Set `do_train`, which RANK 0 otherwise sends to ranks without data."""

        def add_arguments_and_train(parser: Any) -> Any:
            parser = add_megatron_arguments(parser)
            parser.set_defaults(do_train=True)
            return parser

        return add_arguments_and_train
