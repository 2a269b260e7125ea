"""The samplers that a study can have, by name.

Each is made anew for every trial from a seed of that trial, and keeps nothing between trials: what it
proposes follows from the finished trials alone, so that a resumed run proposes as if it had not stopped.
"""

from importlib.util import find_spec
from typing import Any, Literal, get_args

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import nearest_word

SamplerName = Literal["tpe", "gp", "qmc", "nsga2", "random"]

NAMES: tuple[SamplerName, ...] = get_args(SamplerName)
DEFAULT: SamplerName = "tpe"

# Finished trials from which on a model is made of them; also a generation of the evolutionary one. Studies
# are short, so these are smaller than Optuna's own.
NUM_STARTUP_TRIALS = 8

_PACKAGES: dict[SamplerName, tuple[str, ...]] = {"gp": ("scipy", "torch"), "qmc": ("scipy",)}
_REFUSED = {
    "cmaes": "stores its state in the study as pickled code, which quartet never reads",
    "grid": "needs a grid, but the choices of a plan depend on each other",
    "bruteforce": "cannot enumerate the end loads, which are real numbers",
    "partialfixed": "fixes values, as single values in `search` do",
    "nsga3": "is for several objectives; a study has one",
    "nsgaiii": "is for several objectives; a study has one",
}


def check_name(value: object) -> SamplerName:
    """`value` where it names a sampler. Raises ConfigError: the value, the rule and what to take."""
    for name in NAMES:
        if value == name:
            return name
    spelled = "".join(char for char in str(value).lower() if char.isalnum()).removesuffix("sampler")
    reason = _REFUSED.get(spelled)
    words = f"{reason}: take {_listed(NAMES)}"
    if reason is None:
        words = f"must be {_listed(NAMES)}{nearest_word(value, known=NAMES)}"
    raise ConfigError(f"study.sampler: {str(value)[:40]!r}: {words}")


def check_installed(name: SamplerName) -> None:
    """Raise ConfigError where a package that the sampler needs is not installed."""
    for package in _PACKAGES.get(name, ()):
        if find_spec(package) is None:
            raise ConfigError(
                f"study.sampler: {name!r}: needs {package}, which is not installed; "
                f"pip install {package}, or take {DEFAULT}"
            )


def make(name: SamplerName, *, seed: int, study_seed: int = 0, is_parallel: bool = False) -> Any:
    """The Optuna sampler called `name` for one trial, seeded with `seed`.

    `study_seed` is the same for all trials of a study: the sequence of `qmc` is one for all. `is_parallel`
    says that other trials run meanwhile, which `tpe` then keeps away from. Raises ConfigError where a package
    is missing.
    """
    import warnings

    import optuna

    check_installed(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            return optuna.samplers.TPESampler(
                seed=seed,
                n_startup_trials=NUM_STARTUP_TRIALS,
                multivariate=True,
                group=True,
                constant_liar=is_parallel,
            )
        if name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
    from quartet_plugin.study.grouped_sampler import GroupedSampler

    return GroupedSampler(name, seed=seed, study_seed=study_seed, num_startup_trials=NUM_STARTUP_TRIALS)


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
