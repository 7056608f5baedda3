"""The documentation: the site builds strictly, and names in pages exist."""

from __future__ import annotations

import argparse
import html
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl import api
from mcore_rl.algorithms.recipes import RECIPES
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.flags.parsed_flags import options_of
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.megatron import adapter as megatron_adapter

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a missing page, link, anchor, snippet or name of the code ends the build."""
    folder = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site_without_broken_markup(site):
    for page in DOCS.glob("**/*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        built = site / ("index.html" if name.name == "index" else name / "index.html")
        text = built.read_text(encoding="utf-8")
        assert "--8&lt;--" not in text and "--8<--" not in text
        # A list or a table that follows a line without a blank one between stays text.
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"\n\s*(-|\d+\.|\|) ", paragraph), f"{page.name}: {paragraph}"


@pytest.mark.slow
def test_reference_has_the_public_names(site):
    text = (site / "using" / "api" / "index.html").read_text(encoding="utf-8")
    names = ["prepare", "add_rl_args", "train.run", *(f"api.{name}" for name in api.__all__)]
    assert [name for name in names if f'id="mcore_rl.{name}"' not in text] == []
    visible = html.unescape(re.sub(r"<[^>]+>", "", text))
    assert "before any of its modules is imported" in visible  # a docstring


@pytest.mark.slow
def test_page_loads_only_files_of_the_site(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"', text)
    loaded += re.findall(r'<link[^>]* rel="(?:stylesheet|icon|preload)"[^>]* href="([^"]+)"', text)
    loaded += re.findall(r'<link[^>]* href="([^"]+)"[^>]* rel="(?:stylesheet|icon|preload)"', text)
    assert loaded and not [name for name in loaded if "//" in name]
    assert "assets/report.png" in loaded


# --------------------------------------------------------------------------------- around the site


def test_links_of_root_files_exist():
    for file in (ROOT / "README.md", ROOT / "examples" / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text(encoding="utf-8")):
            assert "//" in target or (file.parent / target).exists(), f"{file.name}: {target}"


def test_files_named_in_pages_exist():
    """By the path from the root, with or without .py."""
    folders = "benchmarks|docs|examples|mcore_rl|patches|scripts|tests"
    path = re.compile(rf"(?<![\w/.<-])((?:{folders})/[\w/.-]*\w)")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")):
        for name in path.findall(page.read_text(encoding="utf-8")):
            exists = (ROOT / name).exists() or (ROOT / f"{name}.py").exists()
            assert exists, f"{page.name}: {name}"


def test_readme_is_short_and_links_every_page():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 125
    linked = {(ROOT / name).resolve() for name in re.findall(r"\((docs/[^)#]+)", text)}
    # Pages that include CONTRIBUTING.md, CHANGELOG.md and examples/, and the reference.
    left_out = {"contributing.md", "changelog.md", "examples.md", "api.md", "what_was_run.md"}
    pages = {page for page in DOCS.glob("**/*.md") if page.name not in left_out}
    assert pages - linked == set()
    assert (DOCS / "assets" / "report.png").stat().st_size < 300_000


def test_documents_named_anywhere_exist():
    """Also in code, messages and presets."""
    files = [ROOT / "README.md", *DOCS.glob("**/*.md"), *ROOT.glob("examples/**/*")]
    for folder in ("mcore_rl", "patches", "scripts", "tests"):
        files += (ROOT / folder).glob("**/*")
    for file in files:
        if file.suffix not in {".md", ".py", ".sh", ".yaml", ".sbatch"}:
            continue
        for name in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)}: {name}"


# ------------------------------------------------------------------- coming from verl, TRL or slime


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_adapter.make_parser(add_rl_args)


def rows_of_other_projects() -> list[list[str]]:
    """The cells of the three tables."""
    _, _, text = (DOCS / "using" / "coming_from.md").read_text().partition("## verl")
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if not row[0].startswith(" ---")]


def test_flags_in_tables_of_other_projects_exist(parser):
    rows = rows_of_other_projects()
    assert len(rows) > 100 and all(len(row) == 3 for row in rows)
    known = options_of(parser)
    for theirs, ours, remark in rows:
        if ours in ("mcore_rl", "none"):
            continue
        commands = [shlex.split(text) for text in re.findall(r"`(--[^`]+)`", f"{ours} {remark}")]
        assert commands, f"{theirs}: {ours}"
        for flag, *values in commands:
            if flag in ("--nnodes", "--nproc-per-node"):
                continue
            assert flag in known, f"{theirs}: {flag}"
            # Values are valid, where there are some.
            if choices := known[flag].choices:
                assert set(values) <= set(choices), f"{theirs}: {flag} {values}"
            elif flag == "--rl-algorithm":
                assert set(values) <= RECIPES.keys(), f"{theirs}: {flag} {values}"
            elif flag == "--rl-advantage":
                assert all(find_advantage_estimator(value) for value in values)


def test_flags_named_in_pages_exist(parser):
    """Except prefixes of several flags (`--rl-critic-...`)."""
    ours = {name for name in options_of(parser) if name.startswith("--rl-")}
    ours |= {"--rl-spo-width"}  # of the example's loss
    for page in (ROOT / "README.md", *DOCS.glob("**/*.md")):
        named = re.findall(r"(?<![\w-])--rl-[a-z0-9]+(?:-[a-z0-9]+)*(?![\w*-])", page.read_text())
        assert set(named) <= ours, f"{page.name}: {sorted(set(named) - ours)}"
