"""Shares of sources in every step, and what a run continues with if sources change."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.data.apportionment import Apportionment
from mcore_rl.data.prompts import PromptSources
from mcore_rl.data.source_position import Begin, changes_between, continued
from mcore_rl.data.sources import SourceSpec
from tests.prompt_tables import dataset, one_source, sources

SEED = 7

SHARES = st.lists(st.integers(1, 1000), min_size=2, max_size=7)


@settings(deadline=None, max_examples=80)
@given(shares=SHARES, block=st.integers(1, 40), num_blocks=st.integers(1, 60))
def test_steps_and_counts_are_within_a_prompt_of_their_share(shares, block, num_blocks):
    found, ranks = Apportionment(shares, block).of_draws(0, block * num_blocks)
    for source, share in enumerate(shares):
        is_of = found == source
        quotas = is_of.reshape(num_blocks, block).sum(axis=1)
        exact = Fraction(block * share, sum(shares))
        assert {*quotas.tolist()} <= {math.floor(exact), math.ceil(exact)}
        for number, count in enumerate(np.cumsum(quotas).tolist(), start=1):
            assert math.floor(number * exact) <= count <= math.ceil(number * exact)
        assert ranks[is_of].tolist() == list(range(is_of.sum()))  # each once, in order


@settings(deadline=None, max_examples=40)
@given(
    shares=SHARES,
    block=st.integers(1, 12),
    cuts=st.lists(st.integers(0, 400), min_size=2, max_size=5),
    position=st.integers(0, 99),
)
def test_draws_do_not_depend_on_the_order_of_questions(shares, block, cuts, position):
    before = list(range(len(shares)))

    def fresh() -> Apportionment:
        return Apportionment(shares, block, position=position, counts=before)

    found, ranks = fresh().of_draws(position, 500)
    asked = fresh()
    for cut in cuts:
        for count in (0, 1, 30):
            start = position + cut
            got = [each.tolist() for each in asked.of_draws(start, count)]
            assert got == [each[cut : cut + count].tolist() for each in (found, ranks)]
        counts = np.bincount(found[:cut], minlength=len(shares)) + before
        assert asked.counts(position + cut) == counts.tolist()


def test_shares_are_exact_over_a_period():
    apportionment = Apportionment([1, 2, 4], 5)
    assert apportionment.counts(7 * 5 * 3) == [15, 30, 60]
    far = 7 * 10**9  # found without the blocks before
    assert apportionment.counts(far + 2) == [
        far // 7 * units + first
        for units, first in zip((1, 2, 4), apportionment.counts(2), strict=True)
    ]
    # Numbers that would overflow are rounded.
    rounded = Apportionment([10**20, 1, 10**20 // 3], 8)
    assert rounded.counts(8)[0] in (5, 6) and sum(rounded.counts(8)) == 8
    for block, are_alike in ((8, True), (6, False)):  # 2 draws of the last source, and 1.5
        found = [Apportionment([2, 1, 1], block).counts(block * n) for n in range(5)]
        assert (len(np.unique(np.diff(found, axis=0), axis=0)) == 1) == are_alike


def of(sizes: dict[str, int], *weights: str, **options: Any) -> PromptSources:
    return sources(sizes, dict(zip(sizes, weights, strict=True)), **options)


def test_a_changed_set_of_sources_is_another_one():
    before = of({"a": 4, "b": 4}, "0.5", "0.5")
    assert before.are_those_of(of({"a": 4, "b": 4}, "0.5", "0.5").fingerprint)
    assert one_source(4).are_those_of(before.fingerprint) is False
    assert before.are_those_of("size and time of a file") is None
    for now, why in (
        (of({"a": 4, "b": 4}, "0.6", "0.4"), "weights differ"),
        (of({"b": 4, "a": 4}, "0.5", "0.5"), "order"),
        (of({"a": 4, "b": 4}, "0.5", "0.5", per_step=2), "a step has 2 prompts of all, and had 1"),
        (of({"a": 4, "b": 4, "c": 4}, "0.5", "0.25", "0.25"), "'c' is new"),
        (of({"b": 4}, "1"), "'a' is missing, 'b' is missing"),
        (of({"a": 4, "d": 4}, "0.5", "0.5"), "'d' is new, 'b' is missing"),
        (of({"a": 5, "b": 4}, "0.5", "0.5"), "'a' has other prompts"),
    ):
        assert now.are_those_of(before.fingerprint) is False
        assert why in changes_between(before.fingerprint, now.fingerprint)


def test_sources_continue_where_they_were_after_others_join_or_shares_change():
    def after(first: PromptSources, now: PromptSources, position: int) -> PromptSources:
        fingerprints = first.fingerprint, now.fingerprint
        return now.begun(continued(fingerprints[0], first.begin, position, fingerprints[1]))

    def drawn(prompts: PromptSources, start: int, count: int, name: str) -> list[str]:
        found = [prompts.of_draw(draw, seed=SEED) for draw in range(start, start + count)]
        return [each.text for each in found if each.text.startswith(name)]

    two = of({"a": 7, "b": 9}, "0.5", "0.5", per_step=4)
    three = after(two, of({"a": 7, "c": 5, "b": 9}, "0.25", "0.5", "0.25", per_step=8), 12)
    assert three.begin == Begin(12, {"a": 6, "b": 6})
    for name in "ab":
        assert drawn(two, 0, 12, name) + drawn(three, 12, 24, name) == drawn(two, 0, 24, name)
    assert len(drawn(three, 12, 8, "c")) == 4  # the first step has the new quotas
    assert drawn(three, 12, 8, "c") == drawn(three.begun(Begin()), 0, 8, "c")
    # Again, with other prompts of one source.
    last = after(three, of({"a": 8, "c": 5, "b": 9}, "0.25", "0.5", "0.25"), 20)
    assert last.begin == Begin(20, {"b": 8, "c": 4})


def test_the_only_source_continues_beside_another():
    one = PromptSources([(SourceSpec("", "a.jsonl"), dataset(7, "a"))])
    now = of({"b": 5, "a": 7}, "0.5", "0.5", per_step=2)
    two = now.begun(continued(one.fingerprint, one.begin, 10, now.fingerprint))
    assert two.begin == Begin(10, {"a": 10}, only_source="a")
    texts = [two.of_draw(draw, seed=SEED).text for draw in range(10, 30)]
    of_a = [text for text in texts if text.startswith("a")]
    assert of_a == [one.of_draw(draw, seed=SEED).text for draw in range(10, 20)]
    # Back to one file, which has no name: its order is another one, so it begins again.
    assert continued(two.fingerprint, two.begin, 30, one.fingerprint) == Begin(30)
    assert changes_between(one.fingerprint, two.fingerprint) == "'b' is new"
