"""Lines by room: code, docstrings and comments of the product, and of the tests.

    python scripts/count_lines.py

A room is a package of `mcore_rl`; patches, benchmarks, scripts and examples count as one each.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def counted(text: str) -> tuple[int, int]:
    """Return the lines of code, and those of docstrings and comments; blank lines count in none."""
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            constant = node.body[0]
            said |= set(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments |= set(lines)
        elif token.type not in _IGNORED and token.type != tokenize.ENDMARKER:
            code |= set(lines)
    code -= said
    return len(code), len(said | comments - code)


def room_of(path: Path) -> str:
    parts = path.parts
    if parts[0] == "mcore_rl":
        return "mcore_rl/" + (parts[1] if len(parts) > 2 else "*.py")
    return "/".join(parts[: 2 if parts[0] == "tests" and len(parts) > 2 else 1])


def main() -> None:
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        for place, count in enumerate(counted((ROOT / name).read_text())):
            rooms[room_of(Path(name))][place] += count
    groups = {"product": ("mcore_rl", "patches"), "tests": ("tests",)}
    print(f"{'room':26} {'code':>7} {'docs':>7}")
    for room, (code, docs) in sorted(rooms.items()):
        print(f"{room:26} {code:7,} {docs:7,}")
    for title, tops in groups.items():
        totals = [
            sum(counts[place] for room, counts in rooms.items() if room.split("/")[0] in tops)
            for place in (0, 1)
        ]
        print(f"{title + ', all':26} {totals[0]:7,} {totals[1]:7,}")


if __name__ == "__main__":
    main()
