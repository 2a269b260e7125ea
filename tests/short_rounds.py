"""Studies of real trainings whose length no noise of the machine decides: the rounds and launches asked for.

Where launches scatter the final rounds go on, up to three times as many, and a trial whose iterations scatter
is launched once more. The rounds that go on are tested on the machine of arithmetic (`tests/tuner`), trials
that are measured once more with the training that is none (`tests/faults/test_rows.py`).
"""

import pytest

from quartet_plugin.trial import outcome
from quartet_plugin.tuner import finalists

# A process that is `quartet` with such rounds, by `python -c`.
SHORT_ENTRY = (
    "from quartet_plugin.trial import outcome; outcome.relative_spread = lambda times: 0.0; "
    "from quartet_plugin.tuner import finalists; finalists.MAX_EXTENDED = 1; "
    "from quartet_plugin.cli.main import entry; entry()"
)


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process end the final rounds after `study.rounds`, and take no trial as noisy."""
    monkeypatch.setattr(finalists, "MAX_EXTENDED", 1)
    monkeypatch.setattr(outcome, "relative_spread", lambda times: 0.0)
