"""The first hour on a GPU, stage by stage; `bash scripts/gpu_trial.sh` starts it.

    --list                 the stages, their limits and what they need
    --from STAGE           begin with this stage; --only STAGE ... : only these
    --model DIR            a real small model in addition to the tiny ones (with --prompts)
    --out DIR              folder of the results (default: a new folder in runs/)
    --parts DIR            install from the parts of scripts/gpu_trial/pack.py that are in DIR, and
                           run what has not run yet; may be called again as parts arrive
    --devices N            processes of the stages for several; more than GPUs share the only one
    --seconds N            time for all stages together

A stage is a shell command of `stages.py` with a limit of at most 8 minutes (without a GPU half an
hour), after which it ends with everything that it started. A stage that fails does not stop the
next one. Each writes `OUT/NN-STAGE.json` and `OUT/NN-STAGE.log`; after every stage, and at a
signal, `OUT/trial.md`, the page of results, and `OUT/trial.json`, all of them in one file, are
written anew. Without a GPU everything runs on the CPU by the same commands, with its figures.

Exit code: the number of stages that failed; 64 for a mistake in the arguments; 130 and 143 if ended
by a signal. Only the standard library is used, because the environment may have to be made first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu_trial.page import (  # noqa: E402
    FAILED,
    INTERRUPTED,
    PASSED,
    SKIPPED,
    WAITING,
    page,
)
from scripts.gpu_trial.parts import Manifest  # noqa: E402
from scripts.gpu_trial.processes import MARK, run_limited  # noqa: E402
from scripts.gpu_trial.stages import (  # noqa: E402
    CPU_SECONDS,
    ENVIRONMENT,
    MOST_SECONDS,
    NAMES,
    STAGES,
    Stage,
    missing,
    waits_for,
)

EXIT_USAGE = 64
MOST_FAILED = 63
TAIL_CHARACTERS = 6000
MOST_SHOWN = 40
LEAST_SECONDS = 15.0  # in which a stage can show something
COMMANDS = ROOT / "scripts" / "gpu_trial" / "commands.sh"
_ERROR = re.compile(r"mcore_rl: error: |^\s*(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt)\b")
Json = dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Parser that exits with 64: argparse's 2 would mean here that two stages failed."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"gpu_trial: error: {message}\n")


def read_options(tokens: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the arguments; `options.stages` are the requested ones, in their order."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="gpu_trial.sh", description=__doc__, formatter_class=raw)
    parser.add_argument("--list", action="store_true", help="print the stages and run nothing")
    parser.add_argument(
        "--from", dest="first", choices=NAMES, metavar="STAGE", help="begin with this stage"
    )
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, metavar="STAGE", help="these stages alone"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="results: JSON, logs, the page")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="checkpoints and runs (default: OUT/work)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a small model of Hugging Face")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL for --model")
    devices = "GPUs to use, or processes, which share the only GPU or the cores (default: all)"
    parser.add_argument("--devices", type=int, metavar="N", help=devices)
    parts = "wheels for a machine without a registry, by pack.py; stages that have run are left out"
    parser.add_argument("--parts", type=Path, metavar="DIR", help=parts)
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="time for all stages (default: no limit)"
    )
    limit = f"of every stage, instead of its own (at most {MOST_SECONDS})"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limit)
    options = parser.parse_args(tokens)
    if options.only and options.first:
        parser.error("--from and --only exclude each other; give one of them")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices {options.devices} must be at least 1")
    if options.limit is not None and not 0 < options.limit <= MOST_SECONDS:
        parser.error(f"--limit {options.limit:g} must be above 0 and at most {MOST_SECONDS}")
    if options.seconds is not None and options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g} must be above 0")
    if options.parts is not None:
        try:
            options.torch = Manifest.read(options.parts).torch
        except (OSError, ValueError, KeyError, TypeError) as fault:
            parser.error(
                f"--parts {options.parts} has no list of parts ({fault}); name the folder "
                "that scripts/gpu_trial/pack.py wrote"
            )
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model} has no config.json; name a Hugging Face folder")
    if options.prompts is not None and not options.prompts.is_file():
        parser.error(f"--prompts {options.prompts} is not a file")
    if options.prompts is not None and options.model is None:
        parser.error("--prompts is for --model, which is missing")
    start = NAMES.index(options.first) if options.first else 0
    options.stages = [s for s in STAGES[start:] if s.name in (options.only or NAMES)]
    return options


class Trial:
    """One call: its stages, and their results in `out`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.stages = options, options.stages
        self.deadline = time.monotonic() + (options.seconds or math.inf)
        moment = time.strftime("%Y%m%d-%H%M%S")
        self.out = (options.out or ROOT / "runs" / f"gpu-trial-{moment}").absolute()
        self.work = (options.work or self.out / "work").absolute()
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.facts: Json = {}
        self.results = {  # of earlier calls
            stage.name: json.loads(file.read_text())
            for stage in STAGES
            if (file := self._file(stage, "json")).is_file()
        }

    def _file(self, stage: Stage, kind: str) -> Path:
        return self.out / f"{NAMES.index(stage.name) + 1:02}-{stage.name}.{kind}"

    def run(self) -> int:
        """Run all stages; return the number that failed."""
        if self.options.parts and self.options.torch:
            say(f"torch {self.options.torch} is admitted, whatever mcore_rl supports")
        stages = [stage for stage in self.stages if not self._has_run(stage)]
        for stage in stages:
            say(f"{stage.name}: {stage.shows}")
            started = time.monotonic()
            try:
                self._write(stage, self._result(stage))
            except SystemExit as end:  # of a signal
                seconds = round(time.monotonic() - started, 1)
                why = f"ended by signal {int(end.code or 0) - 128}"
                self._write(stage, {**self._about(stage, INTERRUPTED, why), "seconds": seconds})
                raise
        say(f"the page is {self.out / 'trial.md'}")
        failed = [s for s in stages if self.results[s.name]["status"] == FAILED]
        return min(len(failed), MOST_FAILED)

    def _has_run(self, stage: Stage) -> bool:
        """Return whether an earlier visit has run a stage that need not be run again."""
        if not self.options.parts or self.options.only or stage.name == ENVIRONMENT:
            return False
        return self.results.get(stage.name, {}).get("status") in (PASSED, FAILED)

    def _write(self, stage: Stage, result: Json) -> None:
        """Write a stage's result, and the page and the file of all results."""
        self.results[stage.name] = result
        self._file(stage, "json").write_text(json.dumps(result, indent=1) + "\n")
        ordered = [self.results.get(name, {"stage": name}) for name in NAMES]
        (self.out / "trial.json").write_text(json.dumps(ordered, indent=1) + "\n")
        (self.out / "trial.md").write_text(page(ordered, self.facts))
        why = result.get("why") or ""
        say(f"{stage.name}: {result['status']} after {result['seconds']} s  {why}")

    def _about(self, stage: Stage, status: str, why: str | None = None) -> Json:
        facts: Json = {"stage": stage.name, "shows": stage.shows, "ended": time.time()}
        return {**facts, "status": status, "seconds": 0.0, **({"why": why} if why else {})}

    def _result(self, stage: Stage) -> Json:
        """Run a stage, or skip it with the reason."""
        left = self.deadline - time.monotonic()
        if left < LEAST_SECONDS:
            return self._about(stage, SKIPPED, f"--seconds {self.options.seconds:g} are over")
        if stage.name != ENVIRONMENT:
            self.facts = self.facts or self._read_facts()
            if parts := waits_for(stage, self.facts):
                return self._about(stage, WAITING, f"for {parts}")
            if reason := missing(stage, self.facts):
                return self._about(stage, SKIPPED, reason)
        log = self._file(stage, "log")
        outcome = run_limited(
            shell(f"{stage.command}\nexit $failed"),
            cwd=ROOT,
            log=log,
            environment=self._environment(),
            limit_seconds=min(left, self.options.limit or self._own_limit(stage)),
        )
        if stage.name == ENVIRONMENT:
            self.facts = self._read_facts()
        text = log.read_text(errors="replace")
        why = fault(stage, outcome, text)
        shown = [m[0] for p in stage.expects for m in re.finditer(p, text, re.MULTILINE)]
        result = {
            **self._about(stage, FAILED if why else PASSED),
            **outcome,
            "command": stage.command,
            "commands": re.findall(r"^\+ (.*)", text.replace(f"{ROOT}/", ""), re.MULTILINE),
            "found": [line.strip() for line in shown[:MOST_SHOWN]],
            "log": log.name,
            "facts": self.facts,
        }
        return {**result, "why": why, "log_tail": text[-TAIL_CHARACTERS:]} if why else result

    def _own_limit(self, stage: Stage) -> float:
        is_on_cpu = stage.name != ENVIRONMENT and not self.facts["has_cuda"]
        return CPU_SECONDS if is_on_cpu else stage.limit_seconds

    def _environment(self) -> dict[str, str]:
        """Return the environment of a stage, with the variables of `commands.sh`."""
        model, prompts, parts = self.options.model, self.options.prompts, self.options.parts
        admitted = {"MCORE_RL_ADMIT_TORCH": self.options.torch} if parts else {}
        return {
            **admitted,
            **os.environ,
            "OUT": str(self.out),
            "WORK": str(self.work),
            "HAS_CUDA": str(int(self.facts.get("has_cuda", False))),
            "NUM_GPUS": str(self.facts.get("gpus", 0)),
            "MODEL": str(model.absolute()) if model else "",
            "PROMPTS": str(prompts.absolute()) if prompts else "",
            "PARTS": str(parts.absolute()) if parts else "",
        }

    def _read_facts(self) -> Json:
        """Return what `facts.py` finds in the environment of the stages."""
        code = "[[ -n $BASE ]] && python scripts/gpu_trial/facts.py"
        environment = {**self._environment(), MARK: "facts"}
        done = subprocess.run(
            shell(code), cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            why = done.stderr.strip() or "no Python with torch and megatron.core was found"
            return {"has_cuda": False, "devices": 0, "missing": {"torch": why[-400:]}, "waits": {}}
        facts: Json = json.loads(done.stdout.splitlines()[-1])
        facts["gpus"] = facts["devices"] if facts["has_cuda"] else 0
        if self.options.devices is not None:
            most = facts["gpus"] if facts["gpus"] > 1 else self.options.devices
            facts["devices"] = min(self.options.devices, most)
        return facts


def has_environment(parts: Path | None) -> bool:
    variables = {**os.environ, "HAS_CUDA": "0", "PARTS": str(parts or "")}
    return not subprocess.run(shell("[[ -n $BASE ]]"), cwd=ROOT, env=variables).returncode


def shell(code: str) -> list[str]:
    return ["bash", "-c", f'. "{COMMANDS}"\n{code}']


def fault(stage: Stage, outcome: Json, text: str) -> str | None:
    """Return why a stage failed, in one line; None if it passed."""
    running = re.findall(r"^\+ (.*)", text, re.MULTILINE)[-1:]
    if outcome["timed_out"]:
        during = f" during {running[0][:200]}" if running else ""
        return f"ended at its limit of {outcome['limit_seconds']:g} s{during}"
    if outcome["exit_code"]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.search(line)]
        # The first of the user's mistakes, else the last exception, whose causes are above it.
        mistakes = [line for line in errors if "mcore_rl: error: " in line]
        best = mistakes[:1] or errors[-1:] or lines[-1:]
        return ": ".join([f"ended with {outcome['exit_code']}", *best])[:600]
    for pattern in stage.expects:
        if not re.search(pattern, text, re.MULTILINE):
            return f"its output has no line like {pattern}"
    return None


