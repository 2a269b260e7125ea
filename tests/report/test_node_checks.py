"""The table of nodes: what is well, what differs, and what to do about it."""

from typing import Any

import pytest

from quartet_plugin.report.node_checks import CheckRow, check_rows, table_lines


def facts_of(index: int, **changes: Any) -> dict[str, Any]:
    """A node of eight GPUs that is well."""
    facts: dict[str, Any] = {
        "host": f"n{index}",
        "index": index,
        "num_nodes": 2,
        "port": 23000,
        "python": "3.12.1",
        "packages": {"quartet-plugin": "0.1", "torch": "2.11.0", "nvidia-nccl-cu12": "2.28.9"},
        "programs": ["srun", "nvidia-smi"],
        "num_cores": 96,
        "devices": ["NVIDIA H100 80GB HBM3"] * 8,
        "driver": "NVRM version 570",
        "ports": {"mlx5_0:1": "4: ACTIVE, 400 Gb/sec"},
        "interfaces": {"eth0": "up"},
        "limits": {"open files": -1, "processes": -1, "locked memory": -1, "shared memory": 2**36},
        "free_bytes": {"/shared": 2**40},
        "storage_s": 0.01,
        "product_s": [3.0e-3] * 7 + [3.1e-3],
        "nccl_variables": [],
        "nccl_values": {},
    }
    if index:
        facts["clock_offset_s"] = 0.002
    return {**facts, **changes}


def rows_of(*changes: dict[str, Any], expected: int | None = None) -> dict[str, CheckRow]:
    facts = {f"n{index}": facts_of(index, **change) for index, change in enumerate(changes)}
    names = [f"n{index}" for index in range(expected or len(changes))]
    return {row.check: row for row in check_rows(facts, expected=names)}


def test_nodes_that_are_alike_are_well() -> None:
    rows = rows_of({}, {})
    assert {row.state for row in rows.values()} == {"ok"}
    assert rows["devices"].finding == "8 x NVIDIA H100 80GB HBM3"
    assert rows["port"].finding == "all reach the first node on 23000"
    assert not any(row.fix for row in rows.values())


@pytest.mark.parametrize(
    ("check", "state", "change", "found"),
    [
        ("packages", "fail", {"packages": {"torch": "2.9.0"}}, "torch: 2.11.0 on n0; 2.9.0 on n1"),
        ("devices", "fail", {"devices": ["NVIDIA H100 80GB HBM3"] * 7}, "7 x NVIDIA H100 80GB HBM3 on n1"),
        ("speed", "warn", {"product_s": [3.0e-3] * 7 + [4.65e-3]}, "n1: computations take 1.50x the usual"),
        ("python", "warn", {"python": "3.11.0"}, "3.12.1 on n0; 3.11.0 on n1"),
        ("driver", "warn", {"driver": "NVRM version 550"}, "NVRM version 550 on n1"),
        ("links", "warn", {"ports": {"mlx5_0:1": "1: DOWN, 10 Gb/sec"}}, "n1 mlx5_0:1 (1: DOWN"),
        ("links", "warn", {"ports": {}}, "0 InfiniBand or RoCE ports on n1"),
        ("network", "warn", {"interfaces": {"ib0": "up"}}, "ib0 on n1"),
        ("port", "fail", {"unreached": "port 23000 of n0: Connection refused"}, "n1: port 23000 of n0"),
        ("clock", "warn", {"clock_offset_s": -7.5}, "at most 7.500 s apart (n1)"),
        ("storage", "warn", {"storage_s": 3.0}, "at most 3.000 s (n1)"),
        ("disk", "fail", {"free_bytes": {"/tmp": 2**30}}, "at least 1.0 GiB free (n1 /tmp)"),
        (
            "limits",
            "warn",
            {"limits": {"open files": 1024, "processes": -1, "locked memory": -1}},
            "n1 open files 1024",
        ),
        (
            "limits",
            "fail",
            {"limits": {"open files": -1, "processes": -1, "locked memory": 65536}},
            "n1 locked memory 65536",
        ),
        ("nccl", "fail", {"packages": {"nvidia-nccl-cu12": "2.10.3"}}, "2.10.3: all-gathers corrupt data"),
        (
            "variables",
            "warn",
            {"nccl_variables": ["NCCL_IB_DISABLE"], "nccl_values": {"NCCL_IB_DISABLE": "1"}},
            "NCCL_IB_DISABLE: none on n0; 1 on n1",
        ),
        # Of an earlier release.
        ("variables", "warn", {"nccl_variables": ["NCCL_ALGO"]}, "NCCL_ALGO: none on n0; set on n1"),
    ],
)
def test_what_is_not_well_is_named_with_the_node_and_what_to_do(
    check: str, state: str, change: dict[str, Any], found: str
) -> None:
    row = rows_of({}, change)[check]
    assert row.state == state
    assert found in row.finding
    assert row.fix


