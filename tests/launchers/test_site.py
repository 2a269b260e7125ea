"""site.yaml: what a cluster asks of every job."""

from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.engines import engine_named
from quartet_plugin.launchers.site import parse_site, read_site


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("")
    site = read_site(tmp_path / "site.yaml")
    assert (site.slurm.of_job(), site.slurm.of_step(), site.ssh) == ([], [], None)


def test_options_are_words_of_their_own() -> None:
    slurm = {"account": "a1", "gpus_per_node": 8, "minutes": 30, "job_options": ["--exclusive"]}
    steps = {"container_image": "/images/megatron.sqsh", "step_options": ["--gpu-bind=none"]}
    site = parse_site({"slurm": {**slurm, **steps}}, where="s")
    assert site.slurm.of_job() == ["--account=a1", "--gpus-per-node=8", "--time=30", "--exclusive"]
    assert site.slurm.of_step() == ["--container-image=/images/megatron.sqsh", "--gpu-bind=none"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"slurm": {"account": "$(touch x)"}}, r"slurm\.account: '\$\(touch x\)'"),
        ({"slurm": {"account": "-x"}}, "slurm.account"),
        ({"slurm": {"partition": "a b"}}, "slurm.partition"),
        ({"slurm": {"qos": "high\n"}}, "slurm.qos"),
        ({"slurm": {"account": "x" * 300}}, "slurm.account"),
        ({"slurm": {"container_image": "caf\u00e9"}}, "slurm.container_image"),
        ({"slurm": {"job_options": ["--wrap=rm"]}}, "--wrap is the launcher's own"),
        ({"slurm": {"job_options": ["--nodes=4"]}}, "--nodes is the launcher's own"),
        ({"slurm": {"job_options": ["--comment=$HOME"]}}, "without spaces and quotes"),
        ({"slurm": {"step_options": ["-N4"]}}, "each an option like --qos=high"),
        ({"environment": {"A B": "x"}}, "names of letters"),
        ({"environment": {"A": "x\ny"}}, "values of one line"),
        ({"environment": {"QUARTET_START": "x"}}, "not QUARTET_"),
        ({"ssh": {"hosts": ["-oProxyCommand=x"]}}, "ssh.hosts"),
        ({"ssh": {"hosts": []}}, "ssh.hosts"),
        ({"python": "python; x"}, "python"),
        ({"kubernetes": {"kind": "job"}}, "kubernetes.kind"),
        ({"kubernetes": {"kind": "pytorchjob"}}, "write image: too"),
        ({"kubernetes": {"volumes": [{"path": "/x"}]}}, "name one of claim and host"),
        ({"kubernetes": {"volumes": [{"claim": "a", "host": "/b", "path": "/x"}]}}, "name one of claim"),
        ({"kubernetes": {"volumes": [{"claim": "a", "path": "/x/../y"}]}}, "an absolute path"),
        ({"kubernetes": {"gpus_per_node": 8, "resources": {"nvidia.com/gpu": 8}}}, "requested twice"),
        ({"slurm": {"acount": "a1"}}, "acount"),
        ({"engines": {"a b": {}}}, "names of launchers"),
        ({"engines": {"flux": "queue"}}, "engines.flux"),
        ([], "a site is a mapping"),
    ],
)
def test_what_a_shell_or_slurm_could_read_otherwise_is_refused(data: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_site(data, where="s")


def test_settings_of_another_packages_launcher_are_plain_data() -> None:
    """They are refused where no such launcher is installed, or where it has a section of its own."""
    site = parse_site({"engines": {"flux": {"queue": "batch", "urgency": 16}}}, where="s")
    assert site.engines["flux"] == {"queue": "batch", "urgency": 16}
    with pytest.raises(ConfigError, match=r"engines\.flux: no launcher of this name is installed"):
        engine_named("ssh", site=site)
    own = parse_site({"engines": {"ssh": {}}}, where="s")
    with pytest.raises(ConfigError, match=r"engines\.ssh: a launcher of this package has its own section"):
        engine_named("ssh", site=own)
