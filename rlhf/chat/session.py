"""A dialogue with one policy, or with two that answer side by side, and the votes on their answers."""

import datetime
import random
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf import console
from rlhf.chat import votes
from rlhf.chat.options import NONE, ChatOptions
from rlhf.chat.responses import Generation, Models, Response, Sampling, load_models
from rlhf.chat.run_models import RunModels
from rlhf.chat.votes import Preference
from rlhf.config import Tree
from rlhf.config.options import MAX_SEED
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import check_reward_spec
from rlhf.text.messages import format_prompt
from rlhf.text.templates import thought_form
from rlhf.types import Message

MAX_CHARACTERS = 100_000
"""of a message; longer ones cost minutes before they prove too long for a model (20 MB: 47 s and 1.5 GB)"""


@dataclass(slots=True)
class Turn:
    """A question and the answers to it, from left to right."""

    messages: tuple[Message, ...]
    """the dialogue before the answers"""
    policies: tuple[str, ...]
    generations: tuple[Generation, ...]
    number: int
    """of the question since the start of the program: with the seed, the key of the random numbers"""
    scores: list[float | None] = field(default_factory=list)
    """of each answer, when they are scored"""

    @property
    def responses(self) -> tuple[Response, ...]:
        """The whole answers."""
        return tuple(generation.finish() for generation in self.generations)


class Session:
    """One dialogue.

    Two policies are blind: their order is random, and the front ends show names and scores after the vote.
    """

    def __init__(self, models: Models, policies: Sequence[str], options: ChatOptions) -> None:
        """policies: the names of one or two of the loaded policies"""
        self.models, self.policies = models, tuple(policies)
        self._options = options
        self.seed = secrets.randbelow(MAX_SEED + 1) if options.seed is None else options.seed
        self.votes = Path(options.votes)
        self._system = () if options.system is None else (Message("system", options.system),)
        self._order = random.SystemRandom()  # a seed, which may be known, must not tell who is on the left
        self._number = 0
        self.history: tuple[Message, ...] = self._system
        self.turn: Turn | None = None

    def reset(self) -> None:
        """Start a new dialogue."""
        self.history, self.turn = self._system, None

    def ask(self, text: str) -> Turn:
        """A question to all policies. The answers are sampled when they are iterated over, one after the other.

        Raises: UserError for an empty text, or a dialogue that is too long.
        """
        if not text.strip():
            raise UserError("got an empty message, expected text")
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"got a message of {len(text):,} characters, expected at most {MAX_CHARACTERS:,}")
        if self.turn is not None:
            self.go_on_with(0)
        messages = (*self.history, Message("user", text))
        order = self._order.sample(self.policies, len(self.policies))
        sides = [(name, self._sampling(self.policies.index(name))) for name in order]
        generations = tuple(Generation(self.models, name, messages, sampling) for name, sampling in sides)
        self.turn = Turn(messages, tuple(order), generations, self._number)
        self._number += 1
        return self.turn

    def _sampling(self, stream: int) -> Sampling:
        return Sampling(self._options.temperature, self._options.response_length, (self.seed, stream, self._number))

    def score(self) -> list[float | None]:
        """The score of each answer. Raises: UserError of the score source."""
        turn = self._answered()
        turn.scores = turn.scores or [self.models.score(response) for response in turn.responses]
        return turn.scores

    def refusal(self) -> str:
        """Why the answers cannot be voted on; an empty string if they can."""
        return votes.refusal(self._answered().responses)

    def go_on_with(self, side: int) -> None:
        """The dialogue continues with this answer. If it is empty, the question is dropped too."""
        turn = self._answered()
        answer, self.turn = self._message(turn.responses[side]), None
        if answer.content.strip():
            self.history = (*turn.messages, answer)

    def vote(self, preference: Preference) -> None:
        """Append a vote on two answers, a: the left one, b: the right one; the dialogue continues with the better one.

        Raises: UserError if the answers must not train a reward model, or the file cannot be
        written.
        """
        turn = self._answered()
        if refused := self.refusal():
            raise UserError(f"no vote: {refused}")
        votes.append(self.votes, self._row(turn, preference))
        self.go_on_with(1 if preference == "b" else 0)

    def _row(self, turn: Turn, preference: Preference) -> Tree:
        """A row of preferences. The columns after `preference` are for people; training does not use them."""
        texts = {f"response_{side}": response.text for side, response in zip("ab", turn.responses, strict=True)}
        policies: Tree = {}
        for side, policy, score in zip("ab", turn.policies, turn.scores or (None, None), strict=True):
            policies |= {f"policy_{side}": policy, f"model_{side}": self.models.paths[policy], f"score_{side}": score}
        sampling = turn.generations[0].sampling
        return {
            "prompt": format_prompt(turn.messages), **texts, "preference": preference, **policies,
            "temperature": sampling.temperature, "response_length": sampling.response_length, "seed": self.seed,
            "turn": turn.number, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }  # fmt: skip

    def _message(self, response: Response) -> Message:
        """The response as a turn; what later prompts have of its thought is up to the template."""
        tokenizer = self.models.tokenizer
        if thought_form(str(tokenizer.chat_template)) == "none":
            return Message("assistant", response.text)
        prompt = self.models.template.prompt_text(response.rollout.rows[0].prompt)
        return self.models.template.answer(response.rollout.tokens_before_end()[0], prompt)

    def _answered(self) -> Turn:
        if self.turn is None:
            raise UserError("got no question yet, expected one before this")
        return self.turn


def open_session(options: ChatOptions, run: RunModels) -> Session:
    """Load the models that the options name; a note says if answers have no score. Raises: UserError."""
    names = options.compare or (options.policy or run.newest,)
    paths = {name: run.path(name) for name in names}
    reward = run.reward
    if options.reward is not None:
        check_reward_spec(options.reward)
        reward = None if options.reward == NONE else options.reward
    elif reward is None:
        console.say(f"note: {run.run} has no reward model, so answers are not scored; --reward names one")
    return Session(load_models(paths, reward, options.chat_template, options.dtype), names, options)


def pieces(turn: Turn) -> Generator[tuple[int, str], None, None]:
    """(side, piece of text) of all answers, one answer after the other."""
    for side, generation in enumerate(turn.generations):
        for piece in generation:
            yield side, piece


def describe(turn: Turn, scores: Sequence[float | None], side: int) -> str:
    """`ppo, score 1.23, 31 tokens, cut at the response length`."""
    response, score = turn.responses[side], scores[side]
    parts = [turn.policies[side], *([] if score is None else [f"score {score:.3g}"]), f"{response.tokens} tokens"]
    return ", ".join(parts + ([] if response.ended else ["cut at the response length"]))
