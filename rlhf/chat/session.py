"""A dialogue with one policy, or with two that answer side by side, and the votes on their answers."""

import random
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf import console
from rlhf.chat import votes
from rlhf.chat.options import NONE, ChatOptions
from rlhf.chat.responses import Generation, Measures, Models, Response, Sampling, load_models
from rlhf.chat.run_models import RunModels
from rlhf.chat.votes import Preference
from rlhf.config.options import MAX_SEED
from rlhf.errors import UserError
from rlhf.evaluation.batch_generation import check_reward_spec
from rlhf.rewards import Scoring
from rlhf.text.templates import thought_form
from rlhf.types import Message


@dataclass(slots=True)
class Turn:
    """A question and the answers to it, from left to right."""

    messages: tuple[Message, ...]
    """the dialogue before the answers"""
    policies: tuple[str, ...]
    generations: tuple[Generation, ...]
    number: int
    """of the question since the start of the program: with the seed, the key of the random numbers"""
    measures: list[Measures] = field(default_factory=list)
    """of each answer, when they are measured"""

    @property
    def responses(self) -> tuple[Response, ...]:
        """The whole answers."""
        return tuple(generation.finish() for generation in self.generations)


class Session:
    """One dialogue. Its options may change between two questions."""

    def __init__(self, models: Models, policies: Sequence[str], options: ChatOptions) -> None:
        """policies: the names of one or two of the loaded policies"""
        self.models, self.policies = models, tuple(policies)
        self.temperature, self.response_length = options.temperature, options.response_length
        self.seed = secrets.randbelow(MAX_SEED + 1) if options.seed is None else options.seed
        self.votes = Path(options.votes)
        self.blind = len(self.policies) == 2 and (options.blind or options.web)
        self._system = () if options.system is None else (Message("system", options.system),)
        self._order = random.SystemRandom()  # a seed, which may be known, must not tell the order of blind sides
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
        if self.turn is not None:
            self.go_on_with(0)
        messages = (*self.history, Message("user", text))
        order = self._order.sample(self.policies, 2) if self.blind else [*self.policies]
        sides = [(name, self._sampling(self.policies.index(name))) for name in order]
        generations = tuple(Generation(self.models, name, messages, sampling) for name, sampling in sides)
        self.turn = Turn(messages, tuple(order), generations, self._number)
        self._number += 1
        return self.turn

    def _sampling(self, stream: int) -> Sampling:
        return Sampling(self.temperature, self.response_length, (self.seed, stream, self._number))

    def measure(self) -> list[Measures]:
        """The score and KL of each answer. Raises: UserError of the score source."""
        turn = self._answered()
        if not turn.measures:
            turn.measures = [self.models.measure(response) for response in turn.responses]
        return turn.measures

    def refusal(self) -> str:
        """Why the answers cannot be voted on; an empty string if they can."""
        return votes.refusal(self._answered().responses)

    def go_on_with(self, side: int) -> bool:
        """The dialogue continues with this answer. False: it is empty, and the question is dropped too."""
        turn = self._answered()
        return self._continue(self._message(turn.responses[side]))

    def vote(self, preference: Preference) -> None:
        """Append a vote on two answers, a: the left one, b: the right one; the dialogue continues with the better one.

        Raises: UserError if there are no two answers, they must not train a reward model, or the file cannot be
        written.
        """
        turn = self._answered()
        if len(turn.policies) != 2:
            raise UserError("a vote: got one policy, expected two that answer side by side (--compare)")
        self._append(turn, (0, 1), preference, None)
        self.go_on_with(1 if preference == "b" else 0)

    def improve(self, text: str, side: int = 0) -> None:
        """Append a person's better answer, preferred to the answer of this side; the dialogue continues with it.

        Raises: UserError as of `vote`.
        """
        turn = self._answered()
        if not text.strip() or text.strip() == turn.responses[side].text.strip():
            raise UserError("a better answer: got an empty or unchanged text, expected another answer")
        self._append(turn, (side,), "a", text)
        self._continue(Message("assistant", text))

    def _append(self, turn: Turn, sides: Sequence[int], preference: Preference, edited: str | None) -> None:
        responses = [turn.responses[side] for side in sides]
        refused = votes.refusal(responses)
        if refused:
            raise UserError(f"no vote: {refused}")
        policies = [turn.policies[side] for side in sides]
        texts, names = [response.text for response in responses], [*policies]
        measures: list[Measures | None] = [turn.measures[side] if turn.measures else None for side in sides]
        if edited is not None:
            texts, names, measures = [edited, *texts], [votes.EDITED, *names], [None, *measures]
        paths = ["" if name == votes.EDITED else self.models.paths[name] for name in names]
        sampling = turn.generations[0].sampling
        details = {
            "model_a": paths[0], "model_b": paths[1], **votes.measures_columns(measures),
            "temperature": sampling.temperature, "response_length": sampling.response_length, "seed": self.seed,
            "turn": turn.number, "blind": self.blind,
        }  # fmt: skip
        row = votes.row(turn.messages, (texts[0], texts[1]), preference, (names[0], names[1]), details)
        votes.append(self.votes, row)

    def _message(self, response: Response) -> Message:
        """The response as a turn; what later prompts have of its thought is up to the template."""
        tokenizer = self.models.tokenizer
        if thought_form(str(tokenizer.chat_template)) == "none":
            return Message("assistant", response.text)
        ids = response.rollout.response_tokens()[0]
        return self.models.template.answer(ids[:-1] if response.ended else ids)

    def _continue(self, answer: Message) -> bool:
        turn = self._answered()
        self.turn = None
        if not answer.content.strip():
            return False
        self.history = (*turn.messages, answer)
        return True

    def _answered(self) -> Turn:
        if self.turn is None:
            raise UserError("got no question yet, expected one before this")
        return self.turn


def open_session(options: ChatOptions, run: RunModels) -> Session:
    """Load the models that the options name; a note says what cannot be measured. Raises: UserError."""
    names = options.compare or (options.policy or run.newest,)
    if len({*names}) < len(names):
        raise UserError(f"--compare {' '.join(names)}: got one policy twice, expected two")
    paths = {name: run.path(name) for name in names}
    reference = options.reference or run.reference(names)
    scoring = run.scoring
    if options.reward is not None:
        check_reward_spec(options.reward)
        scoring = None if options.reward == NONE else Scoring((options.reward,))
    elif scoring is None:
        console.say(f"note: {run.run} names no reward model, so answers have no score; name one with --reward")
    if reference is None:
        console.say(f"note: {run.run} names no reference, so answers have no KL; name a policy with --reference")
    models = load_models(
        paths,
        None if reference in (None, NONE) else run.path(str(reference)),
        scoring,
        options.chat_template,
        options.dtype,
    )
    return Session(models, names, options)


def pieces(turn: Turn) -> Generator[tuple[int, str], None, None]:
    """(side, piece of text) of all answers, one answer after the other."""
    for side, generation in enumerate(turn.generations):
        for piece in generation:
            yield side, piece
