"""scripts/run_deepseek_moe.sh and its presets.

The script runs in a copy of its files, with a `python3` in PATH that prints its arguments; only the
last test starts training processes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PRESETS = {"tiny": 4, "v2-lite": 8, "v3": 256}  # and the processes they are laid out for


@dataclass(frozen=True)
class Call:
    """One command of the script: its environment, its words, and the flags of mcore_rl.train."""

    environment: dict[str, str]
    words: list[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Call:
        words = list(words)
        assert words.pop(0) == "env"
        environment = {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        return cls(environment, words)

    @property
    def launcher_flags(self) -> list[str]:
        assert self.words[1:3] == ["-m", "mcore_rl.launch"]
        return self.words[3 : self.words.index("mcore_rl.train") - 1]

    @property
    def flags(self) -> list[str]:
        return self.words[self.words.index("mcore_rl.train") + 1 :]

    def values(self, flag: str) -> list[str]:
        followed_by = zip(self.flags, self.flags[1:], strict=False)
        return [value for name, value in followed_by if name == flag]


class Script:
    """The script in a checkout without .venv, on a machine with `num_gpus` GPUs."""

    def __init__(self, folder: Path, num_gpus: int = 0) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "run_deepseek_moe.sh", folder / "scripts")
        shutil.copytree(ROOT / "scripts" / "presets", folder / "scripts" / "presets")
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        self.environment = {
            "PATH": f"{self.programs}:{os.defpath}",
            "HOME": str(self.home),
            "MCORE_RL_SKIP_SETUP": "1",
        }
        self.program("python3", 'echo env OMP_NUM_THREADS="$OMP_NUM_THREADS" "$0" "$@"')
        if num_gpus:
            gpus = "; ".join(f"echo GPU {index}: NVIDIA" for index in range(num_gpus))
            self.program("nvidia-smi", gpus)
        else:
            self.environment["MCORE_RL_STACK"] = "cpu"

    def program(self, name: str, code: str) -> None:
        file = self.programs / name
        file.write_text(f"#!/bin/sh\n{code}\n")
        file.chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [shutil.which("bash") or "bash", "scripts/run_deepseek_moe.sh", *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ignored where the tests run in the background, and bash cannot undo that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def output(self, *arguments: str, **environment: str) -> str:
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, ""), stderr
        return stdout

    def calls(self, *arguments: str, **environment: str) -> list[Call]:
        """What --dry-run prints, comments left out."""
        lines = self.output("--dry-run", *arguments, **environment).splitlines()
        return [Call.of(shlex.split(line)) for line in lines if line.startswith("env ")]

    def error(self, *arguments: str, **environment: str) -> str:
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 2, stdout + stderr
        assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", stderr), stderr
        return stderr.removeprefix("mcore_rl: error: ").rstrip()


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


@pytest.fixture
def gpu_script(tmp_path: Path) -> Script:
    return Script(tmp_path, num_gpus=8)


TINY = ("tiny", "tiny-model", "tiny-task")


def tiny_presets(script: Script) -> list[str]:
    folder = script.folder / "scripts" / "presets"
    return [str(folder / f"{name}.yaml") for name in TINY]


# ----------------------------------------------------------------------------------- one machine


def test_script_makes_the_tiny_task_by_default(script):
    make, train = script.calls()
    tiny = script.home / ".cache" / "mcore_rl" / "tiny_deepseek_v3"
    assert make.words[1:] == [
        str(script.folder / "scripts" / "make_tiny_deepseek.py"), "--out", str(tiny), "--warm-up"
    ]  # fmt: skip
    assert train.launcher_flags == ["--nproc-per-node", "4"]
    assert train.values("--rl-config") == tiny_presets(script)
    assert train.values("--rl-hf-checkpoint") == [str(tiny)]
    assert train.values("--rl-prompts") == [str(tiny / "prompts" / "train.jsonl")]
    assert train.values("--rl-eval-prompts") == [str(tiny / "prompts" / "heldout.jsonl")]
    (run_dir,) = train.values("--rl-run-dir")
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}\.\d{3}", run_dir)
    assert train.environment == make.environment
    assert train.environment == {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def test_dry_run_starts_and_leaves_nothing(script):
    script.program("python3", "touch started")
    del script.environment["MCORE_RL_SKIP_SETUP"]
    output = script.output("--dry-run")
    assert f" bash {script.folder}/scripts/setup_env.sh " in output
    assert not (script.folder / "started").exists()
    assert not any(script.home.iterdir())
    assert not (script.folder / "runs").exists()


def test_doctor_gets_the_flags_of_the_run(script):
    make, examine = script.output("--doctor", "--rl-run-dir", "here", "--lr", "1e-5").splitlines()
    assert "make_tiny_deepseek.py" in make
    _, _, words = examine.partition(" -m mcore_rl.cli ")
    _, train = script.calls("--rl-run-dir", "here", "--lr", "1e-5")
    ours = "doctor --world-size 4 -- --rl-ranks-per-node 4"
    assert words.split() == [*ours.split(), *train.flags]


def test_script_runs_what_the_dry_run_prints(script):
    # Without --dry-run the commands reach `python3`, which prints them.
    arguments = ("--rl-run-dir", "here", "--rl-run-name", "a b")
    lines = script.output(*arguments).splitlines()
    assert lines.pop(-2).startswith("# starting 4 processes")
    printed = [call.words for call in script.calls(*arguments)]
    called = [" ".join(Call.of(line.split(" ")).words) for line in lines]
    assert called == [" ".join(words) for words in printed]
    assert all(line.startswith("env OMP_NUM_THREADS=1 ") for line in lines)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ('case "$2" in mcore_rl.launch) exit 7 ;; esac', 7),
        ('case "$2" in mcore_rl.launch) touch started ;; *) exit 5 ;; esac', 5),
    ],
    ids=["launcher", "preparation"],
)
def test_script_ends_with_the_exit_code_of_a_failed_command(script, code, exit_code):
    script.program("python3", code)
    assert script.start().wait(timeout=60) == exit_code
    assert not (script.folder / "started").exists()


def test_own_arguments_follow_those_of_the_script(script):
    flags = ["--rl-config", "mine.yaml", "--lr", "1e-4", "--rl-num-steps=3"]
    (script.folder / "mine.yaml").write_text("lr: 1.0\n")
    train = script.calls(*flags)[-1]
    assert train.flags[-len(flags) :] == flags
    assert train.values("--rl-config") == [*tiny_presets(script), "mine.yaml"]


@pytest.mark.parametrize("flags", [["--rl-hf-checkpoint", "own"], ["--rl-hf-checkpoint=own"]])
def test_own_checkpoint_replaces_the_tiny_task(script, flags):
    (train,) = script.calls(*flags)
    assert train.flags.count("--rl-hf-checkpoint") == flags.count("--rl-hf-checkpoint")
    assert not train.values("--rl-prompts") and not train.values("--rl-eval-prompts")
    assert "HF_HUB_OFFLINE" not in train.environment
    (script.folder / "own").mkdir()
    (train,) = script.calls(*flags)
    assert train.environment["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    "flags",
    [
        ["--rl-hf-checkpoint", "own"],
        ["--rl-prompts", "own.jsonl"],
        ["--rl-config", "own.yaml"],
        ["--rl-hf-checkpoint", "own", "--rl-prompts=own.jsonl"],
    ],
)
def test_settings_of_the_tiny_task_are_not_used_for_others(script, flags):
    (script.folder / "own.yaml").write_text("rl-prompts: own.jsonl\n")
    output = script.output("--dry-run", *flags)
    assert "\n# own checkpoint or prompts: reward, lengths" in f"\n{output}"
    train = script.calls(*flags)[-1]
    presets = [name for name in train.values("--rl-config") if name != "own.yaml"]
    with_layout = "--rl-hf-checkpoint" not in flags
    assert presets == tiny_presets(script)[: 1 + with_layout]
    assert train.values("--rl-layout") == ([] if with_layout else ["auto"])
    of_task = yaml.safe_load(preset_file("tiny-task").read_text())
    for preset in presets:
        assert not of_task.keys() & yaml.safe_load(Path(preset).read_text()).keys()
    assert of_task.keys() >= {"rl-max-prompt-tokens", "rl-max-response-tokens", "rl-reward", "lr"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-model-parallel-size", "2"],
        ["--expert-model-parallel-size=2"],
        ["--rl-layout", "given"],
        ["--rl-rollout-ranks", "2-3"],
        ["--rl-config", "own.yaml"],
    ],
)
def test_a_layout_is_chosen_for_an_own_checkpoint_unless_a_part_is_given(script, flags):
    (script.folder / "own.yaml").write_text("pipeline_model_parallel_size: 2\n")
    train = script.calls("--rl-hf-checkpoint", "own", *flags)[-1]
    assert "auto" not in train.values("--rl-layout")


def test_own_prompts_are_not_evaluated_on_the_tiny_task(script):
    _, train = script.calls("--rl-prompts", "mine.jsonl")
    assert train.values("--rl-prompts") == ["mine.jsonl"]
    assert not train.values("--rl-eval-prompts")


@pytest.mark.parametrize("key", ["rl-hf-checkpoint", "rl_hf_checkpoint", '"--rl-hf-checkpoint"'])
def test_flags_of_an_own_config_count_as_given(script, key):
    (script.folder / "mine.yaml").write_text(f"# mine\n{key}: own\n")
    assert len(script.calls("--rl-config", "mine.yaml")) == 1
    (script.folder / "mine.yaml").write_text(f"# {key}: own\n")
    assert len(script.calls("--rl-config=mine.yaml")) == 2


@pytest.mark.parametrize("flag", ["--rl-run-dir", "--rl-run-name"])
def test_run_directory_and_name_are_the_users(script, flag):
    train = script.calls(flag, "mine")[-1]
    assert train.values("--rl-run-dir") == (["mine"] if flag == "--rl-run-dir" else [])


def test_environment_of_the_caller_is_kept(script):
    make, train = script.calls(OMP_NUM_THREADS="3", MCORE_RL_CACHE="/elsewhere")
    assert "OMP_NUM_THREADS" not in train.environment
    assert make.words[2:4] == ["--out", "/elsewhere/tiny_deepseek_v3"]


def test_number_of_processes_follows_the_gpus(gpu_script):
    assert gpu_script.calls()[-1].launcher_flags == ["--nproc-per-node", "8"]
    assert "OMP_NUM_THREADS" not in gpu_script.calls()[-1].environment
    for arguments, environment, number in (
        ([], {"CUDA_VISIBLE_DEVICES": "3,5"}, "2"),
        (["--nproc=1"], {}, "1"),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, "4"),
    ):
        call = gpu_script.calls(*arguments, **environment)[-1]
        assert call.launcher_flags == ["--nproc-per-node", number]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_during_preparation_ends_it(script, number, code):
    script.program("python3", "echo $$ >pid.new && mv pid.new pid && exec sleep 60")
    process = script.start()
    pid = script.folder / "pid"
    deadline = time.monotonic() + 60
    while not pid.exists():
        assert time.monotonic() < deadline, "waited for 60 s"
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


# ------------------------------------------------------------------------------ several machines


def test_dry_run_prints_a_command_for_every_node(script):
    script.program("python3", ":")  # in place of the planner
    calls = script.calls("--preset=v3", "--rl-hf-checkpoint", "v3", "--rl-prompts", "p.jsonl")
    assert len(calls) == 32
    for rank, call in enumerate(calls):
        assert " ".join(call.launcher_flags) == (
            f"--nproc-per-node 8 --nnodes 32 --node-rank {rank} "
            "--master-addr MASTER_ADDR --master-port 29500"
        )
        assert "OMP_NUM_THREADS" not in call.environment


def test_nodes_come_from_the_environment(script):
    output = script.output(NNODES="2", NODE_RANK="1", MASTER_ADDR="head", MASTER_PORT="1234")
    nodes = "--nnodes 2 --node-rank 1 --master-addr head --master-port 1234"
    assert f"-m mcore_rl.launch --nproc-per-node 4 {nodes} -m mcore_rl.train" in output


@pytest.mark.parametrize(("preset", "world"), [("v2-lite", 8), ("v3", 256)])
def test_dry_run_of_a_large_preset_makes_the_plan(script, preset, world):
    """With the flags of the run, and without a checkpoint, prompts or GPUs."""
    script.program("python3", 'printf "planned:"; printf " %s" "$@"; echo')
    lines = script.output("--dry-run", "--preset", preset, "--lr", "1e-5").splitlines()
    (planned,) = [line for line in lines if line.startswith("planned:")]
    presets = script.folder / "scripts" / "presets"
    assert planned.split()[1:] == [
        *("-m", "mcore_rl.cli", "plan", "--hf-config", str(presets / f"{preset}.json")),
        *("--world-size", str(world), "--rl-ranks-per-node", "8"),
        *("--rl-config", str(presets / f"{preset}.yaml"), "--lr", "1e-5"),
    ]
    command = planned.removeprefix("planned: ")
    assert f"{script.programs}/python3 {command}" in lines, "the command stands above its output"
    commands = [Call.of(shlex.split(line)) for line in lines if line.startswith("env ")]
    assert len(commands) == world // 8
    assert commands[0].values("--rl-hf-checkpoint") == ["CHECKPOINT"]
    assert commands[0].values("--rl-prompts") == ["PROMPTS"]


def test_plan_uses_the_config_of_a_local_checkpoint(script):
    script.program("python3", 'echo planned "$@"')
    (script.folder / "own").mkdir()
    (script.folder / "own" / "config.json").touch()
    output = script.output(
        "--dry-run", "--preset", "v3", "--rl-hf-checkpoint", "own", NNODES="64", NODE_RANK="0"
    )
    assert "planned -m mcore_rl.cli plan --hf-config own/config.json --world-size 512" in output


def test_failing_plan_ends_the_dry_run(script):
    script.program("python3", "echo 'mcore_rl: error: no.' >&2; exit 2")
    assert script.error("--dry-run", "--preset", "v3") == "no."


SLURM = {"SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "n[1-3]"}


def test_nodes_come_from_slurm(script):
    script.program("scontrol", '[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"')
    own = {"MASTER_ADDR": "n9", "MASTER_PORT": "7"}
    for given, address, port in (({}, "n1", 23456), (own, "n9", 7)):
        output = script.output(**SLURM, SLURM_JOB_ID="123456", **given)
        expected = f"--nnodes 3 --node-rank 2 --master-addr {address} --master-port {port} -m"
        assert expected in output


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ("--preset v4", {}, "--preset v4 is unknown; choose tiny, v2-lite or v3"),
        ("--preset", {}, "--preset is the last argument and needs a value"),
        ("--nproc 0", {}, "--nproc 0 must be a number above 0"),
        ("--nproc=four", {}, "--nproc four must be a number above 0"),
        ("--rl-config nowhere.yaml", {}, "--rl-config nowhere.yaml cannot be read"),
        ("--rl-config", {}, "--rl-config  cannot be read"),
        ("--preset v2-lite --rl-hf-checkpoint x --rl-prompts y", {}, "needs GPUs and this machine"),
        ("", {"NNODES": "two"}, "NNODES=two must be a number above 0"),
        ("", {"NNODES": "2"}, "NODE_RANK= must be this machine's number, 0 to 1"),
        ("", {"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 must be this machine's number"),
        ("", {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ("", SLURM, "MASTER_ADDR is not set; with NNODES=3 it must be the address of node 0"),
        ("", SLURM | {"SLURM_LOCALID": "1"}, "srun --ntasks-per-node=1"),
    ],
)
def test_mistake_is_one_sentence(script, arguments, environment, sentence):
    script.program("python3", "touch started")
    assert sentence in script.error(*arguments.split(), **environment)
    assert not (script.folder / "started").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--preset v2-lite", "--preset v2-lite needs --rl-hf-checkpoint"),
        ("--preset v2-lite --rl-hf-checkpoint x", "--preset v2-lite needs --rl-prompts"),
        ("--preset v3 --rl-hf-checkpoint x --rl-prompts y", "laid out for 32 machines of 8 GPUs"),
    ],
)
def test_large_preset_names_what_it_needs(gpu_script, arguments, sentence):
    assert sentence in gpu_script.error(*arguments.split())


def test_help_names_every_option_and_preset(script):
    output = script.output("--help")
    for name in ("--preset", "--nproc", "--dry-run", *PRESETS):
        assert name in output


# ----------------------------------------------------------------------------------------- presets


@pytest.fixture(scope="module")
def parser() -> Any:
    from mcore_rl.job.reading import make_parser

    return make_parser()


def preset_file(name: str) -> Path:
    return ROOT / "scripts" / "presets" / f"{name}.yaml"


def test_all_presets_are_tested_and_large_ones_marked_as_not_run():
    found = {path.stem for path in preset_file("x").parent.iterdir()}
    assert found == {*PRESETS, *TINY}
    for name in ("v2-lite", "v3"):
        assert preset_file(name).read_text().startswith("# PLANNED, NOT RUN. ")


def test_options_of_the_script_are_not_flags_of_megatron(parser):
    from mcore_rl.flags.parsed_flags import options_of

    assert not {"--preset", "--nproc", "--dry-run"} & options_of(parser).keys()


@pytest.mark.parametrize(
    ("name", "published"), [("v2-lite", "deepseek-v2-lite"), ("v3", "deepseek-v3")]
)
def test_large_preset_has_the_published_config(name, published):
    file = ROOT / "tests" / "data" / "configs" / f"{published}.json"
    assert json.loads(file.read_text()) == published_config(name)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fits_its_model_and_machines(name, tmp_path):
    """Every check of a start that needs no weights, on the preset's model."""
    from mcore_rl.common.platform import WITHOUT_CUDA, Platform
    from mcore_rl.job.facts import Refusals, Source
    from mcore_rl.job.resolver import examine
    from mcore_rl.model.config_json import read_model_shape

    has_cuda = name != "tiny"
    platform = Platform(cuda=True, transformer_engine=(2, 20)) if has_cuda else WITHOUT_CUDA
    (tmp_path / "config.json").write_text(json.dumps(published_config(name)))
    shape = read_model_shape(tmp_path, for_planning=has_cuda)  # V3 is published in FP8

    files = TINY if name == "tiny" else (name,)
    configs = [token for file in files for token in ("--rl-config", str(preset_file(file)))]
    source = Source(
        tokens=configs,
        platform=platform,
        world_size=PRESETS[name],
        read_shape=lambda folder, flag: shape,
        has_files=False,
    )
    facts = examine(source, Refusals())
    assert facts.is_accepted, "Megatron's own validation has run, too"
    assert facts.actor is not None and facts.rollout is not None
    values, layout, rollout = facts.actor.values, facts.actor.layout, facts.rollout

    last = values.get("decoder_last_pipeline_num_layers")
    if last is not None:  # the other stages share the rest evenly
        assert (shape.num_layers - last) % (layout.pp_size - 1) == 0
    # Rollout relies on each expert staying on its rank.
    assert rollout.ep_size == layout.ep_size > 1
    assert layout.etp_size == layout.edp_size == 1


