"""The page of results: the stages' JSON files as Markdown. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
WAITING = "waiting"  # for parts
INTERRUPTED = "interrupted"  # by a signal, as at the end of a visit
STATUSES = (PASSED, FAILED, SKIPPED, WAITING, INTERRUPTED)
_MARKS = {**dict(zip(STATUSES, STATUSES)), FAILED: "**FAILED**"}  # noqa: B905 (Python 3.9)
_TAIL_LINES = 40


def page(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Return the complete page. A result without `status` was not run."""
    facts = next((r["facts"] for r in results if r.get("facts")), {}) | dict(facts)
    kind = "GPUs" if facts.get("has_cuda") else "processes on the CPU; **no GPU: figures of a CPU**"
    counts = [
        f"{count} {status}"
        for status in STATUSES
        if (count := _count(results, status)) or status in (PASSED, FAILED, SKIPPED)
    ]
    failed = [result["stage"] for result in results if result.get("status") == FAILED]
    lines = [
        "# GPU trial",
        "",
        f"{', '.join(counts)}, of {len(results)} stages."
        + (f" Failed: {', '.join(failed)}." if failed else ""),
        "",
        f"Devices: {facts.get('devices', 0)} {kind}.",
        "",
        "| stage | outcome | s | limit | peak GB | why, or what it shows |",
        "| --- | --- | ---: | ---: | ---: | --- |",
        *map(_row, results),
        "",
        "Peak: all of the device as its driver tells (without a GPU: of the host), above what was "
        "in use before the stage; of several devices the highest.",
    ]
    for result in results:
        if result.get("status") in (PASSED, FAILED, INTERRUPTED):
            lines += ["", f"## {result['stage']}: {result['status']}", "", *_stage(result)]
    return "\n".join(lines) + "\n"


def _count(results: Sequence[Mapping[str, Any]], status: str) -> int:
    return sum(result.get("status") == status for result in results)


def _row(result: Mapping[str, Any]) -> str:
    memory = result.get("memory_bytes") or {"highest": (), "before": ()}
    pairs = zip(memory["highest"], memory["before"])  # noqa: B905 (Python 3.9)
    peak = max((highest - before for highest, before in pairs), default=None)
    cells = (
        result["stage"],
        _MARKS.get(result.get("status", ""), "not run"),
        str(result.get("seconds", "-")),
        str(result.get("limit_seconds", "-")),
        "-" if peak is None else f"{peak / 1e9:.2f}",
        " ".join((result.get("why") or result.get("shows") or "").split()).replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _stage(result: Mapping[str, Any]) -> Iterator[str]:
    yield result["shows"] + "."
    if result.get("why"):
        yield from ("", f"Why: {result['why']}")
    for lines in (
        result.get("commands", ()),
        result.get("found", ()),
        result.get("log_tail", "").strip().splitlines()[-_TAIL_LINES:],
    ):
        if lines:
            yield from ("", "```", *lines, "```")
