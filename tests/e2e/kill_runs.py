"""Kill runs whose engines sample ahead at random moments, and count the draws that they train on.

    python -m tests.e2e.kill_runs [--kills 20] [--kills-per-run 4] [--seed 0] [--staleness 1,2]
                                  [--trainers 2] [--engines 2] [--servers 0] [--steps 8]
                                  [--folder DIR]

A run of the tiny task by the launcher saves every step. SIGKILL ends a random rank, of the trainers
or of the engines, at a random moment, and the same command starts the run again, until its last
step is done, or until it has been killed often enough and is left alone. With --servers engines are
controllers of vLLM servers; a server that is killed starts again, and the run continues.
After every kill of a rank the launcher must have ended by itself and have left no process and no
shared memory. At a run's end each draw below the last position has been trained on exactly once, in
time, or is outstanding in the last checkpoint. Exit code 0 if all of this holds, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from mcore_rl.observe.run_directory import read_metrics
from scripts import kill_test
from tests.processes import lives
from tests.rank_pool import ROOT
from tests.vllm_servers import RECEIVES, VLLMServer, running

NUM_PROMPTS, NUM_SAMPLES = 8, 2
READY = "model and engines ready"
BANKED = re.compile(r"\[Resume\] the bank has (\d+) finished groups")


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    checkpoint: Path
    work: Path
    num_trainers: int = 2
    num_engines: int = 2
    num_steps: int = 8
    allowed: tuple[int, ...] = (1, 2)  # values of --rl-max-staleness
    kills_per_run: int = 4
    servers: tuple[VLLMServer, ...] = ()  # then engines are controllers

    @property
    def num_ranks(self) -> int:
        return self.num_trainers + self.num_engines

    def command(self, folder: Path, staleness: int) -> list[str]:
        num_processes = self.num_trainers if self.servers else self.num_ranks
        launcher = ["-m", "mcore_rl.launch", "--nproc-per-node", str(num_processes)]
        engines = ["--rl-rollout-ranks", f"{self.num_trainers}-{self.num_ranks - 1}"]
        engines += ["--rl-rollout-kv-cache-gib", "0.1"]
        if self.servers:
            urls = ",".join(each.url for each in self.servers)
            controllers = ("--rl-rollout-controllers", str(self.num_engines))
            engines = ["--rl-rollout-servers", urls, *controllers]
        return [
            *(sys.executable, *launcher, "-m", "mcore_rl.train"),
            *("--rl-hf-checkpoint", str(self.checkpoint)),
            *("--rl-prompts", str(self.checkpoint / "prompts" / "train.jsonl")),
            *("--rl-reward", "scripts.varied_reward:score", "--rl-reward-workers", "1"),
            *("--rl-num-steps", str(self.num_steps), "--save-interval", "1"),
            *("--rl-num-prompts-per-step", str(NUM_PROMPTS)),
            *("--rl-num-samples-per-prompt", str(NUM_SAMPLES)),
            *("--rl-num-logged-rollouts", "1000", "--rl-eval-interval", "0"),
            *("--rl-max-prompt-tokens", "24", "--rl-max-response-tokens", "96"),
            *("--lr", "1e-3", *engines, "--rl-max-staleness", str(staleness)),
            *("--rl-run-dir", str(folder)),
            *("--load", str(folder / "checkpoints"), "--rl-load-or-start"),
        ]


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a rank, a controller or a server, numbered in this order, with a delay after a
    number of steps of this start, or while it starts."""

    rank: int
    num_steps: int  # -1: before the engines are ready
    delay_seconds: float

    def __str__(self) -> str:
        moment = "the start" if self.num_steps < 0 else f"{self.num_steps} steps"
        return f"rank {self.rank}, {self.delay_seconds:.2f} s after {moment}"


@dataclass
class Ending:
    """How the launcher of a run ended."""

    exit_code: int
    output: str
    was_killed: bool = False  # a rank or a controller
    has_lost_server: bool = False
    faults: list[str] = field(default_factory=list)

    @property
    def num_banked(self) -> int:
        found = BANKED.search(self.output)
        return 0 if found is None else int(found[1])


