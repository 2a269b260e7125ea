"""`q.yaml`: what a user asks of a tuning run.

Three forms hold for every axis: `auto` is tuned, a literal is fixed, a list is searched. The file is read
with the safe YAML loader and a strict schema; an unknown key or a wrong type is one ConfigError line.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown, validate
from quartet_plugin.search.samplers import DEFAULT, SamplerName, check_name
from quartet_plugin.search.storage import FORMS, SQLITE, check_address, without_password

MAX_CONFIG_BYTES = 1 << 20
MAX_CHOICES = 64

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SPLIT = re.compile(r"auto|stock|even|\d{1,4}(\+\d{1,4}){0,1023}")
_ORDER = re.compile(r"auto|stock|[a-z][a-z0-9-]{0,39}|\d{1,5}(,\d{1,5}){0,65535}")
_SHAPE = re.compile(r"\d{1,6}x\d{1,7}")


def _as_list(value: Any) -> Any:
    """A literal is a list of one; `auto` is None: nothing is asked for."""
    if value == "auto":
        return None
    return value if isinstance(value, list) else [value]


def distinct[T](values: tuple[T, ...] | None) -> tuple[T, ...] | None:
    """The choices of a list, each once; raises ValueError for too many, none or one twice."""
    if values is None:
        return None
    if not 1 <= len(values) <= MAX_CHOICES:
        raise ValueError(f"a list has from 1 to {MAX_CHOICES} entries")
    if len(set(values)) != len(values):
        raise ValueError("a list names each choice once")
    return values


def _matching(pattern: re.Pattern[str], rule: str) -> AfterValidator:
    def check(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for value in values or ():
            if value == "auto" or not pattern.fullmatch(value):
                raise ValueError(rule)
        return values

    return AfterValidator(check)


def _storage(value: Any) -> str:
    """The message names the field itself, since the value may hold a password."""
    try:
        if not isinstance(value, str):
            raise ConfigError(f"must be {FORMS}")
        return check_address(value)
    except ConfigError as error:
        message = f"study.storage: {error}"
        raise PydanticCustomError("rule", "{message}", {"message": message}) from error


def _sampler(value: Any) -> SamplerName:
    """The message names the field itself, and why a sampler that Optuna has is not taken."""
    try:
        return check_name(value)
    except ConfigError as error:
        raise PydanticCustomError("rule", "{message}", {"message": str(error)}) from error


def _run_name(value: str) -> str:
    if not _RUN_NAME.fullmatch(value):
        raise ValueError("letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit")
    return value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_Degree = Annotated[int, Field(ge=1, le=2**20)]
Degrees = Annotated[
    tuple[_Degree, ...] | None, BeforeValidator(lambda v: _tuple(_as_list(v))), AfterValidator(distinct)
]
_BucketSize = Annotated[int, Field(ge=2, le=2**40, multiple_of=2)]
BucketSizes = Annotated[
    tuple[_BucketSize, ...] | None, BeforeValidator(lambda v: _tuple(_as_list(v))), AfterValidator(distinct)
]
_Names = Annotated[
    tuple[str, ...] | None, BeforeValidator(lambda v: _tuple(_as_list(v))), AfterValidator(distinct)
]
Splits = Annotated[_Names, _matching(_SPLIT, "auto, stock, even, or counts like 6+2")]
Orders = Annotated[_Names, _matching(_ORDER, "auto, stock, the name of an order, or slots like 1,0")]
Shapes = Annotated[_Names, _matching(_SHAPE, "layers x hidden size, like 24x2048")]
ScheduleWish = Literal[
    "stock",
    "no-pipelining",
    "1f1b",
    "interleaved",
    "gpipe",
    "breadth-first",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipev",
    "searched",
]
# What is written down of it has no password.
Storage = Annotated[str, BeforeValidator(_storage), PlainSerializer(without_password)]
Sampler = Annotated[SamplerName, BeforeValidator(_sampler)]
Schedules = Annotated[
    tuple[ScheduleWish, ...] | None,
    BeforeValidator(lambda v: _tuple(_as_list(v))),
    AfterValidator(distinct),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ScalingConfig(_Section):
    """Other models of an equal budget; without this section the user's shape is never changed.

    `shapes` names those to choose from, like `24x2048` (layers x hidden size).
    """

    budget: Literal["parameters", "flops"] = "parameters"
    tolerance: float = Field(default=0.02, gt=0.0, le=0.5)
    depth_width_band: float = Field(default=4.0, ge=1.0, le=64.0)
    max_shapes: int = Field(default=8, ge=2, le=MAX_CHOICES)
    shapes: Shapes = None


class _Axes(_Section):
    """The axes that a search chooses along and rules are about."""

    tensor_parallel: Degrees = None
    pipeline_parallel: Degrees = None
    data_parallel: Degrees = None
    virtual_stages: Degrees = None
    micro_batch_size: Degrees = None
    group: Degrees = None
    split: Splits = None
    schedule: Schedules = None
    mapping: Orders = None


class Forbidden(_Axes):
    """What no plan may be, all of it at once: a value or a list for each axis that matters."""

    shape: Shapes = None

    @model_validator(mode="after")
    def _names_an_axis(self) -> "Forbidden":
        if not self.axes:
            raise ValueError("names at least one axis with the values that no plan may have")
        return self

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """The values of each axis that is named."""
        return {name: values for name, values in self if values is not None}

    @property
    def label(self) -> str:
        """As it is written in q.yaml."""
        words = (f"{name}: {_written(values)}" for name, values in self.axes.items())
        return f"{{{', '.join(words)}}}"


def _written(values: tuple[Any, ...]) -> str:
    words = ", ".join(str(value) for value in values)
    return words if len(values) == 1 else f"[{words}]"


class SearchConfig(_Axes):
    """The axes. None is `auto`. No plan matches one of the `forbid` rules.

    `change_class` is how far a plan may change the training, docs/support.md: `A` the order of work alone,
    `B` the rounding of reductions, `C` possibly the objective. Another model (D) takes a `scaling` section.
    """

    # DeepSpeed's, in elements, with ZeRO 1.
    reduce_bucket_size: BucketSizes = None
    allgather_bucket_size: BucketSizes = None
    scaling: ScalingConfig | None = None
    change_class: Literal["A", "B", "C"] = "B"
    forbid: Annotated[
        tuple[Forbidden, ...],
        BeforeValidator(lambda v: _tuple(v if isinstance(v, list) else [v])),
        Field(max_length=MAX_CHOICES),
    ] = ()


class TrialConfig(_Section):
    """One live trial: iterations left out, iterations measured, and when it is killed.

    `crop` layers are left on the largest stage of a cropped model, which comes before the whole one: `auto`
    keeps a quarter where that saves much, `none` crops nothing.

    One whose iterations take more than `cut_above` times what the best so far needs for the same work is cut
    short. Between two runs of one plan lie a few percent, in bad hours a third.
    """

    warmup: int = Field(default=3, ge=1, le=1000)
    measure: int = Field(default=10, ge=1, le=10_000)
    cut_above: float = Field(default=1.5, ge=1.05, le=1000.0)
    deadline_s: float = Field(default=600.0, gt=0.0, le=86_400.0)
    crop: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=10_000)] = "auto"


FileName = Annotated[str, Field(min_length=1, max_length=4096)]


class MachineConfig(_Section):
    """What is known of the machine: files that `quartet probe` and `quartet calibrate` wrote."""

    cluster: FileName | None = None
    calibration: FileName | None = None


class StudyConfig(_Section):
    """The study: how many plans besides the baseline, and how the best are measured again.

    After every `control` plans the baseline is measured once more, to see how the machine drifts; 0: never.
    `starts` none leaves the cost model's own points out, so that the sampler is alone from the beginning.
    `sampler` proposes the plans after them; while the calibrated cost model proposes, every `explore`-th one
    (0: none).
    """

    trials: int = Field(default=20, ge=1, le=100_000)
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    sampler: Sampler = DEFAULT
    storage: Storage = SQLITE
    tensorboard: bool = False
    top_k: int = Field(default=3, ge=1, le=20)
    rounds: int = Field(default=5, ge=3, le=100)
    control: int = Field(default=10, ge=0, le=100_000)
    starts: Literal["auto", "none"] = "auto"
    explore: int = Field(default=5, ge=0, le=100_000)
    objective: Literal["auto", "tokens_per_s", "model_flops_per_s_per_device"] = "auto"


class TuneConfig(_Section):
    """All of `q.yaml`. `run` is the name of the run folder; None takes the script's name."""

    run: Annotated[str, AfterValidator(_run_name)] | None = None
    search: SearchConfig = SearchConfig()
    trial: TrialConfig = TrialConfig()
    study: StudyConfig = StudyConfig()
    machine: MachineConfig = MachineConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"


