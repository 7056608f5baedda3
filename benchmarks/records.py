"""Raw records of measurements, in benchmarks/records, from which pages and figures are drawn.

A record is a JSON object: `facts` (command, commit, date, machine, versions) and what was measured,
run by run. Commands write one with --record. `tests/unit/test_records.py` draws all pages again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import write_section

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "records"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"

Record = dict[str, Any]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add --record, whose value is None, the folder of benchmarks, or another one."""
    text = "write FOLDER/records (default: benchmarks), and draw the command's section of its page"
    parser.add_argument(
        "--record", type=Path, nargs="?", const=FOLDER.parent, metavar="FOLDER", help=text
    )


def file_of(name: str) -> Path:
    """Return the file of a record."""
    return FOLDER / f"{name}.json"


def read(name: str) -> Record:
    """Return the record of this name."""
    record: Record = json.loads(file_of(name).read_text())
    return record


def write(name: str, facts: Mapping[str, str], **measured: Any) -> None:
    """Write a record; it replaces an older one."""
    _write(file_of(name), {"facts": facts, **measured})


def _write(file: Path, record: Record) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1, default=dataclasses.asdict) + "\n")


def report(
    name: str,
    part_of: Callable[[Record], str],
    facts: Mapping[str, str],
    *,
    to: Path | None,
    page: Path = RESULTS,
    **measured: Any,
) -> None:
    """Print the section `name`. With `to`, the value of --record, also write the record, and put
    the section into the page, or into one of its name in another folder."""
    record = {"facts": facts, **measured}
    part = part_of(json.loads(json.dumps(record, default=dataclasses.asdict)))
    print(part)
    if to is not None:
        _write(to / FOLDER.name / f"{name}.json", record)
        write_section(page if to == FOLDER.parent else to / page.name, name, part)


def steps_of(run_dir: Path, metrics: Mapping[str, str]) -> list[dict[str, float]]:
    """Return the steps of a run: its number and the metrics that it has, named by the keys."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {"step": line["step"]}
        | {name: round(line[key], 6) for name, key in metrics.items() if key in line}
        for line in lines
    ]


def series(run: Mapping[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values there."""
    found = [(step["step"], step[name]) for step in run["steps"] if name in step]
    return [step for step, _ in found], [value for _, value in found]
