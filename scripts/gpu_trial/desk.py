"""Tools of a stage: recorded commands, figures, and models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXT_LINES = 60
# Sizes that replace those of benchmarks/cases.py: on a GPU 1.7 GB dense and 1.5 GB with experts, so
# that a copy takes milliseconds; on a CPU small, so that steps take seconds.
_ON_CPU: dict[str, Any] = dict(num_hidden_layers=4)
_ON_GPU: dict[str, dict[str, Any]] = {
    "dense": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=4,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    ),
    "moe": dict(
        hidden_size=2048, intermediate_size=4096, moe_intermediate_size=1024,
        num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=32,
    ),
}  # fmt: skip
_ERROR = re.compile(r"mcore_rl: error: |^\s*(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt)\b")


class Failed(Exception):
    """A failure of the stage; `text` is the output that explains it."""

    def __init__(self, why: str, text: str = "") -> None:
        super().__init__(why)
        self.text = text


class Skipped(Exception):
    """The stage cannot show anything on this machine."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    output: str
    seconds: float

    def last_error(self) -> str:
        """Return the line that best describes the failure."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.search(line)]
        # The first of the user's mistakes, else the last exception, whose causes are above it.
        told = [line for line in errors if "mcore_rl: error: " in line]
        best = (told[:1] or errors[-1:] or lines[-1:] or [f"ended with {self.exit_code}"])[0]
        return best.strip()[:600]


class Desk:
    """The tools of one stage. `save` writes the results so far for the driver."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.stage: str = order["stage"]
        self.work = Path(order["work"])
        self.has_cuda: bool = order["has_cuda"]
        self.devices: int = order["devices"]
        self.packages: dict[str, Any] = order["packages"]
        self.model = Path(order["model"]) if order["model"] else None
        self._prompts = Path(order["prompts"]) if order["prompts"] else None
        self._result = Path(order["result"])
        self.python = sys.executable
        self.figures: dict[str, Any] = {}
        self.notes: list[str] = []
        self.texts: dict[str, str] = {}  # shown verbatim
        self.environment: dict[str, str] = {}  # of the commands that follow
        if not self.has_cuda:
            # Processes share the cores, and compiling C++ for them takes minutes.
            quiet = {"TORCHDYNAMO_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            os.environ.update({name: os.environ.get(name, value) for name, value in quiet.items()})
        self._commands: list[dict[str, Any]] = []
        self._told: dict[str, Any] = {}

    def at_work(self, function: Callable[[Desk], None]) -> int:
        """Call `function`; return the exit code. The result contains its exceptions."""
        try:
            function(self)
        except Skipped as reason:
            self._told["skipped"] = str(reason)
        except Failed as failure:
            self._told |= {"error": str(failure), "error_text": failure.text}
        except Exception as failure:
            traceback.print_exc()
            self._told["error"] = f"{type(failure).__name__}: {failure}"[:600]
            self._told["error_text"] = traceback.format_exc()
        self.save()
        return int("error" in self._told)

    def save(self, running: str | None = None) -> None:
        """Replace the result by the current one; `running` is the command in progress."""
        told = {
            "commands": self._commands,
            "figures": self.figures,
            "notes": self.notes,
            "texts": self.texts,
            "running": running,
            **self._told,
        }
        partial = self._result.with_suffix(".partial")
        partial.write_text(json.dumps(told, indent=1))
        os.replace(partial, self._result)

    # Commands

    def run(self, label: str, command: Sequence[str], *, check: bool = True) -> Done:
        """Run a command, with its output in the stage's log. With `check` it must end with 0."""
        print(f"+ {shlex.join(command)}", flush=True)
        lines = []
        with self.timed(label) as record:
            record["command"] = self._shown(command)
            started = time.monotonic()
            with subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", flush=True)
                    lines.append(line)
            seconds = round(time.monotonic() - started, 1)
            record["exit_code"] = process.returncode
        done = Done(process.returncode, "".join(lines), seconds)
        if check and done.exit_code:
            raise Failed(f"{label}: {done.last_error()}", "".join(lines[-TEXT_LINES:]))
        return done

    def launch(
        self,
        label: str,
        processes: int,
        module: str,
        tokens: Sequence[str],
        *,
        check: bool = True,
    ) -> Done:
        """Run a module of mcore_rl on `processes` ranks."""
        launcher = [self.python, "-m", "mcore_rl.launch", "--nproc-per-node", str(processes)]
        return self.run(label, [*launcher, "-m", module, *tokens], check=check)

    @contextlib.contextmanager
    def timed(self, label: str) -> Iterator[dict[str, Any]]:
        """Record the duration of a `with` block."""
        record: dict[str, Any] = {"label": label}
        self._commands.append(record)
        self.save(running=label)
        started = time.monotonic()
        try:
            yield record
        finally:
            record["seconds"] = round(time.monotonic() - started, 1)
            self.save()

    def _shown(self, command: Sequence[str]) -> str:
        """Return the command without the folders of this machine."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        text = " ".join([*variables, shlex.join(command)])
        text = text.replace(self.python, "python").replace(str(self.work), "WORK")
        return text.replace(f"{ROOT}/", "")

    # Models and folders

    def fresh(self, name: str) -> Path:
        """Return the name of a folder that does not exist yet."""
        number = 0
        while (path := self.work / f"{self.stage}-{name}.{number}").exists():
            number += 1
        return path

    def task(self, checkpoint: Path) -> list[str]:
        """Return the flags of a job on a checkpoint, with short prompts and responses."""
        prompts = checkpoint / "prompts" / "train.jsonl"
        length = ("24", "8")
        if checkpoint == self.model:
            prompts, length = self._prompts or self.tiny() / "prompts" / "train.jsonl", ("256", "8")
        flags = ["--rl-hf-checkpoint", str(checkpoint), "--rl-prompts", str(prompts)]
        flags += ["--rl-max-prompt-tokens", length[0], "--rl-max-response-tokens", length[1]]
        return flags if self.has_cuda else [*flags, "--rl-rollout-kv-cache-gib", "0.25"]

    def tiny(self, arch: str = "deepseek_v3") -> Path:
        """Return a checkpoint of some 4 million random weights, made once in seconds."""
        return self._made(f"tiny_{arch}", arch, "tiny", {})

    def sized(self, kind: str) -> Path:
        """Return a checkpoint that takes a while to move; `kind` is dense or moe."""
        sys.path[:0] = [str(ROOT)]
        from benchmarks.cases import DENSE, MOE

        model = DENSE if kind == "dense" else MOE
        sizes = _ON_GPU[kind] if self.has_cuda else _ON_CPU
        return self._made(kind, model.arch, model.size, {**model.overrides, **sizes})

    def _made(self, name: str, arch: str, size: str, overrides: dict[str, Any]) -> Path:
        from make_tiny_deepseek import MARKER, make_checkpoint

        folder = self.work / name
        if not (folder / MARKER).is_file():
            with self.timed(f"random weights for {name}"):
                make_checkpoint(folder, arch=arch, size=size, overrides=overrides)
        return folder

    def model_with_prompts(self) -> Path:
        """Return the given model, or the tiny one, in a folder with prompts/train.jsonl."""
        if self.model is None:
            return self.tiny()
        folder = self.work / "model_with_prompts"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "prompts").mkdir(parents=True)
        for file in self.model.iterdir():
            if file.name != "prompts":
                (folder / file.name).symlink_to(file)
        prompts = self._prompts or self.tiny() / "prompts" / "train.jsonl"
        (folder / "prompts" / "train.jsonl").symlink_to(prompts)
        return folder
