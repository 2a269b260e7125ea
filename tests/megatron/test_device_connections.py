"""CUDA_DEVICE_MAX_CONNECTIONS is set where a plan first needs it, and nowhere else."""

from argparse import Namespace
from pathlib import Path

import pytest

from quartet_plugin.megatron.device_connections import VARIABLE, device_architecture, set_connections


def args(*, tensor: int = 1, context: int = 1, **others: bool) -> Namespace:
    return Namespace(tensor_model_parallel_size=tensor, context_parallel_size=context, **others)


@pytest.mark.parametrize("planned", [args(tensor=2), args(context=2)])
@pytest.mark.parametrize(("architecture", "is_set"), [(9, True), (None, True), (10, False), (12, False)])
def test_the_variable_is_set_before_blackwell_where_the_plan_raises_tp_or_cp(
    planned: Namespace, architecture: int | None, is_set: bool
) -> None:
    environment: dict[str, str] = {}
    notes = set_connections(args(), planned, environment=environment, architecture=lambda: architecture)
    assert environment == ({VARIABLE: "1"} if is_set else {})
    assert len(notes) == is_set


def test_another_value_is_replaced_and_named() -> None:
    environment = {VARIABLE: "8"}
    (note,) = set_connections(args(), args(tensor=2), environment=environment, architecture=lambda: 9)
    assert environment == {VARIABLE: "1"}
    assert ", not 8" in note


@pytest.mark.parametrize(
    ("user", "planned", "environment"),
    [
        (args(), args(), {}),
        (args(tensor=2), args(tensor=4), {}),
        (args(), args(tensor=2), {VARIABLE: "1"}),
        (args(), args(tensor=2, overlap_moe_expert_parallel_comm=True), {VARIABLE: "32"}),
        (args(), args(tensor=2, use_megatron_fsdp=True), {}),
    ],
)
def test_the_variable_is_left_alone_elsewhere(
    user: Namespace, planned: Namespace, environment: dict[str, str]
) -> None:
    before = dict(environment)

    def never() -> int:
        raise AssertionError("the GPU was asked without need")

    assert set_connections(user, planned, environment=environment, architecture=never) == []
    assert environment == before


def test_the_variable_is_unset_where_the_plan_turns_megatron_fsdp_on() -> None:
    sharded = args(tensor=2, use_megatron_fsdp=True)
    environment = {VARIABLE: "1"}
    (note,) = set_connections(args(tensor=2), sharded, environment=environment, architecture=lambda: 10)
    assert environment == {}
    assert note == f"{VARIABLE} is unset, not 1: Megatron refuses 1 with --use-megatron-fsdp"
    # What the command says itself is left to Megatron, and other values are no matter.
    for user, value in ((sharded, "1"), (args(tensor=2), "32")):
        environment = {VARIABLE: value}
        assert set_connections(user, sharded, environment=environment, architecture=lambda: 9) == []
        assert environment == {VARIABLE: value}


def test_the_variable_is_set_where_the_plan_turns_megatron_fsdp_off() -> None:
    environment: dict[str, str] = {}
    user = args(tensor=2, use_megatron_fsdp=True)
    assert set_connections(user, args(tensor=2), environment=environment, architecture=lambda: 9)
    assert environment == {VARIABLE: "1"}


@pytest.mark.parametrize(
    ("script", "major"), [("echo 9.0; echo 9.0", 9), ("echo 10.3", 10), ("echo N/A", None), ("exit 6", None)]
)
def test_the_architecture_is_asked_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, major: int | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert device_architecture() == major


def test_a_machine_without_nvidia_smi_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_architecture() is None
