"""Imported by `--rl-import`: vLLM raises on rank 1 while it generates for the second step."""

import os

from vllm.v1.engine.llm_engine import LLMEngine

from mcore_rl.health.stage_timers import StageTimers

steps_done = 0
finish_step, engine_step = StageTimers.finish_step, LLMEngine.step


def finish_and_count(self):
    global steps_done
    steps_done += 1
    return finish_step(self)


def step_or_raise(self):
    if os.environ["RANK"] == "1" and steps_done == 1:
        raise RuntimeError("the engine's kernel found an illegal address")
    return engine_step(self)


StageTimers.finish_step = finish_and_count
LLMEngine.step = step_or_raise