def with_nccl(**values: str) -> dict[str, Any]:
    """A node with these variables, by their names without NCCL_."""
    named = {f"NCCL_{name}": value for name, value in values.items()}
    return {"nccl_variables": sorted(named), "nccl_values": named}


def test_values_of_nccls_variables_are_compared() -> None:
    nodes = [
        with_nccl(IB_HCA=hca, DEBUG="INFO", HOSTID=str(index), ALGO="")
        for index, hca in enumerate(["mlx5_0", "mlx5_1", "mlx5_0"])
    ]
    row = rows_of(*nodes)["variables"]
    assert (row.state, row.finding) == ("warn", "NCCL_IB_HCA: mlx5_0 on n0, n2; mlx5_1 on n1")
    alike = rows_of(*[nodes[0]] * 2)["variables"]
    assert (alike.state, alike.finding) == ("ok", "NCCL_ALGO, NCCL_DEBUG, NCCL_IB_HCA")
    emptied = rows_of(with_nccl(ALGO=""), with_nccl(ALGO="Ring"))["variables"]
    assert emptied.finding == 'NCCL_ALGO: "" on n0; Ring on n1'
    many = {f"NAME{index}": "1" for index in range(8)}
    assert rows_of(with_nccl(**many), {})["variables"].finding.endswith("; and 2 more")


def test_a_node_without_an_answer_fails() -> None:
    row = rows_of({}, {}, expected=4)["nodes"]
    assert (row.state, row.finding) == ("fail", "2 of 4 answered; nothing of n2, n3")
    assert [row.check for row in check_rows({}, expected=["n0"])] == ["nodes"]


def test_nodes_without_accelerators_and_packages_are_told_apart() -> None:
    rows = rows_of({"devices": [], "packages": {"torch": "2.11.0"}})
    assert (rows["devices"].state, rows["devices"].finding) == ("warn", "96 cores, no accelerator")
    assert rows["packages"].state == "fail"
    assert "no quartet-plugin" in rows["packages"].finding


def test_the_table_has_what_to_do_below_its_row() -> None:
    lines = table_lines(
        [
            CheckRow(check="disk", state="fail", finding="1 GiB free", fix="free space"),
            CheckRow(check="python", state="ok", finding="3.12"),
        ]
    )
    assert lines == ["disk    fail  1 GiB free", "              free space", "python  ok    3.12"]


def test_the_speed_is_compared_where_there_is_something_to_compare() -> None:
    assert rows_of({}, {})["speed"].finding == "the slowest takes 0 % longer"
    slow = {"product_s": [9e-3]}
    others: dict[str, Any]
    for others in ({"product_s": []}, {"num_cores": 48}):
        assert rows_of(slow, others)["speed"].finding == "nothing to compare"
    found = rows_of({}, slow, {})["speed"]
    assert (found.state, found.finding) == ("warn", "n1: computations take 2.90x the usual time")
