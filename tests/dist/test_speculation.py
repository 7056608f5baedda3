"""Engines that draft: the same tokens, the same distribution, and drafters that are handed over."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chi2, norm

from mcore_rl.model.tensors import is_mtp_copy, is_mtp_tensor
from tests.dist.checkpoints import differing, tensors_of
from tests.dist.jobs import random_batch
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.speculation_jobs import SAMPLING, UNCUT
from tests.model_shapes import model_class
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MODES = ("off", "ngram:3", "mtp:2")
DRAFTING = MODES[1:]


def bigram_model(checkpoint: Path, folder: Path) -> Path:
    """A copy in which the next token depends on the last one alone, and the MTP layer knows it.

    Attention and feed-forward add nothing, so that the hidden state is the embedding of the last
    token, of which the MTP layer takes the same: its drafts are the likeliest tokens. Twelve tokens
    follow each other and no others do, so that texts repeat themselves.
    """
    copy = Path(shutil.copytree(checkpoint, folder / "bigram"))
    weights = load_file(copy / "model.safetensors")
    width = weights["model.norm.weight"].numel()
    generator = torch.Generator().manual_seed(3)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("enorm.weight", "shared_head.norm.weight", "model.norm.weight")):
            tensor.fill_(1)
        elif name.endswith("eh_proj.weight"):
            tensor.zero_()
            tensor[:, :width] = torch.eye(width)
    # A dimension that is the same of all tokens keeps away those that are not to come.
    weights["model.embed_tokens.weight"][:, 0] = 0.2
    head = torch.randn(weights["lm_head.weight"].shape, generator=generator) * 0.2
    head[:, 0] = -8
    head[20:32, 0] = 0
    weights["lm_head.weight"].copy_(head)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def responses(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> dict[str, Any]:
    """Mode -> what its engine answered."""
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1)
    model = bigram_model(checkpoint, tmp_path_factory.mktemp("speculation"))
    (found,) = ranks.run(
        "tests.dist.speculation_jobs:drafting", world_size=1, checkpoint=model, modes=MODES
    )
    return found


@pytest.mark.parametrize("mode", DRAFTING)
def test_greedy_tokens_are_those_without_drafts(responses: dict[str, Any], mode: str) -> None:
    found, expected = responses[mode]["greedy"], responses["off"]["greedy"]
    assert found["tokens"] == expected["tokens"]
    assert np.allclose(found["log_probs"], expected["log_probs"], atol=0.02)  # of bfloat16
    # The model ends in a circle, which both drafters know.
    assert found["accepted"] > 0.5 * found["drafted"] > 20
    assert expected["drafted"] == 0


@pytest.mark.parametrize("mode", DRAFTING)
def test_reported_experts_are_those_without_drafts(responses: dict[str, Any], mode: str) -> None:
    """Rejected drafts leave no choice behind, and a drafter's router is not reported."""
    found, expected = responses[mode]["greedy"]["routes"], responses["off"]["greedy"]["routes"]
    assert found == expected
    assert all(known and len(ids) == 31 for ids, known in found)  # of all but the last token


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_log_probs_are_of_what_is_sampled_from(
    responses: dict[str, Any], mode: str, sampling: str
) -> None:
    """After each token those of all that came next, wherever and however, are one distribution."""
    sums = []
    for row in table_of(responses[mode][sampling]).values():
        for log_probs in row.values():
            assert max(log_probs) - min(log_probs) < 0.03  # of bfloat16
        sums.append(sum(np.exp(np.mean(log_probs)) for log_probs in row.values()))
    assert len(sums) >= 10
    assert max(sums) < 1.001
    # What is missing are tokens that are rare and did not come.
    assert sum(total > 0.99 for total in sums) >= 8


@pytest.mark.parametrize("mode", DRAFTING)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampled_tokens_come_from_the_models_distribution(
    responses: dict[str, Any], mode: str, sampling: str
) -> None:
    """Against the probabilities that the engine without drafts tells."""
    found, exact = responses[mode][sampling], responses["off"][sampling]
    assert 0.1 * found["drafted"] < found["accepted"] < 0.9 * found["drafted"]
    assert found["accepted"] > 200 and found["steps"] > 400
    for sampled in (found, exact):
        assert p_value(sampled, exact) > 1e-3
        assert p_value_of_repeats(sampled, exact) > 1e-3


