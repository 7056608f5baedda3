"""Kill a small run at seeded random moments, and show that nothing is lost.

    python scripts/kill_test.py [--kills 20] [--seed 0] [--processes 2] [--steps 6] [--folder DIR]
                                [--limit-seconds 60] [--flags "--rl-oversample 2 ..."]

A run of the tiny task, with partial rollouts unless --flags replaces them, is done undisturbed.
Then runs are killed: SIGKILL or SIGTERM, to one rank or to all, at a random moment of a random step
(rollout, reward, hand-over to rollout and back, log-probs, update, checkpoint), and started again
by the same command. After every kill

- the launcher has ended within --limit-seconds, with a non-zero exit code and a text that names
  the rank and the signal;
- no process of the run is left, nothing new in /dev/shm, nothing in its temporary folder;
- the newest complete checkpoint is undamaged.

After every --kills-per-run kills, or once the last step is saved, a run is left alone, ends, and
has the same weights as the undisturbed one, bit for bit. Exit code 0 if all of this holds, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mcore_rl.observe.run_directory import read_metrics  # noqa: E402
from mcore_rl.trainer.resume import folders  # noqa: E402
from scripts.make_tiny_deepseek import make_checkpoint  # noqa: E402

SAVE_INTERVAL = 2
PARTIAL = ("--rl-partial-rollouts", "--rl-oversample", "2", "--rl-max-staleness", "2")
STAGES = {  # stage -> the metric of its duration
    "to_rollout": "time/reshard_to_rollout_seconds",
    "rollout": "time/rollout_seconds",
    "reward": "time/reward_seconds",
    "to_train": "time/reshard_to_train_seconds",
    "log_probs": "time/log_probs_seconds",
    "train": "time/train_seconds",
    "checkpoint": "time/checkpoint_seconds",
}
LIMIT_SECONDS = 60.0  # from a kill to the end of the run
MARK = "MCORE_RL_KILL_TEST"  # in the environment of every process of a run


@dataclass(frozen=True)
class Kill:
    """The moment, signal and ranks of a kill."""

    stage: str
    step: int
    delay_seconds: float
    signal: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        target = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else "all ranks"
        moment = f"{1000 * self.delay_seconds:.0f} ms into {self.stage} of step {self.step}"
        return f"{self.signal} to {target}, {moment}"


@dataclass
class Ending:
    """The end of a launcher and its processes."""

    exit_code: int
    output: str
    seconds_after_kill: float | None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Setting:
    """Settings that all runs share."""

    checkpoint: Path
    work: Path
    num_processes: int
    num_steps: int
    flags: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        launcher = ["-m", "mcore_rl.launch", "--nproc-per-node", str(self.num_processes)]
        return [
            *(sys.executable, *launcher, "-m", "mcore_rl.train"),
            *("--rl-hf-checkpoint", str(self.checkpoint)),
            *("--rl-prompts", str(self.checkpoint / "prompts" / "train.jsonl")),
            *("--rl-reward", "scripts.varied_reward:score", "--rl-reward-workers", "1"),
            *("--rl-num-steps", str(self.num_steps), "--save-interval", str(SAVE_INTERVAL)),
            *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
            *("--rl-max-prompt-tokens", "24", "--rl-max-response-tokens", "8"),
            *("--rl-eval-interval", "0", "--rl-rollout-kv-cache-gib", "0.1", "--lr", "1e-3"),
            *("--rl-num-mini-batches", "2"),  # so that log-probs are a separate stage
            *("--rl-run-dir", str(folder), "--rl-export-hf", str(folder / "exported")),
            *("--load", str(folder / "checkpoints"), "--rl-load-or-start", "--rl-deterministic"),
            *self.flags,
        ]


def run(
    setting: Setting, folder: Path, kill: Kill | None = None, more: Sequence[str] = ()
) -> Ending:
    """Start a run, wait for its end or its kill, and check what it leaves behind."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    temporary = Path(tempfile.mkdtemp(prefix="kill_"))  # short, because it contains sockets
    time_file = setting.work / f"killed.{mark}"
    command = [*setting.command(folder), *more]
    environment = {
        **os.environ,
        **{MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        **{"TORCHDYNAMO_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        # Compiled code is shared by all runs; by default it is in the temporary folder.
        "TORCHINDUCTOR_CACHE_DIR": str(setting.work / "inductor"),
    }
    if kill is not None:
        environment["MCORE_RL_KILL"] = json.dumps({**vars(kill), "time_file": str(time_file)})
        command += ["--rl-import", str(ROOT / "scripts" / "kill_at.py")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    names = SharedNames(process.pid)
    names.start()
    output, _ = process.communicate()
    now = time.time()
    ending = Ending(process.returncode, output, None)
    if time_file.exists():
        ending.seconds_after_kill = now - float(time_file.read_text(encoding="utf-8"))
        time_file.unlink()
    if stray := processes_with(mark):
        ending.faults.append(f"{len(stray)} processes are left: {stray}")
    if memory := names.left():
        ending.faults.append(f"in /dev/shm is left: {memory}")
    if files := [path.name for path in temporary.iterdir()]:
        ending.faults.append(f"in the temporary folder is left: {sorted(files)}")
    else:
        temporary.rmdir()
    return ending


def processes_with(mark: str) -> list[str]:
    """Return the command lines of the processes whose environment has the mark."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return commands


class SharedNames(threading.Thread):
    """Thread that records the names in /dev/shm of a launcher's processes; others use it, too."""

    def __init__(self, launcher: int) -> None:
        super().__init__(daemon=True)
        self._launcher, self._ended = psutil.Process(launcher), threading.Event()
        self._names: set[str] = set()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            with contextlib.suppress(psutil.Error):
                for process in self._launcher.children(recursive=True):
                    with contextlib.suppress(OSError):
                        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
                        self._names |= set(re.findall(r"/dev/shm/(\S+)", maps))

    def left(self) -> list[str]:
        """Return the names that still exist."""
        self._ended.set()
        self.join()
        return sorted(self._names & set(os.listdir("/dev/shm")))


def faults_of_kill(
    ending: Ending, kill: Kill, folder: Path, limit_seconds: float = LIMIT_SECONDS
) -> list[str]:
    """Return the faults after a kill."""
    faults = list(ending.faults)
    if ending.seconds_after_kill is None:
        return [*faults, "the kill did not happen"]
    if ending.exit_code == 0:
        faults.append("the exit code is 0")
    if ending.seconds_after_kill > limit_seconds:
        faults.append(f"it ended {ending.seconds_after_kill:.0f} s after the kill")
    named = any(f"rank      : {rank} " in ending.output for rank in kill.ranks)
    if not named or kill.signal not in ending.output:
        faults.append("the output names neither rank nor signal")
    for step in folders.complete_steps(folder / "checkpoints")[:1]:
        faults += [str(damage) for damage in folders.damage(folder / "checkpoints", step)]
    return faults


def weights(folder: Path) -> str:
    """Return one digest of all exported tensors."""
    digest = hashlib.sha256()
    files = sorted((folder / "exported").glob("*.safetensors"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else "nothing was exported"


def learns(folder: Path, num_steps: int) -> bool:
    """Return whether every step changed the weights."""
    metrics = read_metrics(folder / "metrics.jsonl")
    return all(metrics[step]["grad_norm"] > 0 for step in range(num_steps))


def stage_seconds(folder: Path) -> dict[str, float]:
    """Return the mean seconds of each stage, without the first step, which warms up."""
    steps = [m for step, m in read_metrics(folder / "metrics.jsonl").items() if step > 0]
    means = {}
    for stage, name in STAGES.items():
        values = [m[name] for m in steps if m.get(name)]
        means[stage] = sum(values) / len(values) if values else 0.0
    return means


def faults_of_rest(setting: Setting, folder: Path, expected: str) -> list[str]:
    """Leave a run alone; return the faults at its end."""
    rest = run(setting, folder)
    if rest.exit_code:
        return [*rest.faults, f"the rerun ended with {rest.exit_code}: {rest.output[-3000:]}"]
    if weights(folder) != expected:
        return [*rest.faults, "the weights are not those of the undisturbed run"]
    return rest.faults


def newest_step(folder: Path) -> int:
    """Return the number of steps done in the newest complete checkpoint."""
    return next(iter(folders.complete_steps(folder / "checkpoints")), 0)


def draw(rng: random.Random, setting: Setting, folder: Path, seconds: dict[str, float]) -> Kill:
    """Draw a random moment of the remaining steps, of which there must be at least one."""
    stage = rng.choice(list(STAGES))
    steps = list(range(newest_step(folder), setting.num_steps))
    if stage == "checkpoint":  # the last step is always saved
        # A step ends when its metrics are written, and is saved after that.
        saved = [step + 1 for step in steps if (step + 1) % SAVE_INTERVAL == 0]
        steps = saved or [setting.num_steps]
    ranks = tuple(range(setting.num_processes))
    return Kill(
        stage,
        rng.choice(steps),
        rng.random() * seconds[stage],
        rng.choice(["SIGKILL", "SIGTERM"]),
        rng.choice([ranks, (rng.choice(ranks),)]),
    )


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-per-run", type=int, default=4, help="before a run is left alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--limit-seconds", type=float, default=LIMIT_SECONDS, help="from a kill to the end"
    )
    parser.add_argument("--flags", type=str.split, default=PARTIAL, help="of the runs, in one text")
    parser.add_argument("--folder", type=Path, help="keep all files there; a temporary one if not")
    args = parser.parse_args(tokens)
    with tempfile.TemporaryDirectory(prefix="mcore_rl_kill_") as temporary:
        return _test(args, args.folder or Path(temporary))


def _test(args: argparse.Namespace, work: Path) -> int:
    console = Console(width=140, highlight=False)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(work / "checkpoint", size="micro")
    setting = Setting(checkpoint, work, args.processes, args.steps, tuple(args.flags))
    whole = run(setting, work / "undisturbed")
    if whole.exit_code or whole.faults:
        console.print(whole.output[-6000:], markup=False)
        console.print(f"the undisturbed run failed: {whole.faults}", markup=False)
        return 1
    if not learns(work / "undisturbed", args.steps):
        console.print("some step has no gradient: equal weights would show nothing")
        return 1
    expected, seconds = weights(work / "undisturbed"), stage_seconds(work / "undisturbed")
    rng, num_bad = random.Random(args.seed), 0
    table = Table(title=f"{args.kills} kills, seed {args.seed}")
    for name in ("", "kill", "exit code", "ended after", "then"):
        table.add_column(name)
    num_runs = num_kills = 0  # num_kills counts the current run's
    for number in range(args.kills):
        folder = work / f"run{num_runs}"
        kill = draw(rng, setting, folder, seconds)
        ending = run(setting, folder, kill)
        faults = faults_of_kill(ending, kill, folder, args.limit_seconds)
        num_kills += 1
        saved = newest_step(folder)
        then = f"step {saved} is there"
        if saved == args.steps or num_kills == args.kills_per_run or number + 1 == args.kills:
            faults += faults_of_rest(setting, folder, expected)
            num_runs, num_kills = num_runs + 1, 0
            then = "the rerun ends with the same weights"
        num_bad += bool(faults)
        after = ending.seconds_after_kill
        table.add_row(
            str(number + 1),
            str(kill),
            str(ending.exit_code),
            "-" if after is None else f"{after:.1f} s",
            escape("; ".join(faults) or then),
        )
        console.print(f"{number + 1}: {kill}: {'; '.join(faults) or 'as it should'}", markup=False)
        if faults:
            console.print(ending.output[-3000:], markup=False)
    console.print(table)
    console.print(f"{args.kills - num_bad} of {args.kills} kills went as they should")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
