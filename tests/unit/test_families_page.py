"""The page of families says what the tables and the tests say."""

from __future__ import annotations

import re

from mcore_rl.model.families import FAMILIES
from tests import families_page


def test_page_of_families_is_current() -> None:
    page = families_page.PAGE.read_text(encoding="utf-8")
    assert families_page.rendered(page) == page, "run python -m tests.families_page"


def test_every_family_has_every_proof() -> None:
    """But for engines with sparse attention on CPU."""
    sparse = {name for name, family in FAMILIES.items() if family.sparse_attention}
    lacking = {"hand-over": sparse, "vLLM on CPU": sparse}
    for column, covered in families_page.proofs().items():
        assert covered == FAMILIES.keys() - lacking.get(column, set()), column
    assert families_page.splits().keys() == FAMILIES.keys()


def test_evidence_of_each_level_exists() -> None:
    for families in families_page.LEVELS.values():
        assert families.keys() <= FAMILIES.keys()
        for where in families.values():
            path, _, anchor = where.partition("#")
            text = (families_page.ROOT / path).read_text(encoding="utf-8")
            headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert not anchor or anchor in anchors, where
