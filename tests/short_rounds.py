"""Studies of real trainings with as many final rounds as they ask for.

Where launches scatter the rounds go on, up to three times as many: the machine's noise would decide how long
a test takes. The rounds that go on are tested on the machine of arithmetic (`tests/tuner`).
"""

import pytest

from quartet_plugin.tuner import finalists

# A process that is `quartet` with such rounds, by `python -c`.
SHORT_ENTRY = (
    "from quartet_plugin.tuner import finalists; finalists.MAX_EXTENDED = 1; "
    "from quartet_plugin.cli.main import entry; entry()"
)


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the final rounds of this process end after `study.rounds`."""
    monkeypatch.setattr(finalists, "MAX_EXTENDED", 1)
