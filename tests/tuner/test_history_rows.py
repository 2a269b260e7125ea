"""What a run's events say of its proposals."""

from quartet_plugin.tuner.history_rows import limits_of


def test_the_limits_of_the_latest_proposal_that_has_some() -> None:
    earlier = {"kind": "proposed", "cut_off": ["mappings: of 8 slots the named orders"]}
    later = {"kind": "proposed", "cut_off": ["custom schedules: of 3 layouts", 7]}
    assert limits_of([]) == ()
    assert limits_of([earlier, later, {"kind": "proposed"}, {"kind": "told"}]) == (
        "custom schedules: of 3 layouts",
    )
