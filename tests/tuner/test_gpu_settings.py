"""A setting of GPUs that q.yaml names is refused on processors before anything is launched."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.gpu_settings import check_gpu_settings


def check(device: str, **search: object) -> None:
    check_gpu_settings(parse_config({"device": device, "search": search}, where="q.yaml"), environment={})


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("overlap_moe_expert_parallel_comm", [False, True], "on"),
        ("moe_grouped_gemm", True, "on"),
        ("cuda_graph_modules", ["attn"], "attn"),
        ("moe_token_dispatcher", ["alltoall", "flex-hybridep"], "flex-hybridep"),
    ],
)
def test_on_processors_it_is_refused_with_the_fix(name: str, values: object, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"search.{name}: {shown}; needs a GPU, .*leave it out, or tune"):
        check("cpu", **{name: values})
    check("cuda", **{name: values})


def test_what_asks_for_no_such_value_is_none_of_it() -> None:
    check("cpu")
    check("cpu", moe_grouped_gemm="auto", delay_wgrad_compute=False, overlap_grad_reduce=[True])
    check("cpu", moe_token_dispatcher=["stock", "allgather", "alltoall"])
