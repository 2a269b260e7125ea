"""The pages of docs/ that follow from the code are what tools/reference_pages.py makes of it."""

import pytest

from quartet_plugin.cli.schedule_steps import at_uniform_costs
from quartet_plugin.errors import MEANINGS, ExitCode
from quartet_plugin.schedule.named import named
from tools import reference_pages


@pytest.mark.parametrize("name", sorted(reference_pages.PAGES_MADE))
def test_a_page_is_what_the_code_says(name: str) -> None:
    committed = (reference_pages.ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == reference_pages.PAGES_MADE[name](), "run: .venv/bin/python tools/reference_pages.py"


def test_every_exit_code_has_a_meaning() -> None:
    assert list(MEANINGS) == list(ExitCode)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32)])
def test_the_formulas_of_the_schedules_hold_at_unit_costs(p: int, m: int) -> None:
    """Waiting and activations of docs/schedule-table.md, where F, I and W take 1 each, with two chunks."""
    formulas = {
        "gpipe": (3 * (p - 1), m),
        "1f1b": (3 * (p - 1), p),
        "interleaved": (3 * (p - 1) / 2, p + (p - 1) / 2),
        "zb-h1": (p - 1, p),
        "zb-h2": (p - 1, 2 * p - 1),
    }
    for name, (waiting, activations) in formulas.items():
        simulation = at_uniform_costs(named(name, num_devices=p, num_microbatches=m))
        assert simulation.makespan_s - 3 * m == pytest.approx(waiting), name
        assert simulation.peak_activation_bytes.max() == pytest.approx(activations), name
