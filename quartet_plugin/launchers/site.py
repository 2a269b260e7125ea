"""`site.yaml`: what a cluster asks of every job, written once: account, partition, container, environment."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.engine_points import installed_engines
from quartet_plugin.launchers.kubernetes_site import KubernetesSite, matching
from quartet_plugin.model.files import shown
from quartet_plugin.model.sections import Section, load_yaml, validate

_PLAIN = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_.,:@/+=#\[\]-]{0,199}")
# A program's path, which a remote shell reads.
_PROGRAM = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_./+-]{0,999}")
_OPTION = re.compile(r"--[a-z][a-z0-9-]{0,60}(=[A-Za-z0-9_.,:@/+=%\[\]-]{0,400})?")
_FACTORY = re.compile(r"[^\0\n\r]{1,4096}\.py:[A-Za-z_][A-Za-z0-9_]{0,200}")
_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}")
# Options that say what the launcher itself decides.
_RESERVED = (
    "array chdir error export export-file help job-name jobid nodelist nodes ntasks ntasks-per-node output "
    "overlap parsable test-only version wait wrap"
)


def _executor(value: str) -> str:
    if value not in ("local", "slurm") and not _FACTORY.fullmatch(value):
        raise ValueError("local, slurm, or FILE.py:FUNCTION")
    return value


def _options(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not _OPTION.fullmatch(value):
            raise ValueError("each an option like --qos=high, without spaces and quotes")
        if value[2:].partition("=")[0] in _RESERVED.split():
            raise ValueError(f"{value.partition('=')[0]} is the launcher's own")
    return values


def _variables(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name) or name.startswith("QUARTET_"):
            raise ValueError("names of letters, digits and _, not QUARTET_...")
        if any(character in value for character in "\0\n\r"):
            raise ValueError("values of one line")
    return values


def _engines(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name in values:
        if not _ENGINE.fullmatch(name):
            raise ValueError("names of launchers: letters, digits and _.-, at most 64")
    return values


Plain = Annotated[
    str,
    matching(_PLAIN, "letters, digits and _.,:@/+=#[]-, at most 200, beginning with a letter, a digit or /"),
]
Program = Annotated[str, matching(_PROGRAM, "a path of letters, digits and _./+-, at most 1000")]
Options = Annotated[tuple[str, ...], Field(max_length=100, strict=False), AfterValidator(_options)]
Variables = Annotated[dict[str, str], Field(max_length=1000), AfterValidator(_variables)]
Engines = Annotated[dict[str, dict[str, Any]], Field(max_length=100), AfterValidator(_engines)]


class SlurmSite(Section):
    """Options of Slurm; `minutes` is the time limit of the job of one trial (`slurm-batch`)."""

    account: Plain | None = Field(default=None, description="--account")
    partition: Plain | None = Field(default=None, description="--partition")
    qos: Plain | None = Field(default=None, description="--qos")
    constraint: Plain | None = Field(default=None, description="--constraint")
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="--gpus-per-node"
    )
    minutes: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        default=None, description="--time of the job of one trial"
    )
    container_image: Plain | None = Field(default=None, description="--container-image, of pyxis")
    container_mounts: Plain | None = Field(default=None, description="--container-mounts, of pyxis")
    job_options: Options = Field(default=(), description="more options of sbatch")
    step_options: Options = Field(default=(), description="more options of srun")

    def of_job(self) -> list[str]:
        """The options of sbatch."""
        named = {
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "constraint": self.constraint,
            "gpus-per-node": self.gpus_per_node,
            "time": self.minutes,
        }
        return [*_words(named), *self.job_options]

    def of_step(self) -> list[str]:
        """The options of srun."""
        named = {"container-image": self.container_image, "container-mounts": self.container_mounts}
        return [*_words(named), *self.step_options]


class SshSite(Section):
    """The hosts that `ssh` reaches without being asked anything; `config` is in the form of ssh_config(5)."""

    hosts: Annotated[tuple[Plain, ...], Field(min_length=1, max_length=10_000, strict=False)] = Field(
        description="host names, in the order of the ranks"
    )
    config: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="a file of ssh's options, for users, ports and keys"
    )


class RaySite(Section):
    """A Ray that runs already, and what a trial asks of each of its nodes."""

    address: Plain | None = Field(
        default=None, description="its address, as HOST:PORT; default: RAY_ADDRESS, or the Ray of this host"
    )
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="GPUs per node for a trial"
    )
    cpus_per_node: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1, description="CPUs per node for a trial"
    )
    grows: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="whether Ray adds nodes on demand; if so, a trial waits for them"
    )


class NemoRunSite(Section):
    """The executor with which NeMo-Run starts trials; `slurm` takes its options from the section `slurm`."""

    executor: Annotated[str, AfterValidator(_executor)] = Field(
        default="local", description="local, slurm, or FILE.py:FUNCTION, which returns an executor"
    )
    python: Program | None = Field(
        default=None, description="the python with NeMo-Run, if it is not the tuner's"
    )


class Site(Section):
    """All of `site.yaml`. `environment` is set for every trial; `python` starts on the nodes.

    What `engines` holds for a launcher of another package is plain data, which that launcher checks.
    """

    slurm: SlurmSite = Field(default=SlurmSite(), description="options of Slurm's jobs and steps")
    ssh: SshSite | None = Field(default=None, description="hosts, for launcher: ssh")
    nemo_run: NemoRunSite = Field(default=NemoRunSite(), description="for launcher: nemo-run")
    kubernetes: KubernetesSite | None = Field(
        default=None, description="jobs of Kubeflow, for launcher: kubernetes"
    )
    ray: RaySite = Field(default=RaySite(), description="nodes of a Ray, for launcher: ray")
    engines: Engines = Field(
        default={}, description="settings of launchers of other packages, by the launcher's name"
    )
    environment: Variables = Field(default={}, description="environment variables of every trial")
    python: Program | None = Field(
        default=None, description="the python on the nodes, if it differs from the tuner's"
    )

    def seen_from(self, folder: Path) -> "Site":
        """The site with its relative paths below `folder`: a run goes on from any other folder."""
        ssh, nemo_run = self.ssh, self.nemo_run
        if ssh is not None and ssh.config is not None:
            ssh = ssh.model_copy(update={"config": str(folder / ssh.config)})
        if _FACTORY.fullmatch(nemo_run.executor):
            nemo_run = nemo_run.model_copy(update={"executor": str(folder / nemo_run.executor)})
        return self.model_copy(update={"ssh": ssh, "nemo_run": nemo_run})


def read_site(path: Path | None) -> Site:
    """The site in `path`, or one that asks for nothing. Raises ConfigError in one line."""
    return Site() if path is None else parse_site(load_yaml(path), where=str(path))


def parse_site(data: object, *, where: str) -> Site:
    """Plain data as a site; an empty file asks for nothing. Raises ConfigError in one line."""
    if data is None:
        return Site()
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: a site is a mapping of sections; this is {shown(data)}")
    installed = {point.name for point in installed_engines()}
    for name in (key for key in data if key not in Site.model_fields):
        if name in installed:
            raise ConfigError(
                f"{where}: {name}: an installed launcher; write its settings under engines: {{{name}: ...}}"
            )
    return validate(Site, {key: value for key, value in data.items() if value is not None}, where=where)


def _words(named: Mapping[str, str | int | None]) -> list[str]:
    return [f"--{name}={value}" for name, value in named.items() if value is not None]