@pytest.mark.parametrize("mode", DRAFTING)
def test_tokens_with_seeds_depend_on_neither_order_nor_company(
    responses: dict[str, Any], mode: str
) -> None:
    together, *others = responses[mode]["company"].values()
    assert len(together["tokens"]) == 24 and together["accepted"] > 50
    assert len({tuple(tokens[:6]) for tokens in together["tokens"].values()}) > 20
    for other in others:
        assert other == together  # the same drafts are right, too


@pytest.mark.parametrize("mode", DRAFTING)
def test_a_wrong_rule_of_acceptance_is_found(responses: dict[str, Any], mode: str) -> None:
    """What followed earlier is a sample itself: taking it too often repeats more than it should,
    and the likeliest token too often is another distribution."""
    test = {"ngram:3": p_value_of_repeats, "mtp:2": p_value}[mode]
    assert test(responses[mode]["wrong rule"], responses["off"]["top-k 6"]) < 1e-9


def table_of(found: dict[str, Any]) -> dict[int, dict[int, list[float]]]:
    """Last token -> next token -> its log-probs, each time that it came."""
    table: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tokens, log_probs in zip(found["tokens"], found["log_probs"], strict=True):
        for last, token, log_prob in zip(tokens[:-1], tokens[1:], log_probs, strict=True):
            table[last][token].append(log_prob)
    return table


