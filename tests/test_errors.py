"""What an error says, and the table below it."""

from quartet_plugin.errors import ConfigError, PlanError, QuartetError


def refused(reason: str) -> PlanError:
    """An error with a table of two lines."""
    error = PlanError(reason)
    error.table = "0: 0F0\n1: [1F0]"
    return error


def raised_from(cause: QuartetError, text: str) -> QuartetError:
    """An error with the words of another."""
    try:
        raise ConfigError(text) from cause
    except ConfigError as error:
        return error


def test_a_message_is_one_line_whatever_it_holds() -> None:
    assert PlanError("a\nquartet: b").lines == ("a\nquartet: b",)
    assert str(PlanError("a")) == "a"


def test_a_table_has_lines_of_its_own() -> None:
    error = refused("deadlock")
    assert str(error) == "deadlock\n0: 0F0\n1: [1F0]"
    assert error.lines == ("deadlock", "0: 0F0", "1: [1F0]")


def test_so_it_has_in_an_error_that_passes_it_on() -> None:
    cause = refused("dead\nlock")
    assert raised_from(cause, f"plan: {cause}").lines == ("plan: dead\nlock", "0: 0F0", "1: [1F0]")
    assert raised_from(cause, "another\nreason").lines == ("another\nreason",)
