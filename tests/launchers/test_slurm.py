"""Trials as steps of a real allocation, and as jobs of their own, on a real Slurm of four nodes."""

import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import slurm, slurm_batch
from quartet_plugin.launchers.engines import engine_named, engine_names
from quartet_plugin.launchers.protocol import Engine
from quartet_plugin.launchers.site import Site
from quartet_plugin.protocol.environment import START
from quartet_plugin.testing.launchers import LauncherConformance
from tests.cli.tuning import prepare
from tests.launchers.slurm_cluster import SlurmCluster
from tests.rank.hooked import assert_found, environment, make_site, start_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.usefixtures("allocation")
class TestSteps(LauncherConformance):
    """Inside of an allocation."""

    def engine(self) -> Engine:
        """The allocation's nodes."""
        return slurm.engine(Site())


@pytest.mark.usefixtures("outside_of_jobs")
class TestJobs(LauncherConformance):
    """One job for each attempt."""

    def engine(self) -> Engine:
        """The queue."""
        return slurm_batch.engine(Site())


def test_tasks_of_srun_are_found_with_their_ranks(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import megatron.training\nprint('trained')\n")
    site = make_site(tmp_path)
    start = start_file(tmp_path / "attempt", "--quartet-trial", "missing.json")
    variables = environment(site, **{START: str(start), "SLURM_CONF": cluster.environment["SLURM_CONF"]})
    assert_found(
        ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-u", "train.py"],
        tmp_path,
        variables,
        world_size=2,
        variable="SLURM_PROCID",
        timeout_s=100,
    )


@pytest.mark.usefixtures("allocation")
def test_the_nodes_are_divided_in_order() -> None:
    engine = engine_named("slurm", site=Site())
    assert engine.divide(num_nodes=2, at_once=2) == (("n1", "n2"), ("n3", "n4"))
    with pytest.raises(
        ConfigError, match=r"3 trials at once of 2 nodes need 6, and the allocation has 4; ask"
    ):
        engine.divide(num_nodes=2, at_once=3)


@pytest.mark.usefixtures("outside_of_jobs")
def test_outside_of_an_allocation_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="salloc, or a script for sbatch"):
        engine_named("slurm", site=Site()).divide(num_nodes=1, at_once=1)


@pytest.mark.usefixtures("allocation")
def test_a_heterogeneous_job_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(ConfigError, match="heterogeneous"):
        engine_named("slurm", site=Site()).divide(num_nodes=1, at_once=1)


def test_engines_by_name() -> None:
    assert {"local", "slurm", "slurm-batch"} <= set(engine_names())
    with pytest.raises(ConfigError, match="must be one of local"):
        engine_named("lsf", site=Site())


def test_nothing_is_queued_at_the_end(cluster: SlurmCluster) -> None:
    assert cluster.run("squeue", "-h", "--states=RUNNING,PENDING") == ""


def test_paths_are_not_filename_patterns(tmp_path: Path) -> None:
    launcher = slurm_batch.SlurmBatchLauncher(1, Site())
    words = launcher.words(["x"], attempt_id="0" * 32, cwd=tmp_path, stdout=tmp_path / "%j" / "out")
    assert f"--output={tmp_path}/%%j/out" in words


@pytest.mark.usefixtures("allocation")
def test_a_dry_run_shows_what_slurm_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, command = prepare(tmp_path)
    more = ["--launcher", "slurm", "--trial-nodes", "2", "--dry-run"]
    assert main([*options, *more, "--", *command]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("launcher ")]
    assert "srun --jobid=" in line
    assert "--nodelist=n1,n2" in line
    assert not (tmp_path / "runs").exists()
