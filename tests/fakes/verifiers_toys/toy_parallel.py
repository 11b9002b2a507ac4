"""An environment of verifiers that asks the model several things at the same time, as those with judges or helpers do."""

import asyncio

import verifiers as vf
from datasets import Dataset


class Parallel(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        asked = [[vf.UserMessage(content=f"Which is it, {which}?")] for which in "ab"]
        told = await asyncio.gather(*(self.get_model_response(state, one) for one in asked))
        said = " or ".join(each.message.content for each in told)
        state["final_env_response"] = [{"role": "user", "content": said}]
        return state["final_env_response"]


def load_environment(**kwargs):
    return Parallel(
        dataset=Dataset.from_list([{"question": "Count.", "answer": "3"}]),
        rubric=vf.Rubric(funcs=[lambda completion, **kwargs: 1.0]),
        max_turns=3,
    )
