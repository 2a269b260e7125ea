"""Knobs of words: a member of an enumeration goes by its name, and `auto` and `stock` keep their meaning."""

import random
from argparse import Namespace
from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.layout import Setting
from quartet_plugin.space import config, layouts, plan_space
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs import registry
from quartet_plugin.space.knobs.knob import KnobContext, LiveJob, SettingKnob, Value, never_kept
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes


class Kernels(Enum):
    """Kernels of attention, as Megatron-Core names them."""

    flash = 1
    fused = 2
    auto = 3


def _fault(value: Value, context: KnobContext) -> str | None:
    return "must be flash here" if value == "auto" else None


KERNELS = SettingKnob(
    name="kernels",
    label="kernels",
    meaning="kernels of attention",
    kind="word",
    words=("auto", "flash", "fused"),
    axis=Axis.OPTIONS,
    change_class="B",
    rule="any",
    flag="--kernels",
    destination="kernels",
    default="stock",
    offers=lambda context: ("flash", "fused"),
    fault=_fault,
    kept=never_kept,
    read_back=lambda live: getattr(live.model, "kernels", None),
    framework=MEGATRON.framework,
)
SECTION: Any = config._axes("Axes", knobs=[KERNELS], has_defaults=True)
RULE: Any = config._axes("Rule", knobs=[KERNELS], has_defaults=False)


def test_a_member_of_an_enumeration_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS.read(Namespace(kernels=Kernels.fused)) == "fused"
    assert KERNELS.read(Namespace(kernels="fused")) == "fused"
    assert KERNELS.write("fused") == "fused"
    monkeypatch.setattr(registry, "LAYOUT_KNOBS", (KERNELS,))
    live = LiveJob(degrees={}, model=SimpleNamespace(kernels=Kernels.flash))
    assert registry.knobs_read_back(live, framework=MEGATRON.framework) == {"kernels": "flash"}
    assert registry.knobs_read_back(LiveJob(degrees={}), framework=MEGATRON.framework) == {}


def test_the_word_auto_is_written_as_a_list() -> None:
    assert SECTION.model_fields["kernels"].description == (
        "kernels of attention; write [auto] for its value auto; auto alone tunes it"
    )
    assert KERNELS.request_text("auto") == "[auto]"
    assert SECTION(kernels="auto").kernels is None
    assert SECTION(kernels=["auto"]).kernels == ("auto",)
    assert SECTION(kernels=["auto", "fused"]).kernels == ("auto", "fused")
    assert SECTION(kernels="stock").kernels == ("stock",)
    written = SECTION(kernels=["auto"]).model_dump(mode="json")
    assert SECTION(**written).kernels == ("auto",)
    with pytest.raises(ValidationError, match="kernels"):
        SECTION(kernels="other")


def test_in_a_rule_auto_is_a_word_or_refused() -> None:
    assert RULE(kernels="auto").kernels == ("auto",)
    for knob, data in (("tensor_parallel", {"data_parallel": 2}), ("schedule", {}), ("recompute", {})):
        with pytest.raises(ConfigError, match=f"search.forbid.{knob}: 'auto': must be a value or a list"):
            parse_config({"search": {"forbid": {knob: "auto", **data}}}, where="q.yaml")


def test_no_word_is_called_stock() -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher: the word stock is the command's own value"):
        replace(TOKEN_DISPATCHER, words=("allgather", "stock"))


def space_with(knob: SettingKnob, asked: tuple[str, ...] | None) -> Space:
    search = config.SearchConfig()
    # The section has no key for a knob of a test.
    object.__setattr__(search, knob.name, asked)
    job = replace(
        make_job(layout=make_layout(data_parallel=2)),
        settings=(Setting(name=knob.name, value="flash"),),
    )
    return build_space(job, nodes=make_nodes(4), search=search, run="r", seed=0)


def test_a_request_for_auto_is_named_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layouts, plan_space):
        monkeypatch.setattr(module, "OPTIONS", (KERNELS,))
    monkeypatch.setattr(layouts, "LAYOUT_KNOBS", (KERNELS,))
    space = space_with(KERNELS, None)
    plans = [space.decode(RandomParams(random.Random(seed)), trial=1) for seed in range(50)]
    assert {plan.layout.setting("kernels") for plan in plans} == {None, "fused"}
    with pytest.raises(ConfigError, match=r"search\.kernels: \[auto\]; must be flash here"):
        space_with(KERNELS, ("auto",))
