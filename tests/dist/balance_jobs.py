"""What a rank does in `test_balance.py`; run by `tests.rank_pool`.

Shape legend: t tokens of samples; m layers with experts on this pipeline stage; k choices a token;
e experts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_micro_batches, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.moe.balance import expert_biases
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.trainer.roles.reference import ReferencePolicy
from tests.dist.checkpoints import tensors_of
from tests.dist.ppo_jobs import ChosenExperts, Models, build_models, export_models, routers_of


def counts_of(choices: list[torch.Tensor], routed: RoutedLayers) -> torch.Tensor:
    """`[m, e]`: how often each expert was chosen, by each micro-batch's `[t, m, k]`."""
    counts = torch.zeros(len(routed.layers), routed.num_experts)
    for of_micro_batch in choices:
        for of_token in of_micro_batch.tolist():
            for layer, experts in enumerate(of_token):
                for expert in experts:
                    counts[layer, expert] += 1
    return counts


def move_biases(flags: list[str], target: str, rate: float) -> dict[str, Any]:
    """Updates that move biases, each after a pass that scores; and what must not move them."""
    models = build_models(flags)
    actor, chosen = models.learner.actor, ChosenExperts(models)
    load = ExpertLoad(models.state.chunks, models.job.spec.routed_layers)
    reference = ReferencePolicy(models.state)
    biases = dict(zip(routers_of(models), expert_biases(models.state.chunks), strict=True))
    layers = chosen.routed.layers
    first = {layer: bias.clone() for layer, bias in biases.items()}
    batch = models.learner.make_batch(0, models.samples()).actor
    batch = dataclasses.replace(batch, advantages=torch.ones(batch.num_tokens))
    wrong, total = [], torch.zeros(len(layers), chosen.routed.num_experts)
    for mini_batch in split_mini_batches(batch):
        before = {layer: bias.clone() for layer, bias in biases.items()}
        scored = actor.scored(mini_batch)
        counts = actor.runner.global_sum(counts_of(chosen.take(mini_batch), chosen.routed))
        actor.update(scored)
        total += counts
        for layer, of_layer in zip(layers, counts, strict=True):
            steps = torch.sign(of_layer.mean() - of_layer)
            if not torch.equal(biases[layer], before[layer] + steps * rate):
                wrong.append(layer)
    moved = {layer: bias.clone() for layer, bias in biases.items()}
    metrics = load.metrics()
    spoilt = dataclasses.replace(scored, advantages=torch.full((scored.num_tokens,), torch.nan))
    skipped = actor.update(spoilt).result.skipped
    stays = all(torch.equal(biases[layer], moved[layer]) for layer in layers)
    with reference:
        of_reference = all(torch.equal(biases[layer], first[layer]) for layer in layers)
    export_models(models, Path(target))
    dist.barrier()
    exported = tensors_of(Path(target) / "actor")
    names = {layer: f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in layers}
    busiest = {layer: float(n.max() / n.mean()) for layer, n in zip(layers, total, strict=True)}
    unused = {layer: float((n == 0).float().mean()) for layer, n in zip(layers, total, strict=True)}
    found = {
        "wrong": wrong,
        "skipped": skipped and stays,
        "of_reference": of_reference,
        "exported": all(torch.equal(exported[names[n]], moved[n].cpu()) for n in layers),
        "dtypes": sorted({str(exported[name].dtype) for name in names.values()}),
        "metrics": metrics,
    }
    everyone = objects.all_gather(
        {
            n: (moved[n].tolist(), (moved[n] - first[n]).tolist(), busiest[n], unused[n])
            for n in names
        }
    )
    found["layers"] = {str(n): values for each in everyone for n, values in sorted(each.items())}
    dist.destroy_process_group()
    return found


def learn_from_balance(flags: list[str], target: str, compares: bool) -> dict[str, float]:
    """An update by auxiliary losses alone, whose weights go to `target`; with `compares`, the
    largest gradient and its largest difference to that of the formula, in one process."""
    models = build_models(flags)
    actor = models.learner.actor
    mini_batch = split_mini_batches(models.learner.make_batch(0, models.samples()).actor)[0]

    def nothing(outputs: torch.Tensor, _: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return 0 * outputs.sum(), torch.zeros(1, device=outputs.device)

    found = {}
    expected = formula_gradients(models, mini_batch) if compares else {}
    actor.runner.accumulate_gradients(mini_batch, nothing, num_sums=1)
    if compares:
        gradients = dict(megatron_adapter.finished_gradients(models.state))
        assert gradients.keys() == expected.keys()
        apart = [(gradients[name] - each).abs().max() for name, each in expected.items()]
        found["largest"] = float(max(each.abs().max() for each in expected.values()))
        found["apart"] = float(max(apart))
    found["grad_norm"] = actor.optimizer.step(num_samples=1).grad_norm
    export_models(models, Path(target))
    dist.destroy_process_group()
    return found


def formula_gradients(models: Models, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Gradients by autograd on the papers' formulas, sample by sample, without padding."""
    args, (chunk,), routers = models.job.args, models.state.chunks, routers_of(models)
    kinds, coefficients = (  # of one alone Megatron makes no list
        given if isinstance(given, list) else [given]
        for given in (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff)
    )
    inputs: dict[int, torch.Tensor] = {}

    def note(router: Any, given: tuple[torch.Tensor, ...]) -> None:
        inputs[router.layer_number - 1] = given[0]

    hooks = [router.register_forward_pre_hook(note) for router in routers.values()]
    kept = {layer: router.routing_type for layer, router in routers.items()}
    for router in routers.values():
        router.routing_type = "none"
    parts = split_micro_batches(batch)
    so_far: dict[int, torch.Tensor] = {}
    total = torch.zeros(())
    for number, part in enumerate(parts):
        scores: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers}
        for tokens in part.token_ids.split(part.lengths.tolist()):
            chunk(tokens[None], torch.arange(len(tokens))[None], None)
            for layer, router in routers.items():
                logits = inputs[layer].squeeze(1) @ router.weight.t()
                scores[layer].append(logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True))
        for layer, of_samples in scores.items():
            whole = torch.cat(of_samples)
            so_far[layer] = so_far.get(layer, 0) + chosen_of(whole, args.moe_router_topk)
            for kind, coefficient in zip(kinds, coefficients, strict=True):
                weight = coefficient / len(parts)
                if kind == "seq_aux_loss":
                    for each in of_samples:
                        counts = chosen_of(each, args.moe_router_topk)
                        total = total + weight / len(of_samples) * imbalance(counts, each)
                elif kind == "aux_loss":
                    counts = chosen_of(whole, args.moe_router_topk)
                    total = total + weight * imbalance(counts, whole)
                else:
                    # of the update so far, a micro-batch
                    counts = so_far[layer] / (number + 1)
                    share = counts / (len(whole) * args.moe_router_topk)
                    total = total + weight * len(share) * (share * whole.mean(dim=0)).sum()
    for layer, router in routers.items():
        router.routing_type = kept[layer]
    for hook in hooks:
        hook.remove()
    named = dict(chunk.named_parameters())
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True)
    }


def chosen_of(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """`[e]`: how often each expert is among the best of a token of `[t, e]`."""
    return torch.bincount(scores.topk(topk, dim=1).indices.flatten(), minlength=scores.shape[1])


def imbalance(counts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Experts x the sum over them of (share of choices) x (mean score)."""
    return len(counts) * (counts / counts.sum() * scores.mean(dim=0)).sum()
