"""The first hour on a GPU, stage by stage; `bash scripts/gpu_trial.sh` starts it.

    --list                 the stages, their limits and what they need
    --from STAGE           begin with this stage; --only STAGE ... : only these
    --model DIR            a real small model in addition to the tiny ones (with --prompts)
    --out DIR              folder of the results (default: a new folder in runs/)

A stage is a separate process with a limit of at most 8 minutes, after which it ends with everything
that it started. A stage that fails does not stop the next one. Each writes `OUT/NN-STAGE.json` and
`OUT/NN-STAGE.log`; `OUT/trial.md` is the page of results, rewritten after every stage.

Without a GPU everything runs on the CPU by the same code, with the CPU's figures.

Exit code: the number of stages that failed; 64 for a mistake in the arguments; 130 and 143 if ended
by a signal. Only the standard library is used, because the environment may have to be made first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu_trial import environments  # noqa: E402
from scripts.gpu_trial.page import page  # noqa: E402
from scripts.gpu_trial.processes import (  # noqa: E402
    GRACE_SECONDS,
    MARK,
    Memory,
    end_all,
    memory_reader,
    processes_of,
)
from scripts.gpu_trial.table import (  # noqa: E402
    ENVIRONMENT,
    FAILED,
    MOST_SECONDS,
    NAMES,
    PASSED,
    SKIPPED,
    STAGES,
    Stage,
    missing,
)

EXIT_USAGE = 64
MOST_FAILED = 63
TAIL_CHARACTERS = 6000
Json = dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Parser that exits with 64: argparse's 2 would mean here that two stages failed."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"gpu_trial: error: {message}\n")


def make_parser() -> Parser:
    parser = Parser(
        prog="gpu_trial.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the stages and run nothing")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin with this stage")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="these stages alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="results: JSON, logs, the page")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="checkpoints and runs (default: OUT/work)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a small model of Hugging Face")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL for --model")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="GPUs to use, or processes where there is none (default: all GPUs, or the cores)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"of every stage, instead of its own (at most {MOST_SECONDS})",
    )
    return parser


class Mistake(Exception):
    """A mistake in the arguments that the caller can correct, in one sentence."""


def chosen(options: argparse.Namespace) -> list[Stage]:
    """Return the requested stages, in their order."""
    names = [*(options.only or ()), *([options.first] if options.first else [])]
    for name in names:
        if name not in NAMES:
            raise Mistake(f"{name} is not a stage; choose among {', '.join(NAMES)}")
    if options.only and options.first:
        raise Mistake("--from and --only exclude each other; give one of them")
    if options.only:
        return [stage for stage in STAGES if stage.name in options.only]
    start = NAMES.index(options.first) if options.first else 0
    return list(STAGES[start:])


def check(options: argparse.Namespace) -> None:
    """Raise `Mistake` for invalid values."""
    if options.devices is not None and options.devices < 1:
        raise Mistake(f"--devices {options.devices} must be at least 1")
    if options.limit is not None and not 0 < options.limit <= MOST_SECONDS:
        raise Mistake(f"--limit {options.limit:g} must be above 0 and at most {MOST_SECONDS}")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise Mistake(f"--model {options.model} has no config.json; name a Hugging Face folder")
    if options.prompts is not None and not options.prompts.is_file():
        raise Mistake(f"--prompts {options.prompts} is not a file")
    if options.prompts is not None and options.model is None:
        raise Mistake("--prompts is for --model, which is missing")


def run_stage(
    stage: Stage,
    command: Sequence[str],
    *,
    log: Path,
    environment: dict[str, str],
    limit_seconds: float,
    memory: Memory,
    grace_seconds: float = GRACE_SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> Json:
    """Run a stage's process to its end or its limit, and end everything that it started.

    Returns `status`, `exit_code`, `seconds`, `timed_out` and the peaks of memory.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    started = now()
    timed_out = False
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if now() - started > limit_seconds:
                    timed_out = True
                    break
                memory.sample()
                try:
                    process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            left = processes_of(mark)
            end_all(process, mark, grace_seconds)
    passed = process.returncode == 0 and not timed_out
    return {
        "status": PASSED if passed else FAILED,
        "exit_code": process.returncode,
        "seconds": round(now() - started, 1),
        "limit_seconds": limit_seconds,
        "timed_out": timed_out,
        "left_processes": [] if timed_out else left,
        "memory": memory.found(),
    }


