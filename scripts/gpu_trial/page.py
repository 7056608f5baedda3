"""The page of results: the contents of the stages' JSON files as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.gpu_trial.table import FAILED, PASSED, SKIPPED

_MARKS = {PASSED: "passed", FAILED: "**FAILED**", SKIPPED: "skipped", None: "not run"}
_TAIL_LINES = 40
_PEAK = (
    "Peak: what was in use by all programs, as the driver tells of the device and, without a GPU, "
    "the kernel of the host, above what was in use before the stage; of several devices the most."
)


def page(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Return the complete page: outcome, machine, stages. A result without `status` was not run."""
    facts = next((r["facts"] for r in results if r.get("facts")), {}) | dict(facts)
    lines = ["# GPU trial", "", _summary(results), ""]
    lines += ["| stage | outcome | s | limit | peak GB | why, or what it shows |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- |"]
    lines += [_row(result) for result in results]
    lines += [
        "",
        "Peak: all of the device as its driver tells (without a GPU: of the host), above ",
    ]
    lines[-1] += "what was in use before the stage; of several devices the highest."
    lines += ["", "## Machine", "", *_machine(facts)]
    for result in results:
        if result.get("status") in (PASSED, FAILED):
            lines += ["", f"## {result['stage']}: {result['status']}", "", *_stage(result)]
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[Mapping[str, Any]]) -> str:
    found = {
        status: [r["stage"] for r in results if r.get("status") == status]
        for status in (PASSED, FAILED, SKIPPED)
    }
    parts = [f"{len(names)} {status}" for status, names in found.items()]
    failed = f" Failed: {', '.join(found[FAILED])}." if found[FAILED] else ""
    return f"{', '.join(parts)}, of {len(results)} stages.{failed}"


def _row(result: Mapping[str, Any]) -> str:
    memory = result.get("memory") or {}
    pairs = zip(memory.get("highest_bytes", ()), memory.get("before_bytes", ()), strict=True)
    peak = max((highest - before for highest, before in pairs), default=None)
    cells = (
        result["stage"],
        _MARKS[result.get("status")],
        _number(result.get("seconds")),
        _number(result.get("limit_seconds")),
        "-" if peak is None else f"{peak / 1e9:.2f}",
        _cell(result.get("why") or result.get("shows") or ""),
    )
    return f"| {' | '.join(cells)} |"


def _machine(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts.get("python"):
        yield "No environment."
        return
    kind = "GPUs" if facts["has_cuda"] else "processes on the CPU; **no GPU: CPU's figures below**"
    yield f"- devices: {facts['devices']} {kind}"
    for gpu in facts.get("gpus", ()):
        yield (
            f"- GPU: {gpu['name']}, {gpu['bytes'] / 2**30:.0f} GiB, capability "
            f"{gpu['capability']}, {gpu['multiprocessors']} multiprocessors"
        )
    yield f"- {facts.get('cpu', '')}, {facts.get('host_bytes', 0) / 2**30:.0f} GiB of host memory"
    versions = facts.get("versions", {})
    shown = (f"{name} {version}" for name, version in versions.items() if version)
    yield f"- versions: {', '.join(shown)}"
    for name, found in facts.get("packages", {}).items():
        if found.get("error"):
            yield f"- {name} cannot be imported: {_cell(found['error'])}"
    for text in (facts.get("nvidia_smi"), facts.get("topology")):
        if text:
            yield from ("", "```", text, "```")


def _stage(result: Mapping[str, Any]) -> Iterator[str]:
    yield result["shows"] + "."
    if result.get("why"):
        yield from ("", f"Why: {result['why']}")
    yield ""
    yield from _figures(result.get("figures", {}))
    for note in result.get("notes", ()):
        yield f"- {note}"
    commands = result.get("commands", ())
    if commands:
        yield from ("", "| command | exit code | s |", "| --- | ---: | ---: |")
        for command in commands:
            code, seconds = command.get("exit_code"), command.get("seconds")
            yield f"| {command['label']} | {_number(code)} | {_number(seconds)} |"
    for name, text in result.get("texts", {}).items():
        yield from ("", f"{name}:", "", "```", text.rstrip(), "```")
    for text in (result.get("error_text"), result.get("log_tail")):
        if text:
            yield from ("", "```", *text.strip().splitlines()[-_TAIL_LINES:], "```")
            break


def _figures(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield plain values as a list, then lists of rows as tables."""
    for name, value in figures.items():
        if not isinstance(value, list):
            yield f"- {name}: {_number(value)}"
    for name, rows in figures.items():
        if isinstance(rows, list) and rows:
            columns = list(dict.fromkeys(column for row in rows for column in row))
            yield from ("", f"{name}:", "", f"| {' | '.join(map(_cell, columns))} |")
            yield "| " + " | ".join("---" for _ in columns) + " |"
            for row in rows:
                yield f"| {' | '.join(_cell(_number(row.get(column))) for column in columns)} |"
            yield ""


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
