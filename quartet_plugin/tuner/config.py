"""`q.yaml`: what a user asks of a tuning run.

Three forms hold for every axis: `auto` is tuned, a literal is fixed, a list is searched. The file is read
with the safe YAML loader and a strict schema; an unknown key or a wrong type is one ConfigError line.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer
from pydantic_core import PydanticCustomError

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.engines import LOCAL
from quartet_plugin.launchers.placement import Placement
from quartet_plugin.launchers.site import read_site
from quartet_plugin.model.files import shown
from quartet_plugin.model.sections import Section, load_yaml, validate
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.study.samplers import DEFAULT, SamplerName, check_name
from quartet_plugin.study.storage import FORMS, SQLITE, check_address, without_password
from quartet_plugin.trial.request import SHUTDOWN_S

# Trains a recipe of Megatron-Bridge; its run is named after the recipe.
_RECIPE_MODULE = "quartet_plugin.bridge.recipe"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

# The most final rounds, in multiples of `study.rounds`.
MAX_EXTENDED = 3

# The iterations before the measured ones, and the measured ones themselves, where a trial decides: graphs are
# captured after a few iterations, and four show some scatter.
AUTO_WARMUP = (1, 10)
AUTO_MEASURE = (4, 10)
# The relative standard error of a trial's median that is small enough. Two launches of a plan lie at least
# as far apart, which more iterations of one launch do not mend.
PRECISION = 0.02


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


# What is written down of it has no password.
Storage = Annotated[str, BeforeValidator(_storage), PlainSerializer(without_password)]
Sampler = Annotated[SamplerName, BeforeValidator(_sampler)]


FileName = Annotated[str, Field(min_length=1, max_length=4096)]


class TrialConfig(Section):
    """One live trial: iterations left out, iterations measured, and when it is killed.

    `crop` layers are left on the largest stage of a depth proxy, which comes before the whole one: `auto`
    keeps a quarter where that saves much, `none` crops nothing.

    One whose iterations take more than `cut_above` times what the best so far needs for the same work is cut
    short. Between two runs of one plan lie a few percent, in bad hours a third.

    With `warmup: auto` the measured iterations begin where they are steady, after 1 to 10 of them. With
    `measure: auto` a trial ends after 4 to 10 of them, as soon as its median is known to 2 %, or is clearly
    slower than the best plan's.
    """

    warmup: Literal["auto"] | Annotated[int, Field(ge=1, le=1000)] = Field(
        default="auto", description="warm-up iterations, not measured; auto: until times are steady"
    )
    measure: Literal["auto"] | Annotated[int, Field(ge=1, le=10_000)] = Field(
        default="auto",
        description="measured iterations; auto: until the median is certain to 2 %, at most 10",
    )
    cut_above: float = Field(
        default=1.5,
        ge=1.05,
        le=1000.0,
        description="a trial this many times slower than the best is stopped early; with measure: auto, "
        "from 1.1 on",
    )
    deadline_s: float = Field(
        default=600.0, gt=SHUTDOWN_S, le=86_400.0, description="seconds after which a trial is killed"
    )
    warm_starts: Literal["auto", "off"] = Field(
        default="auto", description="auto: fork trials from a process that has made their imports"
    )
    nodes: int = Field(
        default=1, ge=1, le=10_000, description="nodes of each trial, with a launcher that has nodes"
    )
    crop: Literal["auto", "none"] | Annotated[int, Field(ge=1, le=10_000)] = Field(
        default="auto",
        description="layers on the largest stage of a smaller model, measured first (depth proxy); none: no "
        "proxy",
    )

    @property
    def least_warmup(self) -> int:
        """The fewest iterations that are not measured."""
        return AUTO_WARMUP[0] if self.warmup == "auto" else self.warmup

    @property
    def most_warmup(self) -> int:
        """The most iterations that are not measured."""
        return AUTO_WARMUP[1] if self.warmup == "auto" else self.warmup

    @property
    def least_measured(self) -> int:
        """The fewest measured iterations of a trial."""
        return AUTO_MEASURE[0] if self.measure == "auto" else self.measure

    @property
    def most_measured(self) -> int:
        """The most measured iterations of a trial."""
        return AUTO_MEASURE[1] if self.measure == "auto" else self.measure


class MachineConfig(Section):
    """Descriptions of the machine: files that `quartet probe` and `quartet calibrate` wrote."""

    cluster: FileName | None = Field(
        default=None, description="devices and links: the file that `quartet probe` wrote"
    )
    calibration: FileName | None = Field(
        default=None, description="the cost model's constants: the file that `quartet calibrate` wrote"
    )


class StudyConfig(Section):
    """The study: how many plans besides the baseline, and how the best are measured again.

    `patience` trials in a row that raise the best objective by no more than the noise of launches end the
    search; 0: never. After every `control` plans the baseline is measured once more, to see how the machine
    drifts; 0: never.
    `starts` none leaves the cost model's own points out, so that the sampler is alone from the beginning.
    `sampler` proposes the plans after them; while the calibrated cost model proposes, every `explore`-th one
    (0: none).
    """

    trials: int = Field(default=20, ge=1, le=100_000, description="number of plans to try")
    patience: int = Field(
        default=0, ge=0, le=100_000, description="stop after this many trials without a gain; 0: never"
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="the same seed proposes the same plans")
    sampler: Sampler = Field(
        default=DEFAULT, description="Optuna's sampler, used together with the cost model"
    )
    storage: Storage = Field(default=SQLITE, description=FORMS)
    tensorboard: bool = Field(default=False, description="also write the trials for TensorBoard")
    top_k: int = Field(
        default=3,
        ge=1,
        le=20,
        description="number of finalists, which are launched in turns with your command",
    )
    rounds: int = Field(
        default=5,
        ge=3,
        le=100,
        description="number of final rounds; fewer if they decide earlier, at most three times as many",
    )
    control: int = Field(
        default=10,
        ge=0,
        le=100_000,
        description="trials between two measurements of your command; 0: never again",
    )
    starts: Literal["auto", "none"] = Field(
        default="auto", description="auto: the cost model proposes plans; none: the sampler alone"
    )
    explore: int = Field(
        default=5, ge=0, le=100_000, description="N: the sampler proposes every N-th plan; 0: none"
    )
    objective: Literal["auto", "tokens_per_s", "model_flops_per_s_per_device"] = Field(
        default="auto", description="what is maximized; auto: tokens/s, or model FLOP/s if shapes differ"
    )

    @property
    def num_final_launches(self) -> int:
        """The launches of `rounds` final rounds of all finalists."""
        return self.rounds * (self.top_k + 1)

    @property
    def max_final_launches(self) -> int:
        """The launches of final rounds that never decide."""
        return MAX_EXTENDED * self.num_final_launches


class TuneConfig(Section):
    """All of `q.yaml`. `run` is the name of the run folder; None takes the script's name."""

    run: Annotated[str, AfterValidator(_run_name)] | None = Field(
        default=None, description="the run's name; without it the script's"
    )
    search: SearchConfig = Field(
        default=SearchConfig(),
        description="auto tunes an axis, a value fixes it, a list gives the values to try",
    )
    trial: TrialConfig = Field(default=TrialConfig(), description="how each trial runs")
    study: StudyConfig = Field(
        default=StudyConfig(), description="the number of trials, and the final rounds"
    )
    machine: MachineConfig = Field(default=MachineConfig(), description="files that describe the machine")
    launcher: Annotated[str, Field(min_length=1, max_length=100)] = Field(
        default=LOCAL,
        description="local: this machine; slurm: this allocation; slurm-batch: a job a trial; others",
    )
    nodes: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        default=None, description="nodes of the later training, if trials run on fewer (trial.nodes)"
    )
    confirm: Literal["auto", "none"] = Field(
        default="auto",
        description="auto: compare the winner on `nodes` nodes too, if they are available",
    )
    site: FileName | None = Field(
        default=None, description="the site.yaml, which has the cluster's settings for every job"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="cpu rehearses a GPU command; auto: cuda if there is a GPU"
    )

    def with_options(self, *, run: str | None, trials: int | None) -> "TuneConfig":
        """The configuration with the run's name and the number of plans that options say; None keeps its own.

        Raises ConfigError for a value that the file could not have either.
        """
        said = {} if run is None else {"run": run}
        config = validate(TuneConfig, {**dict(self), **said}, where="--name") if said else self
        if trials is None:
            return config
        study = validate(StudyConfig, {**dict(self.study), "trials": trials}, where="--trials")
        return config.model_copy(update={"study": study})