def say(line: str) -> None:
    print(f"gpu_trial: {time.strftime('%H:%M:%S')} {line}", flush=True)


def table() -> list[str]:
    """Return the stages as a table of Markdown, for --list and docs/using/gpu.md."""
    lines = [
        "| stage | limit, s | GPUs | needs | what it shows |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for stage in STAGES:
        needs = ", ".join([*stage.packages, *["CUDA"] * bool(stage.why_cuda)]) or "-"
        gpus = stage.num_devices if stage.packages else 0
        cells = (f"`{stage.name}`", stage.limit_seconds, gpus, needs, stage.shows)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # runs `finally`, which ends the stage's processes


def main(tokens: Sequence[str] | None = None) -> int:
    options = read_options(tokens)
    if options.list:
        print(*table(), sep="\n")
        return 0
    try:
        names = [stage.name for stage in options.stages]
        if ENVIRONMENT not in names and not has_environment(options.parts):
            raise OSError(
                "no Python with torch and Megatron is here; begin with the stage environment, or "
                "name an environment by MCORE_RL_ENV=DIR"
            )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        trial = Trial(options)
    except OSError as mistake:
        print(f"gpu_trial: error: {mistake}", file=sys.stderr)
        return EXIT_USAGE
    return trial.run()


if __name__ == "__main__":
    sys.exit(main())
