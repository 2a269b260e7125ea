"""A setting of GPUs that q.yaml names is refused on processors before anything is launched."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.gpu_settings import check_gpu_settings

OFFLOAD = {"NVTE_CPU_OFFLOAD_V1": "1"}


def check(device: str, environment: dict[str, str] | None = None, /, **search: object) -> None:
    config = parse_config({"device": device, "search": search}, where="q.yaml")
    check_gpu_settings(config, environment=environment or {})


@pytest.mark.parametrize(
    ("name", "values", "shown"),
    [
        ("overlap_moe_expert_parallel_comm", [False, True], "on"),
        ("moe_grouped_gemm", True, "on"),
        ("cuda_graph_modules", ["attn"], "attn"),
        ("moe_token_dispatcher", ["alltoall", "flex-hybridep"], "flex-hybridep"),
        ("offload_modules", ["none", "core_attn"], "core_attn"),
        ("optimizer_offload_fraction", [0.5], "0.5"),
        ("use_megatron_fsdp", [False, True], "on"),
    ],
)
def test_on_processors_it_is_refused_with_the_fix(name: str, values: object, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"search.{name}: {shown}; needs a GPU, .*leave it out, or tune"):
        check("cpu", **{name: values})
    check("cuda", OFFLOAD, **{name: values})


def test_what_asks_for_no_such_value_is_none_of_it() -> None:
    check("cpu")
    check("cpu", moe_grouped_gemm="auto", delay_wgrad_compute=False, overlap_grad_reduce=[True])
    check("cpu", moe_token_dispatcher=["stock", "allgather", "alltoall"])
    check("cpu", offload_modules=["stock", "none"])


def test_modules_are_offloaded_only_where_transformer_engine_reads_the_variable() -> None:
    reason = r"search.offload_modules: moe_act; needs NVTE_CPU_OFFLOAD_V1=1 in the environment"
    with pytest.raises(ConfigError, match=reason):
        check("cuda", offload_modules=["none", "moe_act"])
    check("cuda", OFFLOAD, offload_modules=["none", "moe_act"])
    check("cuda", offload_modules="none")