def start(
    setting: Setting,
    folder: Path,
    staleness: int,
    kill: Kill | None = None,
    more: Sequence[str] = (),
    *,
    exit_code: int = 0,
) -> Ending:
    """Start a run, perhaps kill one of its ranks, and wait until it has ended; `exit_code` is that
    of a run that was not killed."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {
        **os.environ,
        **{kill_test.MARK: mark, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        "TORCHINDUCTOR_CACHE_DIR": str(setting.work / "inductor"),
    }
    log = setting.work / f"{folder.name}.{mark}.log"
    before = num_lines(folder)

    def has_come(moment: int) -> bool:
        if moment < 0:
            return True
        return num_lines(folder) >= before + moment and READY in log.read_text(errors="replace")

    with log.open("w") as output:
        process = subprocess.Popen(
            [*setting.command(folder, staleness), *more],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        names = kill_test.SharedNames(process.pid)
        names.start()
        happened = kill is not None and _kill(process, kill, has_come, setting)
        process.wait()
    lost_server = happened and kill is not None and kill.rank >= setting.num_ranks
    was_killed = happened and not lost_server
    ending = Ending(process.returncode, log.read_text(errors="replace"), was_killed, lost_server)
    if stray := kill_test.processes_with(mark):
        ending.faults.append(f"{len(stray)} processes are left: {stray}")
    if memory := names.left():
        ending.faults.append(f"in /dev/shm is left: {memory}")
    if was_killed:
        assert kill is not None
        if ending.exit_code == 0:
            ending.faults.append("the exit code is 0")
        said = (f"rank      : {kill.rank} ", "SIGKILL")
        if setting.servers and kill.rank >= setting.num_trainers:
            number = kill.rank - setting.num_trainers
            said = (f"controller {number} of --rl-rollout-servers ended by SIGKILL",)
        if any(text not in ending.output for text in said):
            ending.faults.append("the output does not name what was killed")
    elif ending.exit_code != exit_code:
        ending.faults.append(f"it ended with {ending.exit_code}: {ending.output[-3000:]}")
    return ending


def _kill(
    process: subprocess.Popen[bytes],
    kill: Kill,
    has_come: Callable[[int], bool],
    setting: Setting,
) -> bool:
    """Wait for the moment, and kill; False if the run has ended before."""
    while process.poll() is None:
        if kill.rank >= setting.num_ranks and has_come(kill.num_steps):
            server = setting.servers[kill.rank - setting.num_ranks]
            time.sleep(kill.delay_seconds)
            server.kill()
            server.start()
            return process.poll() is None
        if has_come(kill.num_steps) and (pid := _pid_of(process.pid, kill.rank)):
            time.sleep(kill.delay_seconds)
            if process.poll() is None and lives(pid):
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def _pid_of(launcher: int, rank: int) -> int | None:
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if process.environ().get("RANK") == str(rank):
                return process.pid
        except psutil.Error:
            continue
    return None


def num_lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def history(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The logged samples of each step that has remained: of the last time that it was done."""
    rows: dict[int, list[dict[str, Any]]] = {}
    before = None
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut by a kill
        if row["step"] != before or len(rows[row["step"]]) == NUM_PROMPTS * NUM_SAMPLES:
            rows[row["step"]] = []
        rows[row["step"]].append(row)
        before = row["step"]
    return rows


