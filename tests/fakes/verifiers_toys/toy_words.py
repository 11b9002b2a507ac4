"""An environment of verifiers as its users write them: guess a word, told which letters stand right."""

import verifiers as vf
from datasets import Dataset

WORDS = ("plum", "pear", "fig", "kiwi", "lime", "date")
MAX_GUESSES = 4


class Words(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1]["content"].strip()
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        marks = "".join(a if a == b else "-" for a, b in zip(guess, state["answer"], strict=False))
        state["marks"] = marks
        return [{"role": "user", "content": f"Not {guess}: {marks}"}]


def is_right(completion, answer, **kwargs) -> float:
    said = [message["content"].strip() for message in completion if message["role"] == "assistant"]
    return float(bool(said) and said[-1] == answer)


def few_guesses(completion, **kwargs) -> float:
    said = [message for message in completion if message["role"] == "assistant"]
    return 1 - (len(said) - 1) / MAX_GUESSES


def _rows(words):
    return Dataset.from_list(
        [{"question": f"Guess a fruit of {len(word)} letters.", "answer": word} for word in words]
    )


def load_environment(**kwargs):
    return Words(
        dataset=_rows(WORDS[:4]),
        eval_dataset=_rows(WORDS[4:]),
        system_prompt="Answer with one word.",
        rubric=vf.Rubric(funcs=[is_right, few_guesses], weights=[1.0, 0.2]),
        max_turns=MAX_GUESSES,
    )
