"""Engines by name: the entry points of the group `quartet_plugin.engines`, loaded when they are named."""

from importlib.metadata import EntryPoint

from quartet_plugin.errors import ConfigError, QuartetError
from quartet_plugin.launchers.engine_points import GROUP, installed_engines
from quartet_plugin.launchers.protocol import Engine
from quartet_plugin.launchers.site import Site
from quartet_plugin.model.schema import nearest_word

# This machine alone: no engine, its processes are started and ended directly.
LOCAL = "local"
OF_SLURM = ("slurm", "slurm-batch")
# The engines of this package, which are there without an installed distribution too.
_OURS = {
    "kubernetes": "quartet_plugin.launchers.kubernetes:engine",
    "nemo-run": "quartet_plugin.launchers.nemo_run:engine",
    "ray": "quartet_plugin.launchers.ray:engine",
    "slurm": "quartet_plugin.launchers.slurm:engine",
    "slurm-batch": "quartet_plugin.launchers.slurm_batch:engine",
    "ssh": "quartet_plugin.launchers.ssh:engine",
}
_METHODS = ("divide", "launcher", "adopt")


def engine_names() -> tuple[str, ...]:
    """The names that a configuration may give, this machine first."""
    installed = {point.name for point in installed_engines()}
    return (LOCAL, *sorted({*_OURS, *installed}))


def engine_named(name: str, *, site: Site) -> Engine:
    """The engine on a site.

    Raises ConfigError for a name that none has, in the site's `engines` too, and for an engine of another
    package that cannot be loaded or is none.
    """
    _check_settings(site)
    points = [point for point in installed_engines() if point.name == name]
    if not points and name in _OURS:
        points = [EntryPoint(name=name, value=_OURS[name], group=GROUP)]
    if not points:
        near = nearest_word(name, known=engine_names())
        raise ConfigError(f"launcher: {name!r}; must be one of {', '.join(engine_names())}{near}")
    return _loaded(points[0], site=site)


def _loaded(point: EntryPoint, *, site: Site) -> Engine:
    """The engine of an entry point, whose module and function may fail in any way."""
    origin = "" if point.dist is None else f" (of distribution {point.dist.name})"
    where = f"launcher: {point.name}{origin}"
    try:
        engine: Engine = point.load()(site)
    except QuartetError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{where}: {point.value} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(engine, method, None))]
    if missing:
        raise ConfigError(
            f"{where}: {point.value} returns a {type(engine).__name__} without {', '.join(missing)}; "
            "it must return an Engine (quartet_plugin/launchers/protocol.py)"
        )
    return engine


def _check_settings(site: Site) -> None:
    """Raises ConfigError for settings of a launcher that is not installed, or has a section of its own."""
    for name in site.engines:
        if name in _OURS or name == LOCAL:
            raise ConfigError(f"site.yaml: engines.{name}: a launcher of this package has its own section")
        if name not in engine_names():
            near = nearest_word(name, known=engine_names())
            raise ConfigError(f"site.yaml: engines.{name}: no launcher of this name is installed{near}")
