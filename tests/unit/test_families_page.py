"""The page of families says what the tables and the tests say."""

from __future__ import annotations

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
