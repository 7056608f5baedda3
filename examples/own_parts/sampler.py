"""--rl-import examples/own_parts/sampler.py --rl-sampler forks --rl-fork-at 16"""

from dataclasses import dataclass

from mcore_rl.api import Generate, Parameters, Sampled, SamplerInputs, param, sampler


@dataclass(frozen=True)
class Fork(Parameters):
    fork_at: int = param(16, "tokens that two responses have in common", above=0)


@sampler("forks", Fork())
def forks(inputs: SamplerInputs, config: Fork):
    """Sample pairs of responses that have their first tokens in common."""
    prompt, count = inputs.prompt.token_ids, (inputs.num_samples + 1) // 2
    stems = yield [Generate(prompt, min(config.fork_at, inputs.max_tokens - 1))] * count
    twice = [stem for stem in stems if stem.finish_reason == "length" for _ in range(2)]
    ends = (yield [Generate([*prompt, *stem.token_ids]) for stem in twice]) if twice else []
    responses = []
    for stem in stems:
        for _ in range(2):
            rest = ends.pop(0) if stem.finish_reason == "length" else None
            tokens = [*stem.token_ids, *([] if rest is None else rest.token_ids)]
            log_probs = [*stem.log_probs, *([] if rest is None else rest.log_probs)]
            reason = "stop" if rest is None else rest.finish_reason
            responses.append(Sampled(tokens, log_probs, finish_reason=reason))
    return responses[: inputs.num_samples]
