"""What ends a command from outside."""

import os
import signal
from collections.abc import Iterator

import pytest

from quartet_plugin.cli.signals import is_interruption, stop_on_signals


@pytest.fixture
def ignored_hangup() -> Iterator[None]:
    """As nohup starts a command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("ignored_hangup")
def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    told: list[str] = []
    with stop_on_signals(told.append) as should_stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()
    assert len(told) == 1
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_to_stop_and_the_second_interrupts(number: int) -> None:
    with stop_on_signals(lambda _: None) as should_stop:
        os.kill(os.getpid(), number)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_only_what_a_signal_raised_is_an_interruption() -> None:
    assert is_interruption(KeyboardInterrupt())
    assert not is_interruption(SystemError("of its own"))
    other = ValueError("a message")
    other.__cause__ = KeyboardInterrupt()
    assert not is_interruption(other)
