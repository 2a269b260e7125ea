"""A search of shapes on a DeepSpeed command is refused before a launch where no function makes the layers."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.layer_builder import check_layer_builder

DEEPSPEED = "deepspeed --num_gpus 2 train.py"


def check(folder: Path, words: str, *, section: Any = None, **search: Any) -> None:
    config = {"train_batch_size": 8} | ({} if section is None else {"quartet": section})
    (folder / "ds.json").write_text(json.dumps(config))
    asked = parse_config({"search": search}, where="test").search
    check_layer_builder(asked, command=parse_command(words.split()), cwd=folder)


@pytest.mark.parametrize(
    ("words", "section", "refusal"),
    [
        (DEEPSPEED, None, "names no ds_config file"),
        (f"{DEEPSPEED} --deepspeed_config ds.json", None, "ds.json names no quartet.layer_builder"),
        (f"{DEEPSPEED} --deepspeed_config ds.json", {"plan": "auto"}, "names no quartet.layer_builder"),
        (f"{DEEPSPEED} --deepspeed_config ds.json", {"layer_builder": "a b"}, "layer_builder"),
        ("torchrun --nproc-per-node 2 train.py --deepspeed_config ds.json", None, "remove scaling"),
        (f"{DEEPSPEED} --deepspeed_config other.json", None, "other.json is no file, and no JSON object in"),
        (f"{DEEPSPEED} --deepspeed_config ds.json", {"layer_builder": "layers_of"}, None),
        ("torchrun --nproc-per-node 2 pretrain_gpt.py", None, None),
    ],
)
def test_shapes_need_a_function(tmp_path: Path, words: str, section: Any, refusal: str | None) -> None:
    check(tmp_path, words, section=section)
    if refusal is None:
        check(tmp_path, words, section=section, scaling={})
        return
    with pytest.raises(ConfigError, match=refusal):
        check(tmp_path, words, section=section, scaling={})


@pytest.mark.parametrize("name", ["layers_of", None])
def test_the_function_may_be_named_in_base64(tmp_path: Path, name: str | None) -> None:
    """DeepSpeed takes the text of a ds_config in base64, too."""
    config = {"train_batch_size": 8} | ({} if name is None else {"quartet": {"layer_builder": name}})
    text = base64.b64encode(json.dumps(config).encode()).decode()
    words = f"{DEEPSPEED} --deepspeed_config={text}"
    if name is not None:
        check(tmp_path, words, scaling={})
        return
    with pytest.raises(ConfigError, match=r"names no quartet\.layer_builder"):
        check(tmp_path, words, scaling={})
