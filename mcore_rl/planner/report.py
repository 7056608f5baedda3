"""Printed plan: tables in a terminal, plain text if the output is piped."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from mcore_rl.model.roles import ACTOR, CRITIC
from mcore_rl.planner.comparison import Comparison, shown_rate
from mcore_rl.planner.links import Traffic
from mcore_rl.planner.models import stage_parameters
from mcore_rl.planner.phases import BUCKETS, GRAPHS, NCCL, Phase
from mcore_rl.planner.plan import Outcome
from mcore_rl.planner.search import CRITERIA, Found
from mcore_rl.planner.settings import GB, MB, MIB
from mcore_rl.planner.step_seconds import HOST_RATE, Step

_PLAIN_WIDTH = 100
# Order of the columns; a phase has some of them.
_PARTS = (
    *("weights", "gradients", "optimizer", "activations"),
    *("rollout weights", "bucket", "KV cache", GRAPHS, NCCL),
)
_HEADINGS = {
    **{"gradients": "grads", "optimizer": "optim", "activations": "activ"},
    GRAPHS: "CUDA graph",
}
# Heading of a row -> name in `Outcome.rank_bytes`.
_TRAFFIC = {
    "received": "received",
    "  from its own node": "received_own_node",
    "  from other nodes": "received_other_nodes",
    "sent": "sent",
    "  to its own node": "sent_own_node",
    "  to other nodes": "sent_other_nodes",
    "lower bound of received": "lower_bound",
    "resident for rollout": "resident",
    "received by a gather of all": "gather_export_received",
}
_SEARCH_COLUMNS = (
    *("seconds", "train", "comm.", "switch", "rollout"),
    *("GB recv.", "peak GB", "KV tok."),
)
_SIMULATION_COLUMNS = (
    *("samples/s", "per rank", "tokens/s", "step s"),
    *("trainers\nidle", "engines\nidle", "staleness\nmean, max"),
)
_SHOWN_RANKS = 24


def make_console() -> Console:
    """Return a console as wide as the terminal, or of a fixed width without a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def print_plan(outcome: Outcome, notes: Sequence[str], console: Console) -> None:
    """Print the complete plan of one case."""
    console.print("[bold]PLANNED, NOT RUN[/]")
    _print_layouts(outcome, console)
    if outcome.traffic is not None:
        console.print("\n[bold]hand-over[/]")
        console.print(_traffic_table(outcome, console))
        _print_traffic_facts(outcome, outcome.traffic, console)
    console.print("\n[bold]memory of the fullest rank, GB[/]")
    console.print(_memory_table(outcome, console))
    _print_memory_facts(outcome, console)
    for note in notes:
        console.print(f"note: {note}")
    _print_problems(outcome, console)


def _print_layouts(outcome: Outcome, console: Console) -> None:
    case = outcome.case
    console.print(f"model    {case.shape.architecture}, {case.shape.num_layers} layers")
    console.print(f"train    {case.actor.describe()}")
    if case.critic is not None:
        console.print(f"critic   {case.critic.describe()}")
    for teacher in case.teachers:
        swapped = "; swapped into the actor's model" if case.is_swapped(teacher) else ""
        console.print(f"teacher  {teacher.describe()}{swapped}")
    if case.has_servers:
        console.print("rollout  servers, which the job does not start; all ranks train")
        return
    if not case.has_engines:
        console.print("rollout  none: rows of a file are learned from, without engines")
        return
    rollout = case.rollout
    dp = f" x DP{rollout.dp_size}" if rollout.dp_size > 1 else ""
    console.print(
        f"rollout  {rollout.num_engines} engines of TP{rollout.tp_size}{dp}, EP{rollout.ep_size}"
    )
    console.print(f"ranks    {_rank_map(outcome)}")


def _rank_map(outcome: Outcome) -> str:
    """Describe which rank takes which slot."""
    case, rollout = outcome.case, outcome.case.rollout
    if case.is_separate:
        first, last = min(case.engine_ranks), max(case.engine_ranks)
        return f"engines have {len(case.engine_ranks)} ranks of their own, from {first} to {last}"
    if rollout.is_identity:
        return "every rank takes the slot of its number (the identity)"
    ranks = ",".join(map(str, rollout.rank_map[:_SHOWN_RANKS]))
    more = ",... (all of them with --json)" if rollout.world_size > _SHOWN_RANKS else ""
    return f"slots 0, 1, ... are taken by ranks {ranks}{more}"


def _table(console: Console, *columns: str) -> Table:
    style = box.SIMPLE_HEAD if console.is_terminal else None
    table = Table(box=style, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f}"


def _traffic_table(outcome: Outcome, console: Console) -> Table:
    table = _table(console, "GB of a rank", "max", "mean")
    rank_bytes = outcome.rank_bytes
    for heading, name in _TRAFFIC.items():
        table.add_row(heading, _gb(rank_bytes[name].max()), _gb(rank_bytes[name].mean()))
    return table


