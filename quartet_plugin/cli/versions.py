"""Whether the installed libraries are those that this release was written for."""

from importlib.metadata import PackageNotFoundError, requires, version

from quartet_plugin.errors import SeamError

DISTRIBUTION = "quartet-plugin"

# Not here: the frameworks, whose own versions the ranks check where they are used.
CHECKED = frozenset({"numba", "numpy", "optuna", "psutil", "pydantic", "scipy", "torch"})


def check_versions() -> None:
    """Raise SeamError where a library is installed in a version outside of the declared range.

    One that is not installed is another matter: whatever needs it says so.
    """
    from packaging.requirements import Requirement

    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return  # run from a source tree that was never installed: nothing is declared
    for requirement in map(Requirement, declared):
        name = requirement.name.lower()
        if name not in CHECKED:
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            raise SeamError(
                f"{name} {installed}: not supported, must be {requirement.specifier}; "
                f"pip install '{name}{requirement.specifier}'"
            )
