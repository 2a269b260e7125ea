"""The record of each framework, by the name that plans have."""

from quartet_plugin.model.frameworks import DEEPSPEED, MEGATRON, capabilities


def test_records_go_by_the_name_in_plans() -> None:
    assert capabilities("megatron-core") is MEGATRON
    assert capabilities("deepspeed") is DEEPSPEED


def test_of_an_unknown_framework_the_seams_are_not_rechecked() -> None:
    unknown = capabilities("another-framework")
    assert (unknown.framework, unknown.title) == ("another-framework", "another-framework")
    assert not unknown.has_recheck
    assert unknown.stock_schedules == MEGATRON.stock_schedules
