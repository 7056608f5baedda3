"""`mcore-rl plan --simulate`: its inputs, output and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, StepStats
from mcore_rl.cli import main
from mcore_rl.observe.run_directory import RunConfig, RunDirectory
from mcore_rl.planner.comparison import planned_speeds
from mcore_rl.planner.plan import plan_case
from mcore_rl.planner.simulated_workload import EngineSpeed, Response, prefill_rate
from mcore_rl.planner.simulation import COLOCATED, PARTIAL, SEPARATE
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.tools.plan.recorded import read_engine_speed, read_responses, read_run
from mcore_rl.tools.plan.simulate import splits
from tests.model_shapes import CONFIGS

QWEN = ["--hf-config", str(CONFIGS / "qwen2.5-7b.json"), "--world-size", "16"]
JOB = (
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--rl-rollout-tp-size 2 --rl-num-prompts-per-step 24 --rl-num-samples-per-prompt 4"
).split()
SPEED = {"running": [1, 64], "step_seconds": [0.01, 0.02], "prefill_tokens_per_second": 40000.0}


def simulated(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """What `--simulate` writes."""
    target = tmp_path / "plan.json"
    assert main(["plan", *QWEN, *JOB, "--simulate", *flags, "--json", str(target)]) == 0
    found: dict[str, Any] = json.loads(target.read_text())["simulation"]
    return found


def write_run(folder: Path, *, num_steps: int, **config: Any) -> Path:
    """A run of 8 ranks, of whose steps the first took much longer, with a response a step."""
    config = {"rl_num_prompts_per_step": 10, "rl_num_samples_per_prompt": 2, **config}
    directory = RunDirectory(folder, RunConfig(resolved=config, about={"ranks": 8}))
    for step in range(num_steps):
        times = {"train": 2.0, "log_probs": 1.0, "advantages": 0.5, "reward": 0.25}
        times |= {"reshard_to_rollout": 3.0 + step, "reshard_to_train": 1.0}
        if not step:
            times = dict.fromkeys(times, 1000.0)
        times["step"] = sum(times.values()) + 1.5
        metrics = {f"time/{name}_seconds": seconds for name, seconds in times.items()}
        rate, mean = 3500.0 * (1 + step), 12.0
        metrics |= {"throughput/train_tokens_per_second": rate, "response_tokens/mean": mean}
        directory.write_step(StepStats(step, metrics))
        ids = np.arange(10 + step, dtype=np.int32)
        prompt, log_probs = Prompt(4, "1+1", "2", ids), ids.astype(np.float32)
        rollout = Rollout(prompt, 0, "2", ids, log_probs, "stop", step)
        directory.write_rollouts(step, [ScoredRollout(rollout, 1.0)], [step])
    directory.close()
    return folder


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_all_ways_are_simulated_and_one_is_recommended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(tmp_path)
    rows = found["candidates"]
    ways = [row["candidate"]["mode"] for row in rows[:5]]
    assert ways == [COLOCATED, PARTIAL, PARTIAL, PARTIAL, SEPARATE]
    separate = [row["candidate"] for row in rows if row["candidate"]["mode"] == SEPARATE]
    trainers = {each["num_trainers"] for each in separate}
    assert trainers <= {2, 4, 6, 8, 12} and len(trainers) >= 2  # 96 samples, DP 1, 2, 3, 4, 6
    assert {each["max_staleness"] for each in separate} == {0, 1, 2, 4}
    for row in rows:
        candidate = row["candidate"]
        assert row["staleness_max"] <= max(candidate["max_staleness"], 4)
        assert candidate["num_engines"] == (
            8 if candidate["mode"] != SEPARATE else (16 - candidate["num_trainers"]) // 2
        )
    assert len([note for note in found["notes"] if "by formula" in note]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert found["recommendation"] in shown and found["recommendation"].startswith("Take ")


def test_measured_speeds_replace_formulas(tmp_path: Path) -> None:
    speed = written(tmp_path / "speed.json", SPEED)
    flags = ["--engine-speed", str(speed), "--train-tokens-per-second", "2000"]
    found = simulated(tmp_path, *flags, "--length-mean", "100", "--switch-seconds", "7.5")
    assert found["notes"] == []
    slower = simulated(tmp_path, *flags[:2], "--train-tokens-per-second", "20", *flags[4:])
    at = [row["candidate"]["mode"] for row in found["candidates"]].index(COLOCATED)
    assert found["candidates"][at]["candidate"]["hand_over_seconds"] == 7.5
    rates = [each["candidates"][at]["samples_per_second"] for each in (found, slower)]
    assert rates[0] > 2 * rates[1]


def test_tools_are_simulated_in_partial_rollouts(tmp_path: Path) -> None:
    found = simulated(tmp_path, "--turns", "3", "--tool-seconds", "1", "--length-mean", "50")
    assert PARTIAL in {row["candidate"]["mode"] for row in found["candidates"]}


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    found = simulated(tmp_path, "--gpu-memory-gb", "14", "--gpu-reserved-gb", "1")
    assert found["candidates"] == [] and found["best"] is None
    assert all(" lacks " in line or " do not divide among " in line for line in found["left_out"])
    assert found["recommendation"].startswith("Nothing fits")


def test_what_the_simulation_ignores_of_a_job_is_noted(tmp_path: Path) -> None:
    speed = written(tmp_path / "speed.json", SPEED)
    known = [
        *("--engine-speed", str(speed), "--train-tokens-per-second", "2000"),
        *("--length-mean", "100"),
    ]
    for flags, part in (
        (["--rl-algorithm", "remax"], "engines sample 5 responses to a prompt, not 4"),
        (["--rl-dynamic-sampling"], "--rl-dynamic-sampling is not simulated"),
        (["--rl-environment", "calculator"], "--rl-max-environments 256 is not simulated"),
    ):
        (note,) = simulated(tmp_path, *known, *flags)["notes"]
        assert part in note
    (note,) = simulated(tmp_path, *known[:2], *known[4:], "--rl-algorithm", "ppo")["notes"]
    assert "by formula, without critic and teachers" in note


def test_splits_divide_on_both_sides() -> None:
    flags = "--rl-rollout-tp-size 4 --rl-num-prompts-per-step 64 --rl-num-samples-per-prompt 8"
    case = read_command_line([*QWEN, *flags.split(), "--tensor-model-parallel-size", "4"]).case
    found, left_out = splits(case)
    assert [(each.train.world_size, len(each.engine_ranks)) for each in found] == [(8, 8), (4, 12)]
    (why,) = left_out
    assert why.startswith("12 + 4: --rl-rollout-ranks 12-15: the 512 ")
    assert "do not divide among 3 " in why
    for each in found:  # 12 trainers would be 3 data-parallel ranks for 512 samples
        assert each.engine_ranks == tuple(range(each.train.world_size, 16))


def test_planned_speeds_are_those_of_the_formulas() -> None:
    request = read_command_line([*QWEN, *JOB])
    case, step = request.case, request.step
    speeds = planned_speeds(case, plan_case(case).memory, step, context_tokens=0.0)
    weights = 7.6e9 * 2 / 2 / step.memory_rate  # of a rank: 7.6 billion parameters, TP2
    assert speeds.engine.step_seconds[0] == pytest.approx(weights, rel=0.02)
    active = 7.1e9  # without the embedding
    assert speeds.engine.prefill_rate == pytest.approx(2 * 400e12 / (2 * active), rel=0.02)
    assert speeds.train_rate == pytest.approx(400e12 / (8 * active), rel=0.02)


# ---------------------------------------------------------------------------------------- files


def test_run_is_read_without_its_first_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", num_steps=3))
    # 2 s at 7,000 and 10,500 tokens per second, of 3.5 s each, by 8 ranks
    assert run.train_rate == pytest.approx(2 * (7000 + 10500) / (2 * 3.5) / 8)
    assert run.switch_seconds == pytest.approx((4 + 1 + 5 + 1) / 2)
    assert (run.reward_seconds, run.other_seconds, run.mean_tokens) == (0.25, 1.5, 12.0)
    assert run.prompt_tokens == pytest.approx((14_000 + 21_000) / 2 / 20 - 12)
    assert read_responses(run.folder / "rollouts.jsonl") == tuple(
        Response((length,)) for length in (10, 11, 12)
    )


def test_training_and_hand_over_of_separate_ranks_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "apart", num_steps=3, rl_rollout_ranks="8-15")
    run = read_run(folder, is_separate=True)  # 8 trainers are all ranks of their Megatron
    assert run.train_rate == pytest.approx(2 * (7000 + 10500) / (2 * 3.5) / 8)
    found = simulated(tmp_path, "--from-separate-run", str(folder))["candidates"]
    seconds = {
        row["candidate"]["hand_over_seconds"] == pytest.approx((4 + 1 + 5 + 1) / 2)
        for row in found
        if row["candidate"]["mode"] == SEPARATE
    }
    assert seconds == {True}


def test_from_run_needs_no_other_measurement(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=5)
    speed = written(tmp_path / "speed.json", SPEED)
    found = simulated(tmp_path, "--from-run", str(folder), "--engine-speed", str(speed))
    assert found["notes"] == []


def test_prefill_rate_is_of_the_time_that_it_adds_to_steps() -> None:
    usual = {1: 0.01, 2: 0.02, 4: 0.04}
    steps = [(0.01 + 0.1, 0), (0.03 + 0.1, 3), (0.03 + 0.1, 3)]
    assert prefill_rate(steps, 300, usual) == pytest.approx(300 / 0.3)
    hidden = [(0.04, 3), (0.02, 3)]  # computing the prompts takes no measurable time
    assert prefill_rate(hidden, 300, usual) == pytest.approx(300 / (0.01 * 0.06))


def test_waits_in_a_separate_run_are_noted(tmp_path: Path) -> None:
    flags = []
    for staleness in (0, 1):
        config = {"rl_rollout_ranks": "8-15", "rl_max_staleness": staleness}
        folder = write_run(tmp_path / str(staleness), num_steps=3, **config)
        flags.append(["--from-separate-run", str(folder)])
    notes = [simulated(tmp_path, *each)["notes"] for each in flags]
    assert notes[1][:-1] == notes[0] and "--rl-max-staleness 0" in notes[1][-1]


def test_engine_speed_is_sorted(tmp_path: Path) -> None:
    file = written(tmp_path / "a", {**SPEED, "running": [8, 2], "step_seconds": [0.3, 0.1]})
    assert read_engine_speed(file) == EngineSpeed((2, 8), (0.1, 0.3), 40000.0, 1e12)


def test_rate_of_repeated_tokens_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "a", {**SPEED, "repeated_tokens_per_second": 9e5})
    assert read_engine_speed(file).repeated_rate == 9e5


def test_lines_without_lengths_are_skipped(tmp_path: Path) -> None:
    lines = ['{"response_tokens": 7}', "{", "[]", '{"response_tokens": "9"}', '{"response_tok']
    lines += [f'{{"response_tokens": 9, "turn_tokens": {turns}}}' for turns in ([], [0], [10])]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    assert read_responses(tmp_path / "rollouts.jsonl") == (Response((7,)),)


def test_turns_are_those_of_the_file_or_as_given(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"response_tokens": 30, "turn_tokens": [10, 14]}\n{"response_tokens": 6}\n')
    assert read_responses(file) == (Response((10, 14), 6), Response((6,)))
    assert read_responses(file, 2) == (Response((15, 15)), Response((3, 3)))


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--turns 2", "--turns 2 has no effect without --simulate; add that"),
        ("--tool-seconds 0", "--tool-seconds 0.0 has no effect without --simulate"),
        ("--simulate --turns 0", "--turns 0 must be greater than 0"),
        ("--simulate --tool-seconds -1", "--tool-seconds -1.0 must be greater than 0"),
        ("--simulate --lengths a --length-mean 7", "--lengths a excludes --length-mean 7"),
        ("--simulate --lengths {tmp}/none", "--lengths {tmp}/none cannot be read"),
        ("--simulate --lengths {tmp}/empty", "--lengths {tmp}/empty has no line with response_tok"),
        ("--simulate --from-run {tmp}", "--from-run {tmp} is not the directory of a run"),
        ("--simulate --from-run {tmp}/short", "short has no complete step after the first one"),
        ("--simulate --from-run {tmp}/apart", "apart is a run with --rl-rollout-ranks; give it to"),
        ("--simulate --from-separate-run {tmp}/short", "short is a run without --rl-rollout-ranks"),
        ("--simulate --engine-speed {tmp}/empty", "empty does not hold the speed of an engine"),
        ("--simulate --engine-speed {tmp}/zero", "zero does not hold the speed of an engine"),
        ("--simulate --engine-speed {tmp}/twice", "has a number of sequences twice"),
    ],
)
def test_mistake_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    (tmp_path / "empty").touch()
    written(tmp_path / "zero", {**SPEED, "step_seconds": [0.01, 0]})
    written(tmp_path / "twice", {**SPEED, "running": [1, 1]})
    write_run(tmp_path / "short", num_steps=1)
    write_run(tmp_path / "apart", num_steps=3, rl_rollout_ranks="4-7")
    tokens = flags.replace("{tmp}", str(tmp_path)).split()
    assert main(["plan", *QWEN, *JOB, *tokens]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", error), error
    assert sentence.replace("{tmp}", str(tmp_path)) in error
