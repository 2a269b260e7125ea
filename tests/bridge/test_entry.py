"""The entry of Megatron-Bridge: what `pretrain` is handed, and which commands come to it."""

import os
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.bridge.entry import PRETRAIN, wrap
from quartet_plugin.errors import SeamError
from quartet_plugin.launchers.command import BRIDGE_MODULE, DEEPSPEED_MODULE, ENTRY_MODULE, parse_command
from quartet_plugin.model.megatron_arguments import features_of
from quartet_plugin.rank.entry_options import EntryCommand, EntryOptions
from quartet_plugin.rank.rendezvous import RankEnv
from quartet_plugin.rank.session import Session
from quartet_plugin.tuner.compared_trials import why_nothing_is_kept
from tests.bridge.configurations import make_config

SESSION_COMMAND = EntryCommand(
    target="train.py", is_module=False, arguments=(), options=EntryOptions(device="cuda")
)


class Manager:
    """The Bridge's CallbackManager, as far as `pretrain` is handed one."""

    def __init__(self) -> None:
        self.added: list[Any] = []

    def add(self, callback: Any) -> None:
        self.added.append(callback)


def wrapped(session: Session) -> ModuleType:
    """A module of the Bridge whose `pretrain` returns what it was handed."""
    module = ModuleType(PRETRAIN)

    def pretrain(config: Any, forward_step_func: Any, callbacks: Any = None) -> Any:
        return config, forward_step_func, callbacks

    module.pretrain = pretrain  # type: ignore[attr-defined]
    wrap(session, module, on_cpu=False)
    return module


def make_session(meter: Any = None) -> Session:
    """A process of a trial where it has a meter."""
    return Session(command=SESSION_COMMAND, rank_env=RankEnv.of(os.environ), meter=meter)


def test_without_a_plan_and_a_trial_nothing_is_changed() -> None:
    config = make_config()
    before = repr(config)
    assert wrapped(make_session()).pretrain(config, "step") == (config, "step", None)
    assert repr(config) == before


@pytest.mark.parametrize("callbacks", [None, ["user's"]])
def test_a_trial_adds_its_callback_behind_the_users(callbacks: list[str] | None) -> None:
    meter = SimpleNamespace(callback=lambda: "meter", left_out=lambda *_, **__: None)
    config = make_config()
    _, step, handed = wrapped(make_session(meter)).pretrain(config, "step", callbacks)
    assert (step, handed) == ("step", [*(callbacks or []), "meter"])
    assert config.checkpoint.save is None


def test_a_trial_reports_what_it_leaves_out_as_the_user_wrote_it() -> None:
    handed: list[Any] = []

    def left_out(names: list[str], *, as_written: Namespace) -> None:
        handed.extend((names, features_of(as_written)))

    config = make_config(inprocess_restart=SimpleNamespace(enabled=True))
    meter = SimpleNamespace(callback=lambda: "meter", left_out=left_out)
    wrapped(make_session(meter)).pretrain(config, "step")
    names, features = handed
    assert "inprocess_restart" in names
    assert config.inprocess_restart is None
    assert features == ["inprocess_restart"]


def test_a_manager_of_callbacks_stays_the_users() -> None:
    meter = SimpleNamespace(callback=lambda: "meter", left_out=lambda *_, **__: None)
    manager = Manager()
    module = wrapped(make_session(meter))
    assert module.pretrain(config=make_config(), forward_step_func="s", callbacks=manager)[2] is manager
    assert manager.added == ["meter"]


def test_a_bridge_without_callbacks_is_refused() -> None:
    module = ModuleType(PRETRAIN)
    module.pretrain = lambda config, step: None  # type: ignore[attr-defined]
    with pytest.raises(SeamError, match="takes no callbacks"):
        wrap(make_session(), module, on_cpu=False)


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("from megatron.bridge.training.pretrain import pretrain\n", BRIDGE_MODULE),
        ("def main():\n    import megatron.bridge.recipes.llama as recipes\n", BRIDGE_MODULE),
        ("from megatron import bridge\n", BRIDGE_MODULE),
        ("import megatron.bridgehead\n", ENTRY_MODULE),
        ("from megatron.training import pretrain\n", ENTRY_MODULE),
        ("no python", ENTRY_MODULE),
    ],
)
def test_a_script_that_imports_the_bridge_comes_to_its_entry(tmp_path: Path, text: str, entry: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    command = parse_command(["torchrun", "--nproc-per-node", "2", str(script), "--recipe", "llama3_8b"])
    assert command.entry == entry
    assert command.wrapped(["--quartet-plan", "p"])[3:] == [
        *("-m", entry, str(script)),
        *("--recipe", "llama3_8b", "--quartet-plan", "p"),
    ]


def test_trial_0_keeps_no_weights() -> None:
    command = parse_command(["torchrun", "-m", BRIDGE_MODULE, "train.py"])
    assert str(why_nothing_is_kept(command)).endswith("this command uses Megatron-Bridge")


def test_the_entry_may_be_named_and_a_ds_config_is_deepspeeds(tmp_path: Path) -> None:
    named = parse_command(["torchrun", "-m", BRIDGE_MODULE, "-m", "pkg.train"])
    assert (named.entry, named.target, named.is_module, named.is_wrapped) == (
        BRIDGE_MODULE,
        "pkg.train",
        True,
        True,
    )
    script = tmp_path / "train.py"
    script.write_text("import megatron.bridge\n")
    words = ["torchrun", str(script), "--deepspeed_config", "ds.json"]
    assert parse_command(words).entry == DEEPSPEED_MODULE
