"""Write the generated parts of docs/.

flags.md (mcore_rl's flags), megatron_flags.md (how the installed Megatron's flags are treated), and
the table of parameters in algorithms.md:

python scripts/document_flags.py
"""

from __future__ import annotations

from pathlib import Path

from mcore_rl.common.megatron_version import check_megatron
from mcore_rl.flags.classes import document
from mcore_rl.flags.pages import BEGIN, END, flags_page, parameter_table
from mcore_rl.megatron import adapter as megatron_adapter

DOCS = Path(__file__).resolve().parent.parent / "docs" / "using"

if __name__ == "__main__":
    theirs = document(megatron_adapter.make_parser(), check_megatron().version)
    (DOCS / "megatron_flags.md").write_text(theirs, encoding="utf-8")
    (DOCS / "flags.md").write_text(flags_page(), encoding="utf-8")
    algorithms = DOCS / "algorithms.md"
    before, _, rest = algorithms.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{before}{BEGIN}\n{parameter_table()}{END}{after}"
    algorithms.write_text(text, encoding="utf-8")
