"""The example of SmolLM2-135M-Instruct over several seeds, and what is drawn from its record.

    python benchmarks/smollm2.py --seeds 1 2 3 4 5     # runs, 8 minutes each, then draws
    python benchmarks/smollm2.py                       # draws again, from the record alone

A run is `bash examples/smollm2/run.sh` with a seed. The record has every step of every run and ten
greedy answers of the first, before and after; the curves, the table of answers in README.md and the
section of benchmarks/RESULTS.md are drawn from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.line_charts import Chart, svg  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table, write_section  # noqa: E402
from benchmarks.records import Record, series  # noqa: E402

RECORD = "smollm2"
FIGURE = ROOT / "docs" / "assets" / "smollm2.svg"
COLORS = ("#3d7fd6", "#d9731a", "#5a9e4b", "#8a5fc0", "#8a8f98")
METRICS = {
    "reward": "reward/mean",
    "accuracy": "eval/accuracy",
    "tokens": "response_tokens/mean",
    "seconds": "time/step_seconds",
    "mismatch": "mismatch/mean_abs_difference",
    "host_gb": "memory/host_bytes",
}
NUM_ANSWERS, MAX_TOKENS = 10, 24
LAST = 5  # steps at the end of which the mean is taken


def recorded(seed: int, folder: Path, num_processes: int) -> dict[str, Any]:
    """Return a run's steps; a run that exists already is not repeated."""
    run = folder / f"seed_{seed}"
    if not (run / "summary.json").is_file():
        command = [
            *("bash", "examples/smollm2/run.sh", "--seed", str(seed)),
            *("--rl-run-dir", str(run), "--rl-export-hf", str(run / "exported")),
        ]
        environment = os.environ | {"NPROC": str(num_processes), "MCORE_RL_SKIP_SETUP": "1"}
        subprocess.run(command, cwd=ROOT, check=True, env=environment)
    return {"seed": seed, "steps": records.steps_of(run, METRICS)}


def answers(before: Path, after: Path) -> list[dict[str, str]]:
    """Return greedy answers of two folders to held-out prompts, every fourteenth of the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(before)
    lines = (before / "prompts" / "heldout.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // NUM_ANSWERS][:NUM_ANSWERS]]
    found = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    for when, folder in (("before", before), ("after", after)):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
        for row in found:
            chat = [{"role": "user", "content": row["prompt"]}]
            asked = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            made = model.generate(**asked, do_sample=False, max_new_tokens=MAX_TOKENS)
            text = tokenizer.decode(
                made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True
            )
            row[when] = " ".join(text.split())
    return found


def figure(record: Record) -> str:
    """Draw reward, held-out accuracy and length over steps, a line per seed."""
    charts = []
    for title, name in (
        ("share of right samples", "reward"),
        ("greedy accuracy, held out", "accuracy"),
        ("tokens of a response", "tokens"),
    ):
        lines = {f"seed {run['seed']}": series(run, name) for run in record["runs"]}
        last = max(max(x) for x, _ in lines.values())
        charts.append(Chart(title, lines, "step 0", f"{last:.0f}"))
    names = [f"seed {run['seed']}" for run in record["runs"]]
    return svg(charts, dict(zip(names, COLORS, strict=False)))


def summary(run: Mapping[str, Any]) -> dict[str, float]:
    """Return a run's figures at its ends."""
    rewards, accuracy = series(run, "reward")[1], series(run, "accuracy")[1]
    tokens, seconds = series(run, "tokens")[1], series(run, "seconds")[1]
    return {
        "first": rewards[0],  # sampled before the first update
        "last": statistics.fmean(rewards[-LAST:]),
        "before": accuracy[0],
        "after": accuracy[-1],
        "long": tokens[0],
        "short": statistics.fmean(tokens[-LAST:]),
        "minutes": sum(seconds) / 60,
        "mismatch": statistics.fmean(series(run, "mismatch")[1]),
    }


def page(record: Record) -> list[str]:
    """Return the section of benchmarks/RESULTS.md."""
    lines = [
        "# SmolLM2-135M-Instruct learns small tasks in words",
        "",
        f"Drawn by `benchmarks/smollm2.py` from `benchmarks/records/{RECORD}.json`. Rewards and",
        "lengths are those of the first step, which is sampled before any update, and means of the",
        f"last {LAST} steps; minutes are those of all steps, with evaluations and the hand-over,",
        "but without the start.",
        "",
        *fact_list(record["facts"]),
        "",
        "| seed | right samples | greedy accuracy | tokens of a response | mismatch (nats) | min |",
        "| ---: | --- | --- | --- | ---: | ---: |",
    ]
    found = [(run["seed"], summary(run)) for run in record["runs"]]
    lines += [
        f"| {seed} | {each['first']:.2f} to {each['last']:.2f} | {each['before']:.2f} to "
        f"{each['after']:.2f} | {each['long']:.1f} to {each['short']:.1f} | "
        f"{each['mismatch']:.3f} | {each['minutes']:.1f} |"
        for seed, each in found
    ]
    ratios = [each["last"] / each["first"] for _, each in found]
    points = [100 * (each["after"] - each["before"]) for _, each in found]
    minutes = [each["minutes"] for _, each in found]
    verdicts = [
        ("sampled: at least 3x, every seed", f"{min(ratios):.1f}x at least", min(ratios) >= 3),
        ("greedy: 20 points more", f"{min(points):.0f} points at least", min(points) >= 20),
        ("at most 10 minutes", f"{max(minutes):.1f} minutes at most", max(minutes) <= 10),
    ]
    return [*lines, "", *verdict_table(verdicts)]


def answers_table(record: Record) -> list[str]:
    """Return the table of answers of README.md."""
    lines = ["| question | before | after |", "| --- | --- | --- |"]
    return lines + [
        f"| {row['prompt'].partition('?')[0]}? | {row['before']} | {row['after']} |"
        for row in record["answers"]
    ]


def draw(record: Record) -> None:
    FIGURE.write_text(figure(record))
    write_section(records.RESULTS, "smollm2_seeds", section("smollm2_seeds", page(record)))
    write_section(ROOT / "README.md", "answers", section("answers", answers_table(record)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", help="run these; default: only draw")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "smollm2")
    options = parser.parse_args(arguments)
    if options.seeds:
        cache = Path(os.environ.get("MCORE_RL_CACHE") or Path.home() / ".cache" / "mcore_rl")
        runs = [recorded(seed, options.folder, options.processes) for seed in options.seeds]
        exported = options.folder / f"seed_{options.seeds[0]}" / "exported"
        before = cache / "smollm2_135m_instruct"
        facts = facts_of_run("smollm2.py", arguments, ())
        records.write(RECORD, facts, runs=runs, answers=answers(before, exported))
    draw(records.read(RECORD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