def faults_of_history(folder: Path, num_steps: int, staleness: int) -> list[str]:
    """What is wrong with the draws of a run that has ended."""
    found = []
    rows, metrics = history(folder), read_metrics(folder / "metrics.jsonl")
    for step in range(num_steps):
        oldest = metrics[step]["rollout/staleness_max"]
        if oldest > staleness:
            found.append(f"step {step} has a staleness of {oldest}")
        if metrics[step]["rollout/stale_groups"]:
            found.append(f"step {step} has dropped groups")
    counts = Counter(row["draw"] for step in range(num_steps) for row in rows[step])
    wrong = {draw: count for draw, count in counts.items() if count != NUM_SAMPLES}
    if wrong or len(counts) != num_steps * NUM_PROMPTS:
        found.append(f"{len(counts)} draws, of which these are not there once: {wrong}")
    checkpoint = folder / "checkpoints" / f"iter_{num_steps:07d}"
    end = json.loads((checkpoint / "rollout" / "ahead.json").read_text())
    outstanding = set(map(int, end["outstanding"]))
    if lost := set(range(end["next_draw"])) - counts.keys() - outstanding:
        found.append(f"draws {sorted(lost)} are lost")
    if twice := counts.keys() & outstanding:
        found.append(f"draws {sorted(twice)} would be trained on again")
    return found


def drawn(rng: random.Random, setting: Setting, num_done: int) -> Kill:
    """A moment of a run after a number of steps."""
    num_left = max(1, setting.num_steps - num_done)
    moment = -1 if rng.random() < 0.15 else rng.randrange(min(3, num_left))
    target = rng.randrange(setting.num_ranks + len(setting.servers))
    return Kill(target, moment, (0.6 if moment >= 0 else 8) * rng.random())


def run_kills(setting: Setting, kills: int, seed: int, console: Console) -> int:
    """Kill until `kills` kills have happened, and end the last run; return the number of faults."""
    rng, num_done, num_runs, num_bad = random.Random(seed), 0, 0, 0
    table = Table(title=f"{kills} kills, seed {seed}")
    for name in ("run", "K", "killed", "exit code", "found in the bank", "then"):
        table.add_column(name)
    while num_done < kills:
        folder, staleness = setting.work / f"run{num_runs}", rng.choice(setting.allowed)
        is_over, of_run = False, 0
        while not is_over:
            kill = None
            if num_done < kills and of_run < setting.kills_per_run:
                kill = drawn(rng, setting, len(metrics_so_far(folder)))
            ending = start(setting, folder, staleness, kill)
            is_over = not ending.was_killed
            faults, then = ending.faults, f"{len(metrics_so_far(folder))} steps are there"
            if is_over and not faults:
                faults = faults_of_history(folder, setting.num_steps, staleness)
                then = "every draw was trained once"
            num_done += ending.was_killed or ending.has_lost_server
            of_run += ending.was_killed or ending.has_lost_server
            num_bad += bool(faults)
            killed = str(kill) if ending.was_killed or ending.has_lost_server else "-"
            said = (str(staleness), killed, str(ending.exit_code), str(ending.num_banked))
            table.add_row(str(num_runs), *said, "; ".join(faults) or then)
            console.print(*said, "; ".join(faults) or then, markup=False)
            if faults:
                console.print(ending.output[-3000:], markup=False)
                is_over = True
        num_runs += 1
    console.print(table)
    return num_bad


def metrics_so_far(folder: Path) -> dict[int, dict[str, float]]:
    file = folder / "metrics.jsonl"
    return read_metrics(file) if file.exists() else {}


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kills-per-run", type=int, default=4, help="before a run is left alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", default="1,2", help="values of --rl-max-staleness")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="keep all files there; a temporary one if not")
    args = parser.parse_args(tokens)
    with tempfile.TemporaryDirectory(prefix="mcore_rl_kill_") as temporary:
        work = args.folder or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        checkpoint = kill_test.make_checkpoint(work / "checkpoint", size="micro")
        allowed = tuple(int(each) for each in args.staleness.split(","))
        sizes = args.trainers, args.engines, args.steps
        setting = Setting(checkpoint, work, *sizes, allowed, args.kills_per_run)
        console = Console(width=140, highlight=False)
        with running(checkpoint, args.servers, *RECEIVES) as servers:
            setting = replace(setting, servers=tuple(servers))
            return int(run_kills(setting, args.kills, args.seed, console) > 0)


if __name__ == "__main__":
    sys.exit(main())