def _print_traffic_facts(outcome: Outcome, traffic: Traffic, console: Console) -> None:
    machine = outcome.case.machine
    console.print(
        f"received / lower bound {outcome.received_over_lower_bound:.2f}; {outcome.seconds:.3f} s "
        f"at {machine.own_node_rate / GB:g} GB/s within a node of {machine.ranks_per_node} and "
        f"{machine.other_nodes_rate / GB:g} GB/s between nodes, per rank"
    )
    if (adapters := outcome.adapters) is not None:
        console.print(
            "all hand-overs but the first bring adapters alone, of which a rank receives "
            f"{adapters.received.max():,} bytes at most and {adapters.received.mean():,.0f} in the "
            f"mean; lower bound: {adapters.lower_bound.max():,} at most"
        )
    console.print(
        f"communicators of the hand-over: {traffic.num_communicators.max()} on a rank, "
        f"{traffic.num_communicators_in_all} in all, {traffic.num_own_groups} of them not "
        f"Megatron's own; at most {traffic.num_peers.max()} peers of a rank point to point"
    )


def _memory_table(outcome: Outcome, console: Console) -> Table:
    phases = outcome.memory.phases
    others = (CRITIC, *(teacher.name for teacher in outcome.case.teachers))
    names = {part: {part, *(f"{other} {part}" for other in others)} for part in _PARTS}
    used = [p for p in _PARTS if any(names[p] & phase.parts.keys() for phase in phases)]
    headings = [_HEADINGS.get(part, part).replace(" ", "\n") for part in used]
    table = _table(console, "phase", "rank", *headings, "total", "limit")
    for phase in phases:
        style = "red" if phase.lacking_bytes else None
        sizes = _cells(phase, used, absent="-")
        total, limit = _gb(phase.total_bytes), _gb(phase.limit_bytes)
        table.add_row(phase.name, str(phase.rank), *sizes, total, limit, style=style)
        for other in others:
            theirs = _cells(phase, [f"{other} {part}" for part in used], absent="")
            if any(theirs):
                table.add_row(f"  {other}'s", "", *theirs, "", "", style=style)
    return table


def _cells(phase: Phase, parts: Sequence[str], *, absent: str) -> list[str]:
    return [_gb(phase.parts[part]) if part in phase.parts else absent for part in parts]


def print_seconds(outcome: Outcome, step: Step, console: Console) -> None:
    """Print what a step's time goes into, and the assumption behind each part."""
    case, of = outcome.case, outcome.seconds_of_step(step)
    products = 8 if case.training.recompute.granularity == "full" else 6
    rows = {
        "update": (
            of.compute,
            f"{products} x active parameters x tokens, {step.flops / 1e12:g} TFLOP/s of a device",
        ),
        "communication": (of.communication, "TP and EP, without overlap"),
    }
    if case.has_engines:
        machine, tokens = case.machine, case.engine.max_response_tokens
        rates = f"{machine.own_node_rate / GB:g} and {machine.other_nodes_rate / GB:g} GB/s"
        rows |= {
            "decoding": (
                of.rollout,
                f"{tokens:,} tokens, {step.memory_rate / GB:g} GB/s of a device's memory",
            ),
            "hand-over": (of.hand_over, f"{rates} of a rank, within and between nodes"),
            "offload": (of.offload, f"{HOST_RATE / GB:g} GB/s of a rank, out and back"),
        }
    table = _table(console, "all samples at full length", "s", "share")
    table.add_column("assumes")
    for name, (seconds, assumed) in rows.items():
        share = f"{seconds / of.total:.0%}" if of.total else "-"
        table.add_row(name, f"{seconds:.2f}", share, assumed)
    console.print("\n[bold]seconds of a step, by formula[/]")
    console.print(table)


def _print_memory_facts(outcome: Outcome, console: Console) -> None:
    case = outcome.case
    machine, engine = case.machine, case.engine
    if case.has_engines:
        _print_engine_facts(outcome, console)
    for model in case.models:
        training = model.training
        console.print(
            f"{'train' if model.name == ACTOR else model.name}: {training.num_micro_batches} "
            f"micro-batches of {training.describe_micro_batch()}, recomputation "
            f"{training.recompute.describe()}"
        )
        if training.num_demonstration_micro_batches:
            console.print(
                f"demonstrations: {training.num_demonstration_micro_batches} micro-batches "
                "more, taken as full"
            )
        if training.lora_rank:
            most = max(parameters.trained for parameters in stage_parameters(model))
            console.print(
                f"LoRA of rank {training.lora_rank}: {most:,} parameters are trained on the "
                "fullest rank; activations include one layer's merged weights and their gradients"
            )
    host = outcome.memory
    parts = "; ".join(f"{name} {_gb(size)}" for name, size in host.host_bytes.items()) or "nothing"
    console.print(
        f"host memory of a node, GB: {parts}; total {_gb(host.host_total_bytes)} of "
        f"{_gb(machine.host_bytes)}"
    )
    console.print(
        f"limit: {machine.gpu_bytes / GB:g} GB less {machine.reserved_bytes / GB:g} GB reserved; "
        f"bucket: {BUCKETS} x {engine.bucket_bytes / MIB:g} MiB. Exact: weights, gradients, "
        "optimizer, rollout weights, hand-over. By formula: activations. Assumed: "
        f"{engine.graph_bytes / GB:g} GB of CUDA graphs."
    )
    _print_communicators(outcome, console)