def read_config(path: Path | None) -> TuneConfig:
    """The configuration in `path`, or the defaults. Raises ConfigError in one line."""
    if path is None:
        return TuneConfig()
    return parse_config(load_yaml(path), where=str(path))


def parse_config(data: Any, *, where: str) -> TuneConfig:
    """Plain data as a configuration; an empty file is all defaults. Raises ConfigError in one line."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a configuration is a mapping of sections; this is {shown(data)}")
    return validate(TuneConfig, _without_empty_sections(data), where=where)


def default_run_name(command: Sequence[str]) -> str:
    """A run name from the script in the user's command: `pretrain_gpt.py` gives `pretrain_gpt`."""
    script = next((word for word in command if word.endswith(".py")), command[-1] if command else "")
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(script).stem).strip("-._")[:100]
    return name if _RUN_NAME.fullmatch(name) else "run"


def _without_empty_sections(data: dict[Any, Any]) -> dict[Any, Any]:
    """`search:` with nothing below it reads as None and means the defaults."""
    sections = ("search", "trial", "study")
    kept = {key: value for key, value in data.items() if not (key in sections and value is None)}
    search = kept.get("search")
    if isinstance(search, dict) and search.get("scaling", {}) in (None, "auto"):
        kept["search"] = {**search, "scaling": {}}
    return kept


def load_yaml(path: Path) -> Any:
    """The data in a short YAML file, read by a safe loader. Raises ConfigError in one line."""
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_CONFIG_BYTES} bytes; a configuration is short")
    try:
        return yaml.load(text, Loader=_unique_loader())  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{at}: not YAML that is safe to read: {error.problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not YAML that is safe to read: {words}") from error


def _unique_loader() -> type[Any]:
    """A safe loader that refuses a key given twice, and aliases, which can blow a small file up."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.constructor.ConstructorError(None, None, "aliases are not read", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    mark = node.value[at][0].start_mark
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {str(key)[:60]!r} appears twice", mark
                    )
            return super().construct_mapping(node, deep=deep)

    return Loader
