"""The complete plan of a case: its memory, its traffic and its problems, also as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.planner.advice import Problem, problems_of
from mcore_rl.planner.links import Traffic, gather_bytes, traffic_of
from mcore_rl.planner.memory import Memory, adapters_of, memory_of, placement_of, resident_of
from mcore_rl.planner.models import Bytes, TrainedModel
from mcore_rl.planner.phases import Case, Phase
from mcore_rl.planner.step_seconds import Seconds, Step, seconds_of_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of planning a case."""

    case: Case
    memory: Memory
    traffic: Traffic | None  # of the actor's weights; None without engines of the job
    adapters: Traffic | None  # if all hand-overs but the first one bring adapters alone
    gathered: Bytes | None  # received by an export that gathers every tensor, for comparison
    problems: tuple[Problem, ...]

    @property
    def fits(self) -> bool:
        """Whether memory suffices on all ranks and nodes."""
        return not self.problems

    @property
    def usual_traffic(self) -> Traffic | None:
        """The traffic of every hand-over but the first one."""
        return self.traffic if self.adapters is None else self.adapters

    @property
    def seconds(self) -> float:
        """The estimated duration of a hand-over that is not the first one."""
        traffic = self.usual_traffic
        return 0.0 if traffic is None else traffic.seconds(self.case.machine)

    def seconds_of_step(self, step: Step) -> Seconds:
        """Return the seconds of a step by formula."""
        return seconds_of_step(self.case, self.memory, step, self.seconds)

    @property
    def received_over_lower_bound(self) -> float:
        """The ratio of both, over all ranks together."""
        if self.traffic is None:
            return 1.0
        bound = self.traffic.lower_bound.sum()
        return float(self.traffic.received.sum() / bound) if bound else 1.0

    @property
    def rank_bytes(self) -> dict[str, Bytes]:
        """The bytes of a hand-over by name, each `[ranks]`. Engines on ranks of their own follow
        the trainers, and trainers neither receive nor hold anything for rollout. Empty without
        engines."""
        traffic, adapters = self.traffic, self.adapters
        if traffic is None or self.gathered is None:
            return {}
        of_adapters = {}
        if adapters is not None:
            of_adapters = {
                "adapters_received": adapters.received,
                "adapters_sent": adapters.sent,
                "adapters_lower_bound": adapters.lower_bound,
            }
        return {
            "received": traffic.received,
            "sent": traffic.sent,
            "lower_bound": traffic.lower_bound,
            "resident": traffic.resident,
            "received_own_node": traffic.received_own_node,
            "received_other_nodes": traffic.received_other_nodes,
            "sent_own_node": traffic.sent_own_node,
            "sent_other_nodes": traffic.sent_other_nodes,
            "gather_export_received": self.gathered,
            **of_adapters,
        }


def plan_case(case: Case) -> Outcome:
    """Plan the memory and the traffic of a case."""
    if not case.has_engines:
        resident = resident_of(case)
        memory = memory_of(case, resident)
        return Outcome(
            case, memory, None, None, None, tuple(problems_of(case, memory, resident, 0))
        )
    placement = placement_of(case)
    rank_map, is_separate = case.rollout.rank_map, case.is_separate
    traffic = traffic_of(placement, rank_map, case.machine, is_separate=is_separate)
    adapters = None
    if (later := adapters_of(case)) is not None:
        adapters = traffic_of(later, rank_map, case.machine, is_separate=is_separate)
    copied = int((traffic.received + traffic.sent).max())
    resident = resident_of(case)
    memory = memory_of(case, resident, copied)
    problems = problems_of(case, memory, resident, copied)
    gathered = gather_bytes(placement, is_separate=is_separate)
    return Outcome(case, memory, traffic, adapters, gathered, tuple(problems))


def as_json(outcome: Outcome, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the complete plan; docs/using/planner.md explains the keys."""
    case, traffic, memory = outcome.case, outcome.traffic, outcome.memory
    of_ranks: dict[str, float] = {}
    for name, values in outcome.rank_bytes.items():
        of_ranks[f"{name}_bytes_max"] = int(values.max())
        of_ranks[f"{name}_bytes_mean"] = float(values.mean())
    others = [model for model in (case.critic, *case.teachers) if model is not None]
    of_others = {model.name: {**_model(model), **_train(model)} for model in others}
    settings = {model.name: asdict(model.training) for model in others}
    return {
        "status": "planned, not run",
        "world_size": case.world_size,
        "model": _model(case.actor),
        "train": _train(case.actor),
        "rollout": _rollout(case) if case.has_engines else None,
        "fits": outcome.fits,
        **of_others,
        **of_ranks,
        "received_over_lower_bound": outcome.received_over_lower_bound,
        "hand_over_seconds": outcome.seconds,
        **({} if traffic is None else _communicators(traffic)),
        "communicators_counted_as_memory": case.communicators,
        "phases": [_phase(phase) for phase in memory.phases],
        "kv_cache_bytes": memory.kv_cache.num_bytes,
        "kv_cache_tokens": memory.kv_cache.tokens,
        "host_bytes_per_node": {**memory.host_bytes, "total": memory.host_total_bytes},
        "problems": [asdict(problem) for problem in outcome.problems],
        "settings": {
            "training": asdict(case.training),
            "engine": asdict(case.engine),
            "machine": asdict(case.machine),
            **settings,
        },
        "notes": list(notes),
    }


def _communicators(traffic: Traffic) -> dict[str, int]:
    return {
        "communicators_max": int(traffic.num_communicators.max()),
        "communicators_in_all": traffic.num_communicators_in_all,
        "communicators_not_megatrons": traffic.num_own_groups,
        "peers_max": int(traffic.num_peers.max()),
    }


def _model(model: TrainedModel) -> dict[str, Any]:
    shape = model.shape
    return {
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "num_mtp_layers_left_out": shape.num_mtp_layers - model.training.mtp_layers,
        "num_experts": shape.experts.num_experts if shape.experts else 0,
        "published_quantization": shape.quantization,
    }


def _train(model: TrainedModel) -> dict[str, Any]:
    train = model.train
    return {
        "tp_size": train.tp_size,
        "cp_size": train.cp_size,
        "dp_size": train.dp_size,
        "pp_size": train.pp_size,
        "etp_size": train.etp_size,
        "ep_size": train.ep_size,
        "edp_size": train.edp_size,
        "layers_of_stages_and_chunks": [[list(c) for c in stage] for stage in model.layers],
    }


def _rollout(case: Case) -> dict[str, Any]:
    rollout = case.rollout
    return {
        "num_engines": rollout.num_engines,
        "tp_size": rollout.tp_size,
        "dp_size": rollout.dp_size,
        "ep_size": rollout.ep_size,
        # slot -> rank
        "rank_map": list(rollout.rank_map or case.engine_ranks or range(rollout.world_size)),
        "kv_bytes_per_token": case.kv_bytes_per_token,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    parts = {f"{name.replace(' ', '_').lower()}_bytes": size for name, size in phase.parts.items()}
    return {
        "phase": phase.name,
        "fullest_rank": phase.rank,
        "stage": phase.stage,
        **parts,
        "total_bytes": phase.total_bytes,
        "limit_bytes": phase.limit_bytes,
        "lacking_bytes": phase.lacking_bytes,
    }
