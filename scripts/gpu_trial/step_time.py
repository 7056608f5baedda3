"""Print seconds of a step of mcore_rl and, if it is installed, of TRL with vLLM colocated.

    python scripts/gpu_trial/step_time.py TINY_CHECKPOINT WORK MODEL PROMPTS

MODEL replaces the tiny checkpoint unless it is empty, with PROMPTS or the tiny one's prompts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import step_time as bench  # noqa: E402


def with_prompts(model: Path, prompts: Path, folder: Path) -> Path:
    """Return a folder with the files of `model` and with prompts/train.jsonl."""
    (folder / "prompts").mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "prompts":
            (folder / file.name).symlink_to(file)
    (folder / "prompts" / "train.jsonl").symlink_to(prompts)
    return folder


def show(system: str, run: dict[str, Any], samples: int) -> float:
    """Print the medians of a run; return its samples per second."""
    seconds = statistics.median(run["step_seconds"][bench.LEFT_OUT_STEPS :])
    tokens = statistics.fmean(run["response_tokens"][bench.LEFT_OUT_STEPS :])
    print(
        f"step of {system}: {seconds:.3f} s; {samples / seconds:.1f} samples/s; "
        f"{samples * tokens / seconds:.0f} response tokens/s, {tokens:.1f} a sample; "
        f"{run['setting']}",
        flush=True,
    )
    return samples / seconds


def main(tiny: str, work: str, model: str, prompts: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=work))
    (short,) = (workload for workload in bench.WORKLOADS if workload.name == "short")
    workload, checkpoint = dataclasses.replace(short, num_steps=6), Path(tiny)
    if model:
        rows = Path(prompts or f"{tiny}/prompts/train.jsonl").absolute()
        checkpoint = with_prompts(Path(model).absolute(), rows, folder / "model")
        workload = dataclasses.replace(
            workload, max_prompt_tokens=512, max_response_tokens=256, packed_tokens=8192
        )
    samples = workload.samples_per_step
    ours = show(
        "mcore_rl", bench.ours(workload, checkpoint, 1, "bf16", 1, folder / "ours"), samples
    )
    if importlib.util.find_spec("trl") is None:
        print("without TRL, which is not installed: `pip install .[bench]` into the environment")
        return
    sizes = ["--steps", str(workload.num_steps)]
    sizes += ["--response-tokens", str(workload.max_response_tokens)]
    theirs = bench.trl(workload, checkpoint, "bf16", sizes, 1, folder / "trl")
    print(f"samples/s over TRL's: {ours / show('TRL', theirs, samples):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
