"""The pure parts of benchmarks/reshard.py: counters, comparisons and verdicts.

The paths themselves run in `python benchmarks/reshard.py --quick`, which compares their bits.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.cases import CASES, Case
from benchmarks.counters import counted
from benchmarks.destination import Destination
from benchmarks.pages import paired_ratio
from benchmarks.peers import HFConfig, transformer_engine_name
from benchmarks.report import part_of, quartile_spread, rows_of, verdicts
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.tensors import TensorInfo
from scripts.make_tiny_deepseek import hf_config
from tests.megatron_parameters import SPECS, stage_parameters

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Rank:
    """One rank's samples of one path."""

    received_bytes: int = 0
    seconds: list[float] = field(default_factory=lambda: [1.0, 1.0, 1.0])
    cpu_seconds: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    num_calls: int = 1
    control_bytes: int = 0
    control_calls: int = 0
    peak_extra_bytes: int = 0
    differing: list[str] = field(default_factory=list)


def rows(*, layout: str = "TP2 PP2 EP4 -> TP4 on 8", **samples: list[Rank]) -> dict[str, dict]:
    samples = {"ours": [Rank(100)], "memcpy": [Rank()]} | samples
    found = rows_of(
        samples,
        model="m",
        layout=layout,
        model_bytes=1000,
        lower_bound_bytes=100,
        resident_bytes=300,
        notes={"mbridge": "not installed"},
    )
    return {row["path"]: row for row in found}


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/reshard.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_help_names_the_flags() -> None:
    done = run_benchmark("--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in ("--record", "--quick"))


@pytest.mark.parametrize("arguments", [("--repetitions", "0"), ("--only", "TP99")])
def test_bad_input_is_refused_in_one_sentence(arguments: tuple[str, str]) -> None:
    done = run_benchmark(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert " ".join(arguments) in done.stderr


def test_cases_are_what_the_targets_name() -> None:
    layouts = {(case.model.arch, case.layout) for case in CASES}
    assert layouts >= {
        ("qwen3", "TP2 PP2 -> TP4 on 4"),
        ("deepseek_v3", "TP2 PP2 EP4 -> TP2 DP2 EP4 on 8"),
    }
    assert {case.world_size for case in CASES} == {4, 8}
    for case in CASES:
        assert case.world_size % (case.tp_size * case.pp_size) == 0


def test_row_takes_the_worst_rank_of_each_repetition() -> None:
    slow_in_turns = [Rank(10, [1.0, 5.0, 2.0]), Rank(30, [4.0, 1.0, 1.0])]
    row = rows(gather=slow_in_turns)["gather"]
    assert row["received_bytes_max"] == 30
    assert (row["min_seconds"], row["median_seconds"], row["max_seconds"]) == (2.0, 4.0, 5.0)
    assert row["received_over_ours"] == 0.3
    assert row["seconds_over_ours"] == 4.0


def test_ratio_of_seconds_is_of_one_repetition() -> None:
    # The machine was slow in the second repetition, for both.
    assert paired_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0
    assert quartile_spread([1.0, 2.0, 3.0]) == 0.5
    assert quartile_spread([1.0]) == 0.0


def test_path_that_differs_on_one_rank_is_not_identical() -> None:
    found = rows(gather=[Rank(), Rank(differing=["model.norm.weight"])])
    assert found["ours"]["bit_identical"]
    assert not found["gather"]["bit_identical"]
    assert "**NO**" in part_of({"rows": list(found.values()), "facts": {}})


def test_missing_path_reports_its_reason() -> None:
    found = rows()
    assert "median_seconds" not in found["mbridge"]
    assert "- mbridge: not installed" in part_of({"rows": list(found.values()), "facts": {}})


@pytest.mark.parametrize(
    ("path", "received_bytes", "met"),
    [
        ("gather", 399, False),
        ("gather", 400, True),
        ("core.resharding", 149, False),
        ("core.resharding", 150, True),
    ],
)
def test_verdict_follows_the_received_bytes(path: str, received_bytes: int, met: bool) -> None:
    found = verdicts(list(rows(**{path: [Rank(received_bytes)]}).values()))
    assert [ok for target, _, ok in found if path in target] == [met]


@pytest.mark.parametrize(
    ("seconds", "cpu_seconds", "met"), [(1.04, 0.52, True), (1.06, 0.5, False), (1.0, 0.53, False)]
)
def test_verdict_on_the_proof_uses_the_slower_clock(
    seconds: float, cpu_seconds: float, met: bool
) -> None:
    switch = Rank(seconds=[seconds] * 3, cpu_seconds=[cpu_seconds] * 3)
    samples = {"vllm_load": [Rank()], "switch": [switch], "switch, unproved": [Rank()]}
    found = rows(layout="TP2 PP2 -> TP2 on 4", **samples).values()
    assert [ok for target, _, ok in verdicts(list(found)) if "proof: " in target] == [met]


def test_destination_takes_what_is_needed_and_sees_a_flipped_bit() -> None:
    weight = torch.arange(24, dtype=torch.int32).view(6, 4)
    needed = {"w": [((0, 2), (0, 4)), ((4, 6), (1, 3))], "unused": []}
    infos = {name: TensorInfo((6, 4), "int32", 4) for name in needed}
    target = Destination(needed, infos)
    assert target.names == ("w",) and target.num_bytes == (8 + 4) * 4
    target.fill("w", [(((0, 5), (0, 4)), weight[:5])])
    assert target.differing({"w": weight}) == ["w"]  # a row is missing
    target.fill("w", [(((5, 6), (0, 4)), weight[5:])])
    assert target.differing({"w": weight}) == []
    target.parts()[0][0, 0] ^= 1
    assert target.differing({"w": weight}) == ["w"]
    target.clear()
    target.fill_whole("w", weight)
    assert target.differing({"w": weight}) == []


def test_traffic_counts_what_comes_in(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = dist.broadcast
        with counted() as traffic:
            dist.broadcast(torch.zeros(5), src=0)
            dist.all_gather([torch.zeros(4)], torch.ones(4))
            dist.all_gather_object([None], "pickled")
            dist.all_reduce(torch.zeros(2))
            with pytest.raises(RuntimeError, match="not counted"):
                dist.send(torch.zeros(1), dst=0)
        assert dist.broadcast is before
    finally:
        dist.destroy_process_group()
    # Alone, nothing comes from anybody else.
    assert (traffic.received_bytes, traffic.num_calls) == (0, 2)
    assert traffic.control_calls == 3  # an object is two gathers: its size and itself


def test_received_bytes_exclude_a_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import counters

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    tensor = torch.zeros(10, dtype=torch.bfloat16)
    assert counters.received_of_all_gather([tensor] * 4, tensor) == 3 * 20
    assert counters.received_of_broadcast(tensor, src=0) == 20
    assert counters.received_of_broadcast(tensor, src=1) == 0


@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3", "qwen3_moe"])
def test_local_names_become_those_of_transformer_engine(arch: str) -> None:
    shape = model_shape(hf_config(arch), Path("config.json"))
    layers = tuple(range(shape.num_layers))
    # The oracle is how either family of specs names its parameters, written down for the weight
    # map.
    local, fused = (
        stage_parameters(shape, SPECS[spec], tp_size=1, layers=layers)
        for spec in ("local", "transformer_engine")
    )
    renamed = {
        transformer_engine_name(
            name, latent=shape.latent is not None, is_moe=list(shape.is_moe_layer)
        ): size
        for name, size in local.items()
    }
    assert renamed == fused


def test_config_answers_by_attribute_and_by_name() -> None:
    config = HFConfig({"rope_theta": 1e4})
    assert config.rope_theta == 1e4 and "rope_theta" in config
    assert getattr(config, "head_dim", 7) == 7


def test_case_names_its_flags() -> None:
    case = Case(CASES[-1].model, 8, 2, 2, ep_size=4, rollout_tp_size=2, rollout_dp_size=2)
    flags = case.flags("folder", 16)
    assert flags[flags.index("--expert-model-parallel-size") + 1] == "4"
    assert flags[flags.index("--rl-reshard-bucket-mb") + 1] == "16"