def _print_engine_facts(outcome: Outcome, console: Console) -> None:
    case, kv_cache = outcome.case, outcome.memory.kv_cache
    engine = case.engine
    samples = kv_cache.tokens / engine.max_model_tokens
    console.print(
        f"KV cache {kv_cache.tokens:,} tokens on a rank: {samples:.1f} sequences of "
        f"{engine.max_model_tokens:,}; the engine's share is {_gb(case.share_bytes)} GB "
        f"(--rl-rollout-gpu-memory-utilization {engine.gpu_memory_utilization:g})"
    )
    if not case.is_separate:
        _print_offloaded(outcome, console)
    console.print("mcore_rl.verify runs the phases build, start, first switch, rollout, log-probs")


def _print_communicators(outcome: Outcome, console: Console) -> None:
    case = outcome.case
    counts = case.communicators
    if case.machine.communicator_bytes and any(counts.values()):
        whose = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
        most = sum(counts.values())
        if case.is_separate:  # a rank has those of one side
            most -= min(counts["Megatron"], counts["engine"])
        console.print(
            f"NCCL: up to {most} communicators of a rank ({whose}), each taken as "
            f"{case.machine.communicator_bytes / MB:g} MB: an assumption, --communicator-mb"
        )


def _print_offloaded(outcome: Outcome, console: Console) -> None:
    engine = outcome.case.engine
    away, at_start = (
        ", ".join(sorted(kinds)) or "nothing" for kinds in (engine.offloaded, engine.away_at_start)
    )
    console.print(f"off the device during rollout: {away}; while engines start: {at_start}")


def _print_problems(outcome: Outcome, console: Console) -> None:
    if outcome.fits:
        console.print("[green]fits[/]")
        return
    for problem in outcome.problems:
        console.print(
            f"[red]does not fit[/]: {problem.where} lacks {_gb(problem.lacking_bytes)} GB"
        )
        for remedy in problem.remedies:
            left = remedy.lacking_bytes
            then = f"lacks {_gb(left)} GB" if left else "fits"
            console.print(f"  with {remedy.flags}: {then}")
        if not problem.remedies:
            console.print("  no single flag helps: take more GPUs, or try --search")


def print_search(result: Found, console: Console) -> None:
    """Print the best layouts of a search."""
    console.print("\n[bold]layouts that fit, best first[/]")
    table = _table(console, "train", "rollout", *_SEARCH_COLUMNS)
    for candidate in result.candidates:
        of = candidate.seconds
        seconds = (of.total, of.compute, of.communication, of.hand_over + of.offload, of.rollout)
        table.add_row(
            candidate.train_name,
            candidate.rollout_name,
            *(f"{value:.1f}" for value in seconds),
            _gb(candidate.received_bytes_max),
            _gb(candidate.peak_bytes),
            f"{candidate.kv_cache_tokens:,}",
        )
    console.print(table)
    console.print(f"{result.num_tried} layouts tried, {result.num_fitting} fit")
    console.print(CRITERIA)
    if result.candidates:
        console.print(f"flags of the best: {result.candidates[0].flags}")


def print_comparison(comparison: Comparison, notes: Sequence[str], console: Console) -> None:
    """Print the simulated ways to use the ranks, and the one to take."""
    console.print("\n[bold]SIMULATED[/]")
    table = _table(console, "trainers + engine ranks", *_SIMULATION_COLUMNS)
    for row in comparison.rows:
        table.add_row(
            row.candidate.short_name,
            shown_rate(row.samples_per_second),
            shown_rate(row.samples_per_second_and_rank),
            *(f"{row.tokens_per_second:,.0f}", f"{row.step_seconds:.1f}"),
            *(f"{row.trainer_idle:.0%}", f"{row.engine_idle:.0%}"),
            f"{row.staleness_mean:.2f}, {row.staleness_max}",
        )
    if comparison.rows:
        console.print(table)
    for left_out in comparison.left_out:
        console.print(f"left out: {left_out}")
    for note in notes:
        console.print(f"note: {note}")
    console.print(comparison.recommendation)
