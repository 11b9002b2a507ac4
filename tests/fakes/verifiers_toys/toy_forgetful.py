"""An environment of verifiers that edits what was said: each prompt is new, but for what it tells of the answers."""

import verifiers as vf
from datasets import Dataset


class Forgetful(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on."}]

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        said = state["trajectory"][-1]["completion"][-1]["content"].upper()
        return [
            vf.UserMessage(content="Count."),
            vf.AssistantMessage(content=said.lower() + "?"),
            vf.UserMessage(content=f"You said {said}."),
        ]


def load_environment(**kwargs):
    return Forgetful(
        dataset=Dataset.from_list([{"question": "Count.", "answer": "3"}]),
        rubric=vf.Rubric(funcs=[lambda completion, **kwargs: 1.0]),
        max_turns=3,
    )
