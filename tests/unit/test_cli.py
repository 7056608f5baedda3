"""The program `mcore-rl`, from its command line to what it prints and writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.planner.phases import TRAIN
from mcore_rl.tools.plan.command_line import read_command_line
from tests.model_shapes import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
V3 = CONFIGS / "deepseek-v3.json"
V3_LAYOUT = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
    "--decoder-last-pipeline-num-layers 5 --expert-model-parallel-size 32 "
    "--rl-rollout-tp-size 8 --rl-rollout-ep-size 32"
).split()
SPLIT_SHARED = ["--rl-rollout-all2all-backend", "flashinfer_nvlink_two_sided"]
QWEN = ["--hf-config", str(CONFIGS / "qwen3-0.6b.json"), "--world-size", "8"]

# Runs a command and reports its peak memory and what it has loaded and started.
WATCHED = """
import gc, json, sys
from mcore_rl.cli import main
code = main(sys.argv[1:])
import torch.distributed
# Of this program alone: ru_maxrss counts the process that was forked for it.
with open("/proc/self/status") as status:
    peak_kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps({
    "peak_bytes": peak_kb * 1024,
    "distributed": torch.distributed.is_initialized(),
    "has_vllm": "vllm" in sys.modules,
    "has_scipy": "scipy" in sys.modules,
    "collects_no_more": not gc.isenabled(),
}), file=sys.stderr)
sys.exit(code)
"""


def plan(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """What `mcore-rl plan` writes."""
    target = tmp_path / "plan.json"
    assert main(["plan", *flags, "--json", str(target)]) == 0
    return json.loads(target.read_text())


def phases(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name."""
    return {phase["phase"]: phase for phase in found["phases"]}


# ---------------------------------------------------------------------------------------- the plan


@pytest.fixture(scope="module")
def v3_plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """DeepSeek-V3 on 256 ranks, with shared experts split over TP, and as vLLM does by default."""
    flags = ["--hf-config", str(V3), "--world-size", "256", *V3_LAYOUT]
    folder = tmp_path_factory.mktemp("plans")
    without_rollout = flags[: flags.index("--rl-rollout-tp-size")]  # which keeps TP and EP
    return plan(folder, *flags, *SPLIT_SHARED), plan(folder, *without_rollout)


def test_plan_of_deepseek_v3_has_the_known_figures(v3_plans: tuple) -> None:
    split, _ = v3_plans
    assert split["received_bytes_mean"] == pytest.approx(41.1e9, rel=0.01)
    assert split["resident_bytes_max"] == pytest.approx(47.0e9, rel=0.01)
    assert split["received_bytes_max"] == split["lower_bound_bytes_max"]
    assert split["train"]["layers_of_stages_and_chunks"][-1] == [[56, 57, 58, 59, 60]]
    assert split["model"]["num_mtp_layers_left_out"] == 1
    notes = " ".join(split["notes"])
    assert "fp8" in notes and "multi-token-prediction" in notes


def test_plan_without_rollout_flags_keeps_the_expert_layout(v3_plans: tuple) -> None:
    _, found = v3_plans
    assert [found["rollout"][name] for name in ("tp_size", "dp_size", "ep_size")] == [8, 4, 32]
    assert 41e9 < found["received_bytes_mean"] <= found["received_bytes_max"] < 48e9
    assert found["received_over_lower_bound"] == 1.0
    assert found["communicators_max"] == 2 and found["communicators_in_all"] == 64
    assert found["communicators_not_megatrons"] == found["peers_max"] == 0


def test_replicated_shared_experts_are_counted_and_noted(v3_plans: tuple) -> None:
    split, whole = v3_plans
    more = whole["resident_bytes_max"] - split["resident_bytes_max"]
    assert more == 58 * 3 * 7168 * 2048 * 2 * 7 // 8
    then = f"then {split['resident_bytes_max'] / 1e9:.2f} GB are resident and at least "
    then += f"{split['received_bytes_mean'] / 1e9:.2f} GB received on average"
    assert then in " ".join(whole["notes"])
    assert "shared experts" not in " ".join(split["notes"])