def read_config(path: Path | None) -> TuneConfig:
    """The configuration in `path`, or the defaults. Raises ConfigError in one line."""
    if path is None:
        return TuneConfig()
    return parse_config(load_yaml(path), where=str(path))


def with_launcher(
    config: TuneConfig,
    *,
    launcher: str | None,
    trial_nodes: int | None,
    site: str | None,
    nodes: int | None = None,
) -> TuneConfig:
    """The configuration with the options of the command line. Raises ConfigError in one line."""
    options: dict[str, Any] = {"launcher": launcher, "site": site, "nodes": nodes}
    asked = {name: value for name, value in options.items() if value is not None}
    if trial_nodes is not None:
        asked["trial"] = {**dict(config.trial), "nodes": trial_nodes}
    return validate(TuneConfig, {**dict(config), **asked}, where="options") if asked else config


def placement_of(config: TuneConfig, *, cwd: Path | None = None) -> Placement:
    """Where the run's trials start; relative paths of the site are below `cwd`. Raises ConfigError."""
    folder = cwd or Path()
    site = read_site(None if config.site is None else folder / config.site)
    return Placement(
        launcher=config.launcher,
        num_nodes=config.trial.nodes,
        site=site.seen_from(folder),
        num_full_nodes=config.nodes,
    )


def parse_config(data: Any, *, where: str) -> TuneConfig:
    """Plain data as a configuration; an empty file is all defaults. Raises ConfigError in one line."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a configuration is a mapping of sections; this is {shown(data)}")
    return validate(TuneConfig, _without_empty_sections(data), where=where)


def default_run_name(command: Sequence[str], *, arguments: Sequence[str] = ()) -> str:
    """A run name from the script in the user's command: `pretrain_gpt.py` gives `pretrain_gpt`.

    `arguments` are those of the script. A recipe of Megatron-Bridge gives the recipe's name.
    """
    script = next((word for word in command if word.endswith(".py")), command[-1] if command else "")
    if script == _RECIPE_MODULE:
        script = _recipe_in(arguments) or script
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(script).stem).strip("-._")[:100]
    return name if _RUN_NAME.fullmatch(name) else "run"


def _recipe_in(arguments: Sequence[str]) -> str | None:
    """The value of `--recipe`; None without it."""
    for word, following in zip_longest(arguments, arguments[1:]):
        if word == "--recipe":
            return following
        if word.startswith("--recipe="):
            return word.removeprefix("--recipe=")
    return None


def _without_empty_sections(data: dict[Any, Any]) -> dict[Any, Any]:
    """`search:` with nothing below it reads as None and means the defaults."""
    sections = ("search", "trial", "study")
    kept = {key: value for key, value in data.items() if not (key in sections and value is None)}
    search = kept.get("search")
    if isinstance(search, dict) and search.get("scaling", {}) in (None, "auto"):
        kept["search"] = {**search, "scaling": {}}
    return kept
