"""The axes that are tuned of public performance recipes."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.space.features import Axis
from tests.megatron.recipes import GOAL, axes_of_recipe, is_hardly_tuned, words_of

# A file of recipes, which this repository does not have.
VARIABLE = "QUARTET_RECIPES"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_at_most_a_tenth_of_recipes_have_few_axes() -> None:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no file of recipes")
    recipes = json.loads(Path(os.environ[VARIABLE]).read_text())["recipes"]
    few = [recipe["recipe"] for recipe in recipes if is_hardly_tuned(axes_of_recipe(recipe))]
    assert recipes
    assert len(few) <= GOAL * len(recipes), few


def test_a_recipe_becomes_flags_of_its_own_model() -> None:
    words = words_of(_recipe())
    for flag, value in (("--num-experts", "128"), ("--hidden-size", "2880"), ("--moe-router-topk", "4")):
        assert words[words.index(flag) + 1] == value
    assert is_hardly_tuned("not read")
    assert is_hardly_tuned({Axis.DEGREES})
    assert not is_hardly_tuned({Axis.DEGREES, Axis.MAPPING, Axis.SPLIT})


def _recipe() -> Mapping[str, Any]:
    degrees = {"tp": 1, "pp": 4, "cp": 1, "ep": 16, "vpp": None, "mbs": 1, "gbs": 512}
    return {
        "model": "gpt_oss_120b",
        "gpus": 64,
        **degrees,
        "knobs": {"moe_token_dispatcher_type": "flex"},
        "precision_and_variant": "bf16",
    }
