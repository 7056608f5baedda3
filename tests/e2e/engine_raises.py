"""Imported by `--rl-import`: vLLM raises on rank 1 while it generates for the second step."""

import os


def raise_in_the_second_step():
    from vllm.v1.engine.llm_engine import LLMEngine

    from mcore_rl.observe.stage_timers import StageTimers

    finish_step, engine_step, steps = StageTimers.finish_step, LLMEngine.step, []

    def finish_and_count(self):
        steps.append(None)
        return finish_step(self)

    def step_or_raise(self):
        if os.environ["RANK"] == "1" and len(steps) == 1:
            raise RuntimeError("the engine's kernel found an illegal address")
        return engine_step(self)

    StageTimers.finish_step = finish_and_count
    LLMEngine.step = step_or_raise


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    raise_in_the_second_step()
