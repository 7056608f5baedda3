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

from mcore_rl.batching.rows import lay_out, row_length
from mcore_rl.batching.train_batches import split_micro_batches, split_mini_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.router_layout import RouterLayout
from mcore_rl.moe.balance import expert_biases
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.moe.routing import RoutedLayers, routed_layers
from mcore_rl.trainer.roles.reference import ReferencePolicy
from tests.dist.checkpoints import tensors_of
from tests.dist.ppo_jobs import Models, build_models, export_models, step_samples


def routers_of(models: Models) -> dict[int, Any]:
    """Of this stage, by layer from 0."""
    return {
        layer.layer_number - 1: layer.mlp.router
        for chunk in models.state.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }


class ScoredChoices:
    """Notes what routers choose when the actor scores, as the experts get it."""

    def __init__(self, models: Models) -> None:
        self._models, routers = models, routers_of(models)
        whole = routed_layers(models.job.spec.shape)
        self.routed = RoutedLayers(tuple(sorted(routers)), whole.topk, whole.num_experts)
        self._found: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers}
        for router in routers.values():
            router.register_forward_hook(self._note)

    def _note(self, router: torch.nn.Module, _: Any, output: tuple[torch.Tensor, Any]) -> None:
        if not router.training:
            ids = output[1].nonzero()[:, 1].view(-1, self.routed.topk)
            self._found[router.layer_number - 1].append(ids)

    def counts(self, batch: TrainBatch) -> torch.Tensor:
        """`[m, e]`: how often each expert was chosen for the tokens of all samples of the
        mini-batch, of which `batch` is this rank's part and has just been scored."""
        runner = self._models.learner.actor.runner
        layout = RouterLayout.of(self._models.job.args, runner.groups, runner.device)
        batching, parts = self._models.job.micro_batching(), split_micro_batches(batch)
        counts = torch.zeros(len(self.routed.layers), self.routed.num_experts)
        for number, part in enumerate(parts):
            rows = lay_out(part, batching, row_length(parts, batching), runner.groups["cp"].rank())
            noted = {i: self._found[layer][number] for i, layer in enumerate(self.routed.layers)}
            for choices in layout.gathered(noted, rows, self.routed).long():  # a token, [m, k]
                for layer, experts in enumerate(choices.tolist()):
                    for expert in experts:
                        counts[layer, expert] += 1
        for found in self._found.values():
            found.clear()
        return runner.global_sum(counts)


def move_biases(flags: list[str], target: str, rate: float) -> dict[str, Any]:
    """Updates that move biases, each after a pass that scores; and what must not move them."""
    models = build_models(flags)
    actor, chosen = models.learner.actor, ScoredChoices(models)
    load = ExpertLoad(models.state.chunks, routed_layers(models.job.spec.shape))
    reference = ReferencePolicy(models.state)
    biases = dict(zip(routers_of(models), expert_biases(models.state.chunks), strict=True))
    layers = chosen.routed.layers
    first = {layer: bias.clone() for layer, bias in biases.items()}
    batch = models.learner.make_batch(
        0, step_samples(models.job, models.learner.sample_store)
    ).actor
    batch = dataclasses.replace(batch, advantages=torch.ones(batch.num_tokens))
    wrong, total = [], torch.zeros(len(layers), chosen.routed.num_experts)
    for mini_batch in split_mini_batches(batch):
        before = {layer: bias.clone() for layer, bias in biases.items()}
        scored = actor.scored(mini_batch)
        counts = chosen.counts(mini_batch)
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
    batch = models.learner.make_batch(
        0, step_samples(models.job, models.learner.sample_store)
    ).actor
    mini_batch = split_mini_batches(batch)[0]

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
    """Of each sample by itself, without any padding, by autograd on the formulas of the papers."""
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
