"""`--rl-config`: flags from YAML files, put before the command line's."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import pytest
import yaml

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.flags.parsed_flags import as_config, expand_config, given_values, without_flags
from mcore_rl.flags.parser import add_rl_args, with_rl_args


def make_parser() -> argparse.ArgumentParser:
    """A few flags of the kinds that Megatron has, and ours."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--micro-batch-size", "--mbs", type=int)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--no-fusion", action="store_false", dest="fusion")
    parser.add_argument("--fusion", action="store_true", dest="fusion")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--betas", type=float, nargs="+")
    parser.add_argument("--override-opt_param-scheduler", action="store_true")
    return add_rl_args(parser)


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def configs(folder: Path, texts: list[str]) -> list[str]:
    """`--rl-config` for each of these texts."""
    files = [write(folder, f"{number}.yaml", text) for number, text in enumerate(texts)]
    return [token for file in files for token in ("--rl-config", file)]


def values(*tokens: str) -> dict[str, object]:
    return given_values(expand_config(tokens, make_parser()), make_parser())


def test_config_is_left_out_when_not_given() -> None:
    tokens = ["--lr", "1e-4", "--rl-num-steps", "3"]
    assert expand_config(tokens, make_parser()) == tokens


def test_config_sets_flags_of_every_kind(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.yaml",
        """
        lr: 5.0e-4
        --micro_batch-size: 4
        sequence_parallel: true
        no-fusion: true
        profile: false
        betas: [0.9, 0.95]
        override-opt_param-scheduler: true
        rl-num-steps: 7
        rl-prompts:
        """,
    )
    assert values("--rl-config", file) == {
        "lr": 5e-4,
        "micro_batch_size": 4,
        "sequence_parallel": True,
        "fusion": False,
        "profile": False,
        "betas": [0.9, 0.95],
        "override_opt_param_scheduler": True,
        "rl_num_steps": 7,
    }


def test_command_line_wins_over_config_wherever_it_stands(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "lr: 1.0\nrl-num-steps: 7\n")
    assert values("--lr", "2", f"--rl-config={file}") == {"lr": 2.0, "rl_num_steps": 7}


def test_rl_import_accumulates_over_file_and_command_line(tmp_path: Path) -> None:
    """Other flags take their last value; each of these files registers something of its own."""
    several = write(tmp_path, "a.yaml", "rl-import: [a.py, b.py]\n")
    one = write(tmp_path, "b.yaml", "rl-import: c.py\n")
    none = write(tmp_path, "c.yaml", "rl-import: []\n")
    twice = ("--rl-import", "d.py", "--rl-import", "e.py")
    files = ["a.py", "b.py", "d.py", "e.py"]
    assert values("--rl-config", several, *twice) == {"rl_import_": files}
    assert values("--rl-import", "d.py", "e.py", "--rl-num-steps", "3") == {
        "rl_import_": ["d.py", "e.py"],
        "rl_num_steps": 3,
    }
    assert values("--rl-config", several, "--rl-config", one) == {"rl_import_": ["c.py"]}
    assert values("--rl-config", several, "--rl-config", none) == {}
    # As a fork has it, which parses by itself.
    parser = make_parser()
    assert RLConfig.from_args(parser.parse_args([])).trainer.import_ == ()
    assert RLConfig.from_args(parser.parse_args(list(twice))).trainer.import_ == ("d.py", "e.py")
    assert RLConfig.from_args(parser.parse_args([])).trainer.import_ == (), "of the parse before"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            ["lr: 1.0\nmicro-batch-size: 4\nrl-num-steps: 7", "mbs: 2\nrl_num_steps: 9"],
            {"lr": 1.0, "micro_batch_size": 2, "rl_num_steps": 9},
        ),
        (
            ["mbs: 2\nrl_num_steps: 9", "lr: 1.0\nmicro-batch-size: 4\nrl-num-steps: 7"],
            {"lr": 1.0, "micro_batch_size": 4, "rl_num_steps": 7},
        ),
        (
            [
                "sequence-parallel: true\nrl-num-steps: 7\nlr: 1.0",
                "sequence-parallel: false\nrl-num-steps:",
            ],
            {"lr": 1.0},
        ),
        (["fusion: true\nno-fusion: true"], {"fusion": False}),
        (["fusion: true\nno-fusion: true", "fusion: true"], {"fusion": True}),
    ],
)
def test_later_config_wins_key_by_key(
    tmp_path: Path, files: list[str], expected: dict[str, object]
) -> None:
    assert values(*configs(tmp_path, files)) == expected


