"""Which slow files a run of `--tier touched` has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import ROOT, TURNS, select, touched

SLOW = sorted(
    str(path.relative_to(ROOT))
    for folder in ("dist", "e2e", "cuda", "versions")
    for path in (ROOT / "tests" / folder).glob("test_*.py")
)
SECONDS = dict.fromkeys(SLOW, 10.0)
LORA = "mcore_rl/megatron/lora.py"


def test_every_file_runs_within_three_landings_of_any_change():
    ran = [set(select(SLOW, set(), landings, SECONDS).chosen) for landings in range(TURNS)]
    assert set.union(*ran) == set(SLOW)
    assert set.intersection(*ran) == set(tiers.ALWAYS)


def test_a_module_touches_the_files_whose_helpers_import_it():
    concerned = touched(SLOW, {LORA})
    assert concerned["tests/dist/test_lora.py"] == LORA
    assert len(concerned) < len(SLOW) / 3
    for landings in range(TURNS):
        assert concerned.keys() <= select(SLOW, {LORA}, landings, SECONDS).chosen.keys()


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("tests/dist/lora_jobs.py", "tests/dist/test_lora.py"),  # "tests.dist.lora_jobs:..."
        ("tests/e2e/test_fork.py", "tests/e2e/test_fork.py"),
        ("patches/vllm/__init__.py", "tests/versions/test_vllm_versions.py"),
        ("examples/fork/train.py", "tests/e2e/test_fork.py"),
    ],
)
def test_helpers_and_files_that_are_not_imported_touch_as_well(path, file):
    assert touched(SLOW, {path})[file] == path


def test_the_pool_of_ranks_touches_its_users_but_not_through_what_it_imports():
    assert len(touched(SLOW, {"tests/rank_pool.py"})) > len(SLOW) / 2
    assert "tests/dist/test_parity.py" not in touched(SLOW, {"tests/e2e/jobs.py"})


def test_specific_changes_come_first_where_time_is_short(monkeypatch):
    changed, seconds = {LORA, "pyproject.toml", "tests/file_seconds.py"}, SECONDS
    in_any_case = select(SLOW, set(), 0, seconds).chosen.keys()
    every = select(SLOW, changed, 0, seconds)
    specific = touched(SLOW, {LORA}).keys() - in_any_case
    assert specific and not every.left_out
    monkeypatch.setattr(tiers, "MAX_CPU_SECONDS", 10.0 * len(in_any_case | specific))
    some = select(SLOW, changed, 0, seconds)
    assert some.chosen.keys() == in_any_case | specific
    assert some.left_out.keys() == every.chosen.keys() - some.chosen.keys() != set()


def test_all_files_run_where_the_change_is_not_known():
    assert select(SLOW, None, 0, {}).chosen.keys() == set(SLOW)
    assert tiers.changed_since("0" * 40) is None


def test_the_record_names_a_commit_that_has_landed():
    landed = json.loads((ROOT / "tests" / "landed.json").read_text())
    assert landed.keys() == {"commit", "landings"} and len(landed["commit"]) == 40


@pytest.mark.parametrize("path", [*tiers.ALWAYS, *tiers.NOT_FOLLOWED])
def test_named_files_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    "begins", [*tiers.ALSO, *(p for rest in tiers.ALSO.values() for p in rest)]
)
def test_named_beginnings_of_paths_exist(begins):
    assert list(ROOT.glob(f"{begins}*"))


def test_a_landing_is_noted_once(tmp_path: Path, monkeypatch):
    record = tmp_path / "landed.json"
    record.write_text(json.dumps({"commit": "0" * 40, "landings": 4}))
    monkeypatch.setattr(tiers, "LANDED", record)
    monkeypatch.setattr(tiers, "_git", lambda *_: "1" * 40 + "\n")
    for _ in range(2):
        tiers.note_landing()
        assert json.loads(record.read_text()) == {"commit": "1" * 40, "landings": 5}