@pytest.mark.slow
def test_4096_ranks_take_little_memory_and_start_nothing(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    flags = ["--hf-config", str(V3), "--world-size", "4096", *V3_LAYOUT, "--json", str(target)]
    process = subprocess.run(
        [sys.executable, "-c", WATCHED, "plan", *flags], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    watched = json.loads(process.stderr.splitlines()[-1])
    assert watched.pop("peak_bytes") < 1e9
    assert not any(watched.values()), watched
    found = json.loads(target.read_text())
    assert found["rollout"]["num_engines"] == 128
    assert len(found["rollout"]["rank_map"]) == 4096
    assert found["received_over_lower_bound"] == 1.0


def test_yaml_and_command_line_give_the_same_plan(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text(
        "tensor-model-parallel-size: 4\nmicro-batch-size: 2\nrl-rollout-tp-size: 2\n"
    )
    given = plan(
        tmp_path,
        *QWEN,
        *("--tensor-model-parallel-size", "4", "--micro-batch-size", "2"),
        *("--rl-rollout-tp-size", "2"),
    )
    assert plan(tmp_path, *QWEN, "--rl-config", str(tmp_path / "flags.yaml")) == given
    assert given["train"]["tp_size"] == 4 and given["rollout"]["num_engines"] == 4
    assert given["rollout"]["rank_map"] == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("flags", "part", "share"),
    [
        ("--rl-precision fp32", "weights_bytes", 2),
        ("--grad-reduce-in-bf16", "gradients_bytes", 0.5),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "optimizer_bytes", 10 / 12),
        ("--optimizer lion", "optimizer_bytes", 8 / 12),
        ("--rl-precision fp32", "optimizer_bytes", 8 / 12),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.75", "optimizer_bytes", 0.25),
        ("--tensor-model-parallel-size 4", "optimizer_bytes", 1.0),  # TP4 x DP2 as DP8
    ],
)
def test_megatron_flags_keep_their_meaning(
    tmp_path: Path, flags: str, part: str, share: float
) -> None:
    before = phases(plan(tmp_path, *QWEN))[TRAIN][part]
    after = phases(plan(tmp_path, *QWEN, *flags.split()))[TRAIN][part]
    assert after == pytest.approx(share * before, rel=0.001)


def test_default_batch_follows_the_data_parallel_size(tmp_path: Path) -> None:
    flags = ["--hf-config", str(CONFIGS / "qwen3-0.6b.json"), "--world-size", "768"]
    found = plan(tmp_path, *flags)
    assert any("--rl-num-prompts-per-step is taken as 96" in note for note in found["notes"])


def test_remedies_of_a_plan_that_does_not_fit_hold(tmp_path: Path) -> None:
    """Planning again with a remedy's flags gives what the remedy promised."""
    flags = ["--hf-config", str(CONFIGS / "qwen3-30b-a3b.json"), "--world-size", "16"]
    flags += "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4".split()
    flags += "--gpu-memory-gb 40 --rl-max-response-tokens 8192".split()
    found = plan(tmp_path, *flags)
    assert not found["fits"] and found["problems"]
    for problem in found["problems"]:
        assert problem["remedies"], problem
        for remedy in problem["remedies"]:
            again = plan(tmp_path, *flags, *remedy["flags"].split())
            left = {p["where"]: p["lacking_bytes"] for p in again["problems"]}
            assert left.get(problem["where"], 0) == remedy["lacking_bytes"], remedy


def test_a_named_device_has_its_size_and_speed_unless_they_are_given() -> None:
    flags = ["--hf-config", str(CONFIGS / "qwen3-0.6b.json"), "--world-size", "8"]

    def found(*more: str) -> tuple[float, float, float]:
        request = read_command_line([*flags, *more])
        step = request.step
        return request.case.machine.gpu_bytes / 1e9, step.flops / 1e12, step.memory_rate / 1e9

    assert found() == found("--gpu", "H100") == (85.0, 396, 3015)
    assert found("--gpu", "b200") == (191.5, 900, 6903)
    assert found("--gpu", "h200", "--gpu-memory-gb", "100") == (100.0, 396, 4320)


def test_search_is_written_and_its_best_can_be_planned(tmp_path: Path) -> None:
    start = ["--hf-config", str(CONFIGS / "qwen3-30b-a3b.json"), "--world-size", "16"]
    search = plan(tmp_path, *start, "--expert-model-parallel-size", "8", "--search", "--top", "3")[
        "search"
    ]
    assert search["num_fitting"] > 3 == len(search["layouts"])
    best = search["layouts"][0]
    again = plan(tmp_path, *start, *best["flags"].split())
    assert again["fits"]
    assert again["received_bytes_max"] == best["received_bytes_max"]
    assert again["kv_cache_tokens"] == best["kv_cache_tokens"]


def test_output_is_plain_where_it_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QWEN, "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PLANNED, NOT RUN"
    assert max(map(len, lines)) <= 100
    assert not any("\x1b" in line or "─" in line for line in lines)


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "flags", "sentence"),
    [
        ({}, "--tensor-model-parallel-size 6", "= 6 does not divide the world of 256 processes"),
        (
            {},
            "--expert-model-parallel-size 64 --pipeline-model-parallel-size 8 "
            "--decoder-last-pipeline-num-layers 5",
            "--expert-model-parallel-size 64 x --pipeline-model-parallel-size 8 = 512",
        ),
        ({}, "--pipeline-model-parallel-size 8", "does not divide the 61 layers"),
        ({}, "--rl-reshard-bucket-mb 0", "--rl-reshard-bucket-mb 0 must be greater than 0"),
        (
            {},
            "--use-megatron-fsdp --pipeline-model-parallel-size 4",
            "--pipeline-model-parallel-size 4 does not go with --use-megatron-fsdp",
        ),
        ({}, "--optimizer soap", "--optimizer soap is not known to the planner"),
        ({}, "--gpu h1000", "--gpu h1000 is not a known device; choose one of a100-40gb, "),
        ({}, "--gpu-memory-gb -1", "--gpu-memory-gb -1.0 must be greater than 0"),
        ({}, "--gpu-reserved-gb 85", "--gpu-reserved-gb 85.0 leaves nothing"),
        ({}, "--rl-num-prompts-per-step 3", "samples do not divide into"),
        ({}, "--json /nonexistent/plan.json", "must name a file in a folder that exists"),
        ({"model_type": "gpt2"}, "", "has model_type 'gpt2', which is not supported; supp"),
        ({"model_type": "kimi_linear"}, "", "not supported (KimiLinearForCausalLM: Megatron has"),
        ({"quantization_config": {"quant_method": "awq"}}, "", "awq"),
    ],
)
def test_mistake_gets_one_sentence_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    flags: str,
    sentence: str,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(V3.read_text()), **changes}))
    code = main(["plan", "--hf-config", str(config), "--world-size", "256", *flags.split()])
    output = capsys.readouterr()
    assert code == 2 and output.out == ""
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", output.err), output.err
    assert sentence in output.err


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["plan"], "--world-size is missing"),
        (["plan", "--world-size", "8"], "--hf-config is missing"),
        (["plan", "--world-size", "0"], "--world-size 0 must be greater than 0"),
        (["plan", "--world-size", "eight"], "invalid int value: 'eight'"),
        (["plan", "--world-size", "8", "--hf-config", "nowhere"], "nowhere is not there"),
        (["plam"], "'plam' is not a command of mcore-rl"),
        (["--plan"], "required: COMMAND; see mcore-rl --help"),
        (["--top", "plan"], "--world-size is missing"),
        (["plan", "--world-size"], "--world-size: expected one argument; see mcore-rl plan --help"),
    ],
)
def test_command_that_cannot_be_read_gets_one_sentence(
    tokens: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == 2
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", error := capsys.readouterr().err), error
    assert sentence in error


def test_report_imports_neither_torch_nor_the_other_commands() -> None:
    asked = "from mcore_rl.cli import main; main(['report']); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "mcore_rl.tools.report.command" in loaded
    assert not loaded & {"torch", "mcore_rl.tools.plan.command", "mcore_rl.tools.doctor.command"}


def test_help_lists_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out
    for command, flag in (
        ("plan", "--hf-config"),
        ("doctor", "any --rl-* flag"),
        ("report", "OTHER_RUN_DIR"),
    ):
        assert command in commands
        with pytest.raises(SystemExit) as leave:
            main([command, "--help"])
        assert leave.value.code == 0
        assert flag in capsys.readouterr().out


# ----------------------------------------------------------------------------------------- the page


@pytest.mark.slow
def test_page_of_671b_is_what_the_command_prints() -> None:
    """Between the fences of plan_671b.md: the command, then its output, word for word."""
    page = (ROOT / "docs" / "using" / "plan_671b.md").read_text()
    command = r"((?:[^\n]*\\\n)*[^\n]*)"  # lines that end in a backslash continue
    blocks = re.findall(rf"```console\n\$ mcore-rl {command}\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for command, expected in blocks:
        tokens = command.replace("\\\n", " ").split()
        process = subprocess.run(
            [sys.executable, "-m", "mcore_rl.cli", *tokens],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert process.returncode == 0, process.stderr
        printed = "\n".join(line.rstrip() for line in process.stdout.splitlines())
        assert printed == expected.strip("\n"), "regenerate plan_671b.md with this command"
    assert "PLANNED, NOT RUN" in page


def planned_rows() -> dict[str, tuple[list[str], str, str]]:
    """Model -> tokens of its command and what it prints, of the section in planner.md."""
    page = (ROOT / "docs" / "using" / "planner.md").read_text()
    section = page.partition("## Layouts of large models\n")[2].partition("\n## ")[0]
    command = section.partition("    mcore-rl ")[2].partition("\n\n")[0].replace("\\\n", " ")
    rows = {}
    for row in re.findall(
        r"^\| `(.+)` \| (\d+) \| `(.+)` \| ([\d.]+) \| ([\d,]+) \|$", section, re.M
    ):
        model, world_size, flags, *printed = row
        filled = command.replace("MODEL", f"tests/data/configs/{model}.json")
        filled = filled.replace("GPUS", world_size).replace("FLAGS", flags)
        rows[model] = (filled.split(), *printed)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("model", planned_rows())
def test_large_model_fits_in_the_layout_of_the_page(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, fullest, cached = planned_rows()[model]
    monkeypatch.chdir(ROOT)
    assert main([*tokens, "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] and not plan["problems"]
    assert f"{max(phase['total_bytes'] for phase in plan['phases']) / 1e9:.2f}" == fullest
    assert f"{plan['kv_cache_tokens']:,}" == cached


def test_page_has_layouts_of_the_largest_models_of_new_families() -> None:
    assert planned_rows().keys() == {
        *("qwen3-next-80b-a3b", "qwen3.5-397b-a17b", "deepseek-v3.2", "glm-5", "glm-5.2")
    }
