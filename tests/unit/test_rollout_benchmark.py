"""Pure parts of benchmarks/rollout.py and rollout_trl.py, and that TRL gets the same rewards.

`python benchmarks/rollout.py --quick` and rollout_trl.py run the cases.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import rollout_trl
from benchmarks.pages import markers
from benchmarks.rollout import REPETITIONS
from benchmarks.rollout_report import OF_CASE, SECTION, paired, section_of
from benchmarks.rollout_trl_agent import Pocket, calls, reward, turns_in
from benchmarks.rollout_worker import CASES, LONG_TAIL, SHORT


def ways(**seconds: list[float]) -> dict[str, list[dict[str, float]]]:
    return {
        name.replace("_", " "): [
            dict(seconds=s, own_seconds=s, after_last_token=s, tokens=8.0, most_tokens=5.0)
            for s in each
        ]
        for name, each in seconds.items()
    }


def test_one_response_in_a_hundred_reaches_ten_times_the_median():
    lengths = np.concatenate([LONG_TAIL.lengths(seed) for seed in range(200)])
    assert lengths.max() == LONG_TAIL.most_tokens == 10 * LONG_TAIL.median_tokens
    assert np.median(lengths) == pytest.approx(LONG_TAIL.median_tokens, rel=0.05)
    assert np.mean(lengths == lengths.max()) == pytest.approx(0.01, abs=0.004)
    assert set(SHORT.lengths(1)) == {SHORT.median_tokens}
    assert LONG_TAIL.lengths(1) == LONG_TAIL.lengths(1) != LONG_TAIL.lengths(2)


def test_every_case_has_repetitions_and_verdicts():
    assert CASES.keys() == REPETITIONS.keys() == OF_CASE.keys()


def test_ratio_is_taken_within_one_repetition():
    # The machine was slow in the second repetition for both.
    assert paired(ways(stream=[1, 10], blocks=[2, 20]), "blocks", "stream") == 2.0


@pytest.mark.parametrize(
    ("case", "found", "met"),
    [
        ("long_tail", ways(stream=[1.0], blocks=[1.26]), True),
        ("long_tail", ways(stream=[1.0], blocks=[1.24]), False),
        ("partial", ways(stream=[1.0], blocks=[1.61]), True),
        ("partial", ways(stream=[1.0], blocks=[1.59]), False),
        ("quick_reward", ways(stream=[1.0], blocks=[10.1]), True),
        ("slow_reward", ways(stream=[1.0], blocks=[9.9]), False),
        ("short", ways(stream=[1.0], blocks=[1.0]), True),
        ("short", ways(stream=[1.0], blocks=[0.9]), False),
    ],
)
def test_verdict_follows_the_figures(case, found, met):
    assert [ok for *_, ok in OF_CASE[case](found)] == [met]
    text = section_of({case: found}, {"commit": "abc"})
    assert (text.splitlines()[0], text.splitlines()[-1]) == markers(SECTION)
    assert ("**no**" in text) is not met and "| 0.62 |" in text


@pytest.mark.parametrize(("seconds", "met"), [(0.98, True), (0.96, False)])
def test_overhead_is_the_time_outside_engine_steps(seconds, met):
    found = {
        "loop TP2": [{"own_seconds": 1.0, "in_steps": seconds}],
        "bare TP2": [{"own_seconds": 1.0, "in_steps": 0.999}],
    }
    assert [ok for *_, ok in OF_CASE["overhead"](found)] == [met]


def test_turns_are_read_from_a_rendered_conversation():
    first = "<bos><|user|>47 ?<|assistant|>15"
    assert turns_in(first) == turns_in(first + "<eos>") == ["15"]
    assert turns_in(first + "<eos><|user|>5<|assistant|>0 5<eos>") == ["15", "0 5"]
    assert turns_in(first + "<|user|>5<|assistant|>") == ["15", ""]  # cut before its end


@pytest.mark.parametrize(
    ("turns", "num_called", "paid"),
    [
        (["47", "5"], 1, 1.25),
        (["47", "4"], 1, 0.25),
        (["15 5"], 0, 0.0),  # not shown yet
        (["1+1", "47", "5"], 2, 1.25),
        (["M", "5"], 1, 1.25),
        (["1+1", "1+1"], 2, 0.25),  # no turn is left
    ],
)
def test_trl_loop_calls_and_rewards_as_the_calculator_does(turns, num_called, paid):
    assert [calls(turns[: n + 1]) for n in range(len(turns))] == [
        n < num_called for n in range(len(turns))
    ]
    pocket, messages = Pocket(), []
    pocket.reset(prompt=[{"role": "user", "content": "47 ?"}], answer="5", memory=5, prompts=[])
    for number, text in enumerate(turns):
        messages.append({"role": "assistant", "content": text})
        if number < num_called:
            shown = pocket.press(text)
            assert shown == ("2" if text == "1+1" else "5")
            messages.append({"role": "tool", "name": "press", "content": shown})
    assert reward([messages], [pocket]) == [paid]


def test_parts_of_a_step_are_averaged_time_metrics():
    steps = [{"time/step_seconds": 1.0, "kl/ref": 5.0}, {"time/step_seconds": 3.0, "kl/ref": 5.0}]
    assert rollout_trl.parts_of(steps) == {"time/step_seconds": 2.0}


def test_section_of_trl_has_ratios_within_one_repetition():
    def run(step_seconds: float) -> dict:
        seconds = [9.0, 9.0, step_seconds]  # the first two do not count
        return dict(
            step_seconds=seconds, response_tokens=[6.0], turns=[2.0], rewards=[1.0], setting="x"
        )

    page = rollout_trl.section_of(
        {"ours": [run(1), run(10)], "trl": [run(2), run(20)]}, {"commit": "abc"}
    )
    assert (page.splitlines()[0], page.splitlines()[-1]) == markers(rollout_trl.SECTION)
    assert "| ours | 70.4 (128.0, 12.8) | 2.00x | 2.00 | 6.00 | 1.00 | x |" in page
    parts = {"time/rollout_seconds": 0.5, "time/train_seconds": 0.24, rollout_trl.FORWARD: 0.4}
    with_parts = rollout_trl.section_of({"ours": [run(1) | {"parts": parts}], "trl": [run(2)]}, {})
    assert "Seconds of a step of ours: rollout_seconds 0.500, " in with_parts
    assert "0.640 s, 200 samples/s, 3.12x TRL's." in with_parts