@pytest.mark.parametrize(
    "text", ["20251125_1200", "1.10", "0123", "12:30", "2026-01-01T10:00:00Z", "1_0", "0x1f", "+3"]
)
def test_text_that_looks_like_a_number_keeps_its_spelling(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, "a.yaml", f"rl-run-name: {text}\nrl-stop: [{text}, 0.50]\n")
    expected = {"rl_run_name": text, "rl_stop": [text, "0.50"]}
    assert values("--rl-config", file) == expected


def test_yaml_numbers_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", "mbs: 010\nrl-num-steps: 1_000\nlr: -.INF\nbetas: [.nan, 1]\n")
    found = values("--rl-config", file)
    assert (found["micro_batch_size"], found["rl_num_steps"]) == (10, 1000)
    assert found["lr"] == -math.inf and math.isnan(found["betas"][0])


@pytest.mark.parametrize(
    "text", ["lr: 1.0\nlr: 2.0", "lr: 1.0\n--lr: 2.0", "mbs: 2\nmicro_batch_size: 4"]
)
def test_a_flag_that_a_file_sets_twice_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="twice|another key"):
        values("--rl-config", write(tmp_path, "a.yaml", text))


@pytest.mark.parametrize(
    ("files", "tokens", "expected"),
    [
        (["sequence-parallel: false"], "", {"sequence_parallel": False}),
        (["sequence-parallel: true", "sequence_parallel: false"], "", {"sequence_parallel": False}),
        (["sequence-parallel: false", "sequence-parallel: true"], "", {"sequence_parallel": True}),
        (["sequence-parallel: false", "sequence-parallel:"], "", {}),
        (["sequence-parallel: false", "sequence-parallel: null"], "", {}),
        (["sequence-parallel: false"], "--sequence-parallel", {"sequence_parallel": True}),
        (["sequence-parallel: true"], "--no-sequence-parallel", {"sequence_parallel": False}),
        (["no-sequence-parallel: true"], "", {"sequence_parallel": False}),
        (["no-sequence-parallel: false"], "", {"sequence_parallel": True}),
        (["no-fusion: false"], "", {"fusion": True}),
        (["fusion: false"], "", {"fusion": False}),
        (["no-fusion: true", "fusion: true"], "", {"fusion": True}),
        (["profile: false"], "--profile", {"profile": True}),
        (["no-profile: false"], "", {"profile": True}),
        (["rl-reshard-delta: true"], "--no-rl-reshard-delta", {"rl_reshard_delta": False}),
        # YAML reads these words as bools.
        (["rl-attest: off"], "", {"rl_attest": "off"}),
        (["rl-share-prompts: on"], "", {"rl_share_prompts": "on"}),
        (["rl-speculate: no"], "", {"rl_speculate": "off"}),
        (["rl-run-dir: 'off'"], "", {"rl_run_dir": "off"}),
    ],
)
def test_switch_set_in_files_is_read_and_recorded(
    tmp_path: Path, files: list[str], tokens: str, expected: dict[str, object]
) -> None:
    parser = with_rl_args(lambda parser: None)(make_parser())  # with the forms that undo switches
    expanded = expand_config([*configs(tmp_path, files), *tokens.split()], parser)
    assert given_values(expanded, parser) == expected
    # What is recorded of it is read as the same.
    recorded = write(tmp_path, "recorded.yaml", yaml.safe_dump(as_config(expanded, parser)))
    assert given_values(expand_config(["--rl-config", recorded], parser), parser) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rl-num-step: 3", "unknown key 'rl-num-step'; did you mean '--rl-num-steps'?"),
        ("sequence-parallel: 1", "'sequence-parallel' is a switch; its value is true or false"),
        ("- lr", "must hold 'flag: value' lines, not a list or a text"),
        ("a: [", "is not valid YAML: "),
        ("[" * 20_000, "is not valid YAML: is nested deeper than "),
        ("a: &a [*a]", "is not valid YAML: "),
        ("lr: !!python/name:os.system", "is not valid YAML: "),
        ("rl-prompts: {a: 1}", "'rl-prompts' has a dict in place of a string or a number"),
        ("betas: [0.9, [0.95]]", "'betas' has a list in place of a string or a number"),
        ("betas: [0.9, null]", "'betas' has nothing in place of a string or a number"),
        ("rl-export-hf: false", "'rl-export-hf' is not a switch and cannot be false: leave"),
        ("rl-run-dir: no", "'rl-run-dir' is not a switch and cannot be false: leave"),
        ("lr: true", "'lr' is not a switch and cannot be true: leave"),
        ("rl-share-prompts: [off]", "'rl-share-prompts' has a bool in place of a string"),
        ("rl-import: [a.py, off]", "'rl-import' has a bool in place of a string or a number"),
        ("help: true", "unknown key 'help'"),
        ("betas: ['-a', 1]", "'betas' has '-a' among its values, which is read as a flag; correct"),
        ("betas: [1, '--lr', 5]", "'betas' has '--lr' among its values"),
        (r'rl-prompts: "a\0b"', "'rl-prompts' has a text or a number that no command line can"),
        (r'rl-prompts: "\ud800"', "that no command line can hold"),
        ("rl-config: other.yaml", "cannot name another file; give the flag twice"),
        (b"\xff\xfe\x00", "cannot be read: it is not UTF-8 text; save it as UTF-8"),
    ],
)
def test_config_is_refused_in_one_sentence(
    tmp_path: Path, text: str | bytes, sentence: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as refusal:
        values("--rl-config", str(file))
    assert sentence in str(refusal.value)
    assert str(refusal.value).startswith(f"--rl-config {file}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("number", ["0x" + "f" * 9000, "9" * 9000, "1:30"])
def test_malformed_number_is_refused_in_a_short_sentence(tmp_path: Path, number: str) -> None:
    with pytest.raises(UsageError, match="--rl-num-steps: invalid int value") as refusal:
        values("--rl-config", write(tmp_path, "a.yaml", f"rl-num-steps: {number}"))
    assert len(str(refusal.value)) < 200


def test_config_from_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    with pytest.raises(UsageError, match="a.yaml is not a regular file.*; write"):
        values("--rl-config", str(tmp_path / "a.yaml"))


def test_config_is_refused_when_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere.yaml cannot be read: No such file"):
        values("--rl-config", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(UsageError, match="--rl-config: expected one argument"):
        values("--rl-config")


@pytest.mark.parametrize(
    "tokens",
    [
        "--lr 5e-4 --mbs 4 --sequence-parallel --no-fusion --no-profile --betas 0.9 .95",
        "--lr=-1e-3 --lr 1e-5 --no-fusion --fusion --profile --override-opt_param-scheduler",
        "--rl-import a.py b.py --rl-import c.py --rl-reward-weights=-1,1 --rl-num-steps 007",
        "--rl-stop=--- --rl-stop a b --rl-stop=-c --rl-stop=--rl-stop --betas -0.9 0.95",
        "--rl-reward null --rl-run-name 1_0 --rl-prompts true --rl-reward-env 12:30:00",
    ],
)
def test_given_flags_round_trip_through_a_config(tokens: str, tmp_path: Path) -> None:
    found = as_config(tokens.split(), make_parser())
    file = write(tmp_path, "given.yaml", yaml.safe_dump(found, sort_keys=False))
    assert values("--rl-config", file) == values(*tokens.split())
    assert values(*without_flags(tokens.split(), make_parser(), ())) == values(*tokens.split())


@pytest.mark.parametrize("flag", ["--rl-stop", "--rl-prompts", "--betas", "--rl-config"])
def test_value_that_argparse_drops_is_refused(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} is --, which argparse drops; give another"):
        values(f"{flag}=--")


def test_as_config_writes_plain_yaml_values() -> None:
    tokens = "--mbs 4 --lr 1e-5 --betas 0.9 .95 --no-profile --no-fusion --rl-reward gsm8k".split()
    assert as_config(tokens, make_parser()) == {
        **{"mbs": 4, "lr": "1e-5", "betas": [0.9, ".95"], "profile": False, "no-fusion": True},
        "rl-reward": "gsm8k",
    }
