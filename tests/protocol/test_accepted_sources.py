"""Which changed functions of a framework are accepted."""

from quartet_plugin.protocol.accepted_sources import (
    EVERY_FUNCTION,
    accepted_text,
    accepts,
    function_text,
    paths_of,
)

FIRST, CHANGED_AGAIN = function_text("a.f", "0123456789abcdef"), function_text("a.f", "fedcba9876543210")
SECOND, ABSENT = function_text("a.C.g", "00000000ffffffff"), function_text("a.h", "")


def test_the_option_accepts_every_function() -> None:
    assert accepts(EVERY_FUNCTION, [FIRST, SECOND, ABSENT])
    assert accepts("yes", [FIRST])
    assert not accepts(None, [])
    assert not accepts("", [FIRST])


def test_a_text_of_functions_accepts_these_sources_alone() -> None:
    text = accepted_text([SECOND, FIRST, ABSENT, FIRST])
    assert text == accepted_text([FIRST, SECOND, ABSENT])
    assert accepts(text, [FIRST])
    assert accepts(text, [FIRST, SECOND, ABSENT])
    assert not accepts(text, [FIRST, CHANGED_AGAIN])
    assert not accepts(text, [function_text("a.f", "")])
    assert paths_of([FIRST, CHANGED_AGAIN, SECOND]) == ["a.f", "a.C.g"]