class Trial:
    """One call: its stages, and their results in `out`."""

    def __init__(self, options: argparse.Namespace, stages: Sequence[Stage]) -> None:
        self.options, self.stages = options, stages
        moment = time.strftime("%Y%m%d-%H%M%S")
        self.out = (options.out or ROOT / "runs" / f"gpu-trial-{moment}").absolute()
        self.work = (options.work or self.out / "work").absolute()
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.python = environments.find()
        self.facts: Json = {}
        self.results = self._earlier()

    def _earlier(self) -> dict[str, Json]:
        """Return the results of earlier calls in `out`."""
        found = {}
        for stage in STAGES:
            file = self._file(stage, "json")
            if file.is_file():
                found[stage.name] = json.loads(file.read_text())
        return found

    def _file(self, stage: Stage, kind: str) -> Path:
        return self.out / f"{NAMES.index(stage.name) + 1:02}-{stage.name}.{kind}"

    def run(self) -> int:
        """Run all stages; return the number that failed."""
        for stage in self.stages:
            self._say(f"{stage.name}: {stage.shows}")
            result = self._result(stage)
            self.results[stage.name] = result
            self._file(stage, "json").write_text(json.dumps(result, indent=1) + "\n")
            (self.out / "trial.md").write_text(self._page())
            why = result.get("why") or ""
            self._say(f"{stage.name}: {result['status']} after {result['seconds']} s  {why}")
        self._say(f"the page is {self.out / 'trial.md'}")
        failed = [s for s in self.stages if self.results[s.name]["status"] == FAILED]
        return min(len(failed), MOST_FAILED)

    def _page(self) -> str:
        ordered = [self.results.get(stage.name, {"stage": stage.name}) for stage in STAGES]
        return page(ordered, self.facts)

    def _result(self, stage: Stage) -> Json:
        """Run a stage, or skip it with the reason; return its result."""
        about: Json = {"stage": stage.name, "shows": stage.shows, "started": time.time()}
        if stage.name != ENVIRONMENT:
            if not self.facts:
                self.facts = self._probed()
            reason = missing(stage, self.facts)
            if reason:
                return {**about, "status": SKIPPED, "why": reason, "seconds": 0.0}
        result_file, log = self.work / f"{stage.name}.result.json", self._file(stage, "log")
        result_file.unlink(missing_ok=True)
        outcome = run_stage(
            stage,
            self._command(stage, result_file),
            log=log,
            environment=environments.variables(self.facts.get("python")),
            limit_seconds=self.options.limit or stage.limit_seconds,
            memory=Memory(memory_reader()),
        )
        if stage.name == ENVIRONMENT:
            self.python, self.facts = environments.find(), {}
            self.facts = self._probed()
        told = json.loads(result_file.read_text()) if result_file.is_file() else {}
        result = {**about, **outcome, **told, "log": log.name, "facts": self.facts}
        if told.get("skipped"):
            result |= {"status": SKIPPED, "why": told["skipped"]}
        elif outcome["status"] == FAILED:
            result["log_tail"] = log.read_text(errors="replace")[-TAIL_CHARACTERS:]
            result["why"] = _why(outcome, told, result["log_tail"])
        return result

    def _command(self, stage: Stage, result_file: Path) -> list[str]:
        if stage.name == ENVIRONMENT:
            script = str(ROOT / "scripts" / "gpu_trial" / "environments.py")
            limit = self.options.limit or stage.limit_seconds
            return [sys.executable, script, str(result_file), str(self.out), str(limit)]
        order = {
            "stage": stage.name,
            "work": str(self.work),
            "result": str(result_file),
            "devices": self.facts["devices"],
            "has_cuda": self.facts["has_cuda"],
            "packages": self.facts["packages"],
            "model": str(self.options.model.absolute()) if self.options.model else None,
            "prompts": str(self.options.prompts.absolute()) if self.options.prompts else None,
        }
        file = self.work / f"{stage.name}.order.json"
        file.write_text(json.dumps(order))
        return [self.facts["python"], str(ROOT / "scripts" / "gpu_trial" / "stages.py"), str(file)]

    def _probed(self) -> Json:
        """Probe the environment; without one every stage is skipped."""
        facts = environments.probe(self.python)
        if self.options.devices is not None and not facts["has_cuda"]:
            facts["devices"] = self.options.devices
        elif self.options.devices is not None:
            facts["devices"] = min(facts["devices"], self.options.devices)
        return facts

    @staticmethod
    def _say(line: str) -> None:
        print(f"gpu_trial: {time.strftime('%H:%M:%S')} {line}", flush=True)


def _why(outcome: Json, told: Json, log_tail: str) -> str:
    """Return why a stage failed, in one line."""
    if outcome["timed_out"]:
        running = told.get("running")
        during = f" during {running}" if running else ""
        return f"ended at its limit of {outcome['limit_seconds']:g} s{during}"
    last = log_tail.strip().rpartition("\n")[2]
    return told.get("error") or f"ended with {outcome['exit_code']}{last and ': ' + last[:300]}"


def print_stages() -> None:
    """Print the table of --list."""
    for stage in STAGES:
        needs = f"{stage.num_devices} GPUs" if stage.num_devices > 1 else ""
        needs = ", ".join(filter(None, [needs, *stage.packages, "CUDA" * stage.only_cuda]))
        print(f"{stage.name:15} {stage.limit_seconds:4} s  {stage.shows}")
        print(f"{'':23}needs {needs or 'nothing'}")


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # runs `finally`, which ends the stage's processes


def main(tokens: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(tokens)
    try:
        stages = chosen(options)
        check(options)
        if options.list:
            print_stages()
            return 0
        if environments.find() is None and ENVIRONMENT not in [s.name for s in stages]:
            raise Mistake(
                "no Python with torch and Megatron is here; begin with the stage environment, or "
                "name an environment by MCORE_RL_ENV=DIR"
            )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        trial = Trial(options, stages)
    except (Mistake, OSError) as mistake:
        print(f"gpu_trial: error: {mistake}", file=sys.stderr)
        return EXIT_USAGE
    return trial.run()


if __name__ == "__main__":
    sys.exit(main())