def test_own_data_command_of_the_readme_keeps_its_prompts(script, parser, checkpoint_factory):
    """GSM8K's questions are longer than the limits of the tiny task."""
    from mcore_rl.config import config_from
    from mcore_rl.data.prompts import load_prompt_files
    from mcore_rl.flags.parsed_flags import expand_config, given_values
    from mcore_rl.job.batches import check_lengths
    from mcore_rl.model.config_json import read_model_shape

    _, _, section = (ROOT / "README.md").read_text().partition("## Your own checkpoint")
    pattern = r"run_deepseek_moe\.sh (--rl-hf-checkpoint DIR(?:.*\\\n)*.*)"
    command = re.findall(pattern, section)[0]
    question = "Natalia sold clips to 48 of her friends in April, and then half as many in May. "
    rows = [
        {"question": question * count, "answer": f"48 + 24 = 72\n#### {72 * count}"}
        for count in (1, 2, 4)
    ]
    file = script.folder / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint = checkpoint_factory("deepseek_v3")
    words = command.replace("\\\n", " ").replace("DIR", str(checkpoint))
    (train,) = script.calls(*words.replace("FILE", str(file)).split())
    tokens = [*train.flags, "--rl-cache-dir", str(script.folder / "cache")]
    config = config_from(given_values(expand_config(tokens, parser), parser))
    check_lengths(config, read_model_shape(checkpoint))
    prompts, _ = load_prompt_files(config.data, checkpoint)
    assert (len(prompts), prompts.parts[0].num_too_long) == (3, 0)
    assert config.reward == "gsm8k"


def published_config(name: str) -> dict[str, Any]:
    if name != "tiny":
        return json.loads(preset_file(name).with_suffix(".json").read_text())
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from make_tiny_deepseek import hf_config
    finally:
        sys.path.pop(0)
    return hf_config("deepseek_v3", "tiny")


# ------------------------------------------------------------------------------------- for real


@pytest.mark.slow
def test_missing_checkpoint_ends_four_ranks_with_one_sentence(tmp_path):
    process = subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_deepseek_moe.sh"), "--nproc", "4"]
        + ["--rl-hf-checkpoint", "/nonexistent", "--rl-prompts", "/nonexistent.jsonl"],
        cwd=tmp_path,
        env=os.environ | {"MCORE_RL_SKIP_SETUP": "1", "MCORE_RL_STACK": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 2, process.stderr
    (sentence,) = process.stderr.splitlines()
    assert sentence.startswith(
        "mcore_rl: error: --rl-hf-checkpoint /nonexistent is not a directory"
    )
    assert not (tmp_path / "runs").exists()