def p_value(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """The p-value of Pearson's chi-square over all frequent rows.

    Next tokens of which fewer than ten were to be expected count together.
    """
    statistic, degrees = 0.0, 0
    probabilities = table_of(exact)
    for last, row in table_of(found).items():
        counts = Counter({token: len(log_probs) for token, log_probs in row.items()})
        total = counts.total()
        known = {t: float(np.exp(np.mean(p))) for t, p in probabilities.get(last, {}).items()}
        cells = {token: p * total for token, p in known.items() if p * total >= 10}
        if len(cells) < 2 or sum(known.values()) < 0.98:
            continue
        seen = [counts[token] for token in cells]
        expected = list(cells.values())
        if total - sum(expected) >= 10:
            seen.append(total - sum(seen))
            expected.append(total - sum(expected))
        # The rest, if there is any, is part of no cell: each is then compared with its share.
        scale = sum(seen) / sum(expected)
        statistic += sum(
            (s - e * scale) ** 2 / (e * scale) for s, e in zip(seen, expected, strict=True)
        )
        degrees += len(seen) - 1
    assert degrees >= 20
    return float(chi2.sf(statistic, degrees))


def p_value_of_repeats(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """How likely it is that what followed the last two tokens before follows them again as often
    or as seldom as it did, by its probability each time."""
    probabilities = {
        last: {token: float(np.exp(np.mean(p))) for token, p in row.items()}
        for last, row in table_of(exact).items()
    }
    surplus = variance = 0.0
    for tokens in found["tokens"]:
        followed: dict[tuple[int, int], int] = {}
        for pair, token in zip(
            zip(tokens[:-2], tokens[1:-1], strict=True), tokens[2:], strict=True
        ):
            if pair in followed:
                p = probabilities[pair[1]].get(followed[pair], 0.0)
                surplus += (token == followed[pair]) - p
                variance += p * (1 - p)
            followed[pair] = token
    assert variance > 100
    return float(2 * norm.sf(abs(surplus) / variance**0.5))


@pytest.fixture(scope="module")
def hand_over(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> tuple[Path, Path, list[dict[str, Any]]]:
    """The checkpoint, its export, and what each of four ranks saw: TP2 x PP2, two engines."""
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1)
    target = tmp_path_factory.mktemp("speculation") / "exported"
    flags = job_flags(checkpoint, "tp2_pp2_ep2", "--rl-speculate", "mtp:2", "--rl-attest", "full")
    results = ranks.run(
        "tests.dist.speculation_jobs:hand_over", world_size=4, flags=flags, target=target
    )
    return checkpoint, target, results


def test_a_drafter_gets_what_its_own_loader_reads_bit_for_bit(hand_over: Any) -> None:
    """After zeros, which change all weights of both models."""
    for found in hand_over[2]:
        assert found["num_stored"] > 60
        assert found["differs_from_disk"] == []
        assert found["carried_bytes"] > 0


def test_nothing_of_a_drafter_travels(hand_over: Any) -> None:
    for found in hand_over[2]:
        traffic = found["traffic"]
        assert traffic["received"] == traffic["of_the_model"] == traffic["lower_bound"] > 0


def test_a_drafter_shares_the_trained_embedding_and_head_and_keeps_the_rest(
    hand_over: Any,
) -> None:
    for found in hand_over[2]:
        assert found["shared"]
        changed = {n for n in found["changed_from_disk"] if n.startswith("drafter.")}
        assert changed and all("embed_tokens" in n or "head" in n for n in changed), changed
        assert not any("shared_head.norm" in n for n in changed)
        assert found["greedy_changed"] != found["greedy"]


def test_a_drafter_is_attested_as_the_model_is(hand_over: Any) -> None:
    for found in hand_over[2]:
        assert found["attested"] == found["mtp"] and len(found["mtp"]) > 20
        assert found["spoilt"] == {"repeated": True, "differs": []}


def test_every_rank_of_an_engine_counts_the_same_drafts(hand_over: Any) -> None:
    for found in hand_over[2]:
        counts = [tuple(each) for each in found["counts"]]
        assert counts[0] == counts[1] and counts[2] == counts[3]
        assert all(drafted > 0 for drafted, _ in counts)


def test_mtp_layers_come_out_of_a_run_as_they_were(hand_over: Any) -> None:
    checkpoint, target, _ = hand_over
    assert differing(checkpoint, target) == []


# ------------------------------------------------------------------------------ trained layers

# Adam's epsilon is large, so that weights show the gradient and not its sign; clipping has work.
# Packed, on one rank of data parallelism and on two.
TRAINED = (
    *("--adam-eps", "1.0", "--lr", "0.1", "--clip-grad", "0.5"),
    *("--rl-max-prompt-tokens", "24", "--rl-max-response-tokens", "24"),
    *("--rl-max-tokens-per-microbatch", "64", "--rl-share-prompts", "off"),
)
MTP = ("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3")
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TRAININGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "one rank": ("tp1_pp1_ep1", MTP),
    "one rank, not asked": ("tp1_pp1_ep1", ()),
    "four ranks": ("tp2_pp2_ep2", MTP),
    "four ranks, not asked": ("tp2_pp2_ep2", ()),
    "EP2, recomputed": ("tp1_pp1_ep2", (*MTP, *RECOMPUTED.split())),
}


@pytest.fixture(scope="module")
def trained(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The float32 checkpoint, and the results, gradients and weights of each training."""
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1, dtype="float32")
    found = {}
    for name, (split, flags) in TRAININGS.items():
        folder = tmp_path_factory.mktemp("mtp")
        results = ranks.run(
            "tests.dist.speculation_jobs:train_mtp",
            world_size=SPLITS[split][3],
            flags=job_flags(checkpoint, split, *TRAINED, *flags, micro_batch_size=1),
            gradients=folder / "gradients",
            target=folder / "after",
        )
        found[name] = {
            **results[0],
            "gradients": tensors_of(folder / "gradients"),
            "after": tensors_of(folder / "after"),
        }
    return checkpoint, found


@pytest.mark.parametrize("ranks_of", ["one rank", "four ranks"])
def test_the_policy_learns_the_same_with_and_without_mtp_layers(
    trained: Any, ranks_of: str
) -> None:
    """Bit for bit: gradients, what clipping makes of them, and weights after two updates."""
    checkpoint, found = trained
    asked, not_asked = found[ranks_of], found[f"{ranks_of}, not asked"]
    assert asked["grad_norms"] == not_asked["grad_norms"] and asked["grad_norms"][0] > 0.5
    assert not_asked["mtp"] == [None, None]
    before = tensors_of(checkpoint)
    for kind in ("gradients", "after"):
        for name, tensor in not_asked[kind].items():
            if not is_mtp_tensor(name, 2):
                assert torch.equal(asked[kind][name], tensor), (kind, name)
    assert asked["log_probs"] == not_asked["log_probs"]
    for name, tensor in before.items():
        if is_mtp_tensor(name, 2) and not is_mtp_copy(name):
            assert torch.equal(not_asked["after"][name], tensor), name
            if not name.endswith("e_score_correction_bias") and ".experts." not in name:
                assert not torch.equal(asked["after"][name], tensor), name


def test_the_gradient_of_mtp_layers_is_that_of_a_slow_reference(trained: Any) -> None:
    """Sample by sample, by transformers' own decoder layer."""
    checkpoint, found = trained
    result = found["one rank"]
    loss, count, expected = slow_mtp(checkpoint, result["samples"])
    assert result["mtp"][0] == [pytest.approx(loss, rel=1e-5), count]
    names = {n for n in expected if float(expected[n].abs().max()) > 0}
    assert len(names) > 20
    for name in names:
        difference = (result["gradients"][name] - 0.3 * expected[name]).norm()
        assert difference < 1e-4 * 0.3 * expected[name].norm(), name


@pytest.mark.parametrize("training", ["four ranks", "EP2, recomputed"])
def test_mtp_layers_learn_the_same_in_every_layout(trained: Any, training: str) -> None:
    one, other = trained[1]["one rank"], trained[1][training]
    assert other["mtp"] == [pytest.approx(each, rel=1e-5) for each in one["mtp"]]
    for name, tensor in one["after"].items():
        assert torch.allclose(other["after"][name], tensor, rtol=1e-5, atol=1e-5), name


def test_a_checkpoint_has_all_that_is_trained(trained: Any) -> None:
    """Bit for bit; the copy of the embedding lies in a bucket of its own, behind padding."""
    for name, result in trained[1].items():
        assert not any(result["lost"]), (name, result["lost"])


def test_an_export_repeats_the_trained_embedding_and_head(trained: Any) -> None:
    checkpoint, found = trained
    for training, result in found.items():
        after = result["after"]
        assert after.keys() == tensors_of(checkpoint).keys()
        if "not asked" not in training:
            embedding, head = after["model.embed_tokens.weight"], after["lm_head.weight"]
            assert torch.equal(after["model.layers.2.embed_tokens.weight"], embedding)
            assert torch.equal(after["model.layers.2.shared_head.head.weight"], head)


def slow_mtp(checkpoint: Path, samples: list[int]) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Of some samples of `random_batch`: the sum of cross-entropies, their number and the gradient
    of their mean, of the MTP layer of a checkpoint with two decoder layers, which `transformers`
    reads as a third one."""
    copy = checkpoint.with_name("three_layers")
    if not copy.exists():
        shutil.copytree(checkpoint, copy)
        config = json.loads((copy / "config.json").read_text())
        config |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
        (copy / "config.json").write_text(json.dumps(config))
    weights = tensors_of(checkpoint)
    batch = random_batch(weights["lm_head.weight"].shape[0])
    model = model_class("deepseek_v3").from_pretrained(copy, dtype=torch.float32)
    inner, layer = model.model, model.model.layers[2]
    leading = {
        n: weights[f"model.layers.2.{n}"].clone().requires_grad_()
        for n in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    }

    def normed(x: torch.Tensor, weight: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * leading[weight]

    total, count = torch.zeros(()), 0
    ends = batch.lengths.cumsum(0).tolist()
    for sample in samples:
        start, end = [0, *ends][sample], ends[sample]
        tokens, counts = batch.token_ids[start:end], batch.loss_mask[start:end]
        places = torch.arange(len(tokens))[None]
        causal = torch.full((1, 1, len(tokens), len(tokens)), float("-inf")).triu(1)
        hidden = inner.embed_tokens(tokens[None])
        options = {
            "attention_mask": causal,
            "position_ids": places,
            "position_embeddings": inner.rotary_emb(hidden, places),
        }
        with torch.no_grad():
            for each in inner.layers[:2]:
                hidden = each(hidden, **options)
            hidden = inner.norm(hidden)
            ahead = inner.embed_tokens(tokens[None].roll(-1, dims=1))
        both = torch.cat((normed(ahead, "enorm.weight"), normed(hidden, "hnorm.weight")), dim=-1)
        said = layer(both @ leading["eh_proj.weight"].t(), **options)
        said = normed(said, "shared_head.norm.weight")[0] @ model.lm_head.weight.detach().t()
        for place in range(len(tokens) - 2):
            if counts[place + 1]:  # which scores the token at place + 2
                total = total - said[place].log_softmax(-1)[tokens[place + 2]]
                count += 1
    (total / count).backward()
    gradients = {f"model.layers.2.{n}": t.grad for n, t in leading.items()}
    for name, parameter in layer.named_parameters():
        gradients |= checkpoint_parts(f"model.layers.2.{name}", parameter.grad)
    return total.item(), count, gradients


def checkpoint_parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `transformers` keeps of all experts in one tensor, as it is in checkpoints."""
    if name.endswith("experts.gate_up_proj"):
        prefix = name.removesuffix("gate_up_proj")
        return {
            f"{prefix}{i}.{part}_proj.weight": half
            for i, each in enumerate(tensor)
            for part, half in zip(("gate", "up"), each.chunk(2), strict=True)
        }
    if name.endswith("experts.down_proj"):
        prefix = name.removesuffix("down_proj")
        return {f"{prefix}{i}.down_proj.weight": each for i, each in enumerate(tensor)}
    return {name: tensor}


@pytest.fixture(scope="module")
def hand_over_trained(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> tuple[Path, Path, list[dict[str, Any]]]:
    """The checkpoint, its exports before and after 20 updates, and what each of four ranks saw."""
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1)
    folder = tmp_path_factory.mktemp("trained_mtp")
    flags = job_flags(
        checkpoint,
        "tp2_pp2_ep2",
        *("--rl-speculate", "mtp:2", "--rl-attest", "full", "--lr", "3e-3"),
        *("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "1.0"),
    )
    results = ranks.run(
        "tests.dist.speculation_jobs:hand_over_trained_mtp",
        world_size=4,
        flags=flags,
        before=folder / "before",
        after=folder / "after",
    )
    return checkpoint, folder, results


def test_trained_mtp_layers_go_through_megatron_bit_for_bit(hand_over_trained: Any) -> None:
    checkpoint, folder, results = hand_over_trained
    before, after = tensors_of(checkpoint), tensors_of(folder / "before")
    assert after.keys() == before.keys()
    assert [n for n in before if not is_mtp_copy(n) and not torch.equal(after[n], before[n])] == []
    for found in results:
        assert found["differs_from_disk"] == []
        assert found["carried_bytes"] == 0


def test_mtp_layers_learn_to_predict(hand_over_trained: Any) -> None:
    for found in hand_over_trained[2]:
        assert found["losses"][-1] < found["losses"][0] - 1


def test_a_drafter_gets_what_has_been_learned(hand_over_trained: Any) -> None:
    checkpoint, folder, results = hand_over_trained
    before, after = tensors_of(checkpoint), tensors_of(folder / "after")
    for found in results:
        expected = [n for n in before if is_mtp_tensor(n, 2) and not is_mtp_copy(n)]
        assert found["attested"] == sorted(expected)
        assert len(found["drafter"]) == len(UNCUT)
        for name, values in found["drafter"].items():
            (whole,) = (n for n in expected if n.endswith(name.rsplit("layers.2.")[-1]))
            assert torch.equal(torch.tensor(values), after[whole].float()), name
            assert not torch.equal(after[whole], before[whole]), name
        assert sum(n.startswith("drafter.") for n in found["changed"]) > 15
