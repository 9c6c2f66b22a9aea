"""`rlhf chat` in a terminal: answers appear as they are written; commands begin with a slash."""

import contextlib
import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf.chat.responses import Measures
from rlhf.chat.session import Session, Turn, pieces
from rlhf.chat.votes import Preference
from rlhf.errors import UserError
from rlhf.streams import printable

HELP = """\
/reset               start a new dialogue
/temperature NUMBER  of the sampling; 0 is greedy
/length NUMBER       maximum number of tokens of an answer
/better TEXT         write a better answer to the last question: a row for the next reward model
/help, /quit"""
VOTE = "better: l left, r right, t tie, then Enter; Enter alone is no vote> "
VOTES: dict[str, Preference] = {"l": "a", "r": "b", "t": "tie"}
SIDES = ("left", "right")


class Terminal:
    """The conversation of one person with a session."""

    def __init__(
        self, session: Session, read: Callable[[str], str] | None = None, console: Console | None = None
    ) -> None:
        """read: one line of the person, after a prompt; by default `input`"""
        self._session, self._read = session, read or input
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True)

    def run(self) -> None:
        """Until the end of the input, or /quit."""
        names = " and ".join(self._session.policies)
        self._print(f"chat with {names}; /help lists the commands, Ctrl-D ends")
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                line = self._read("> ").strip()
                if line in ("/quit", "/exit"):
                    return
                try:
                    self._obey(line) if line.startswith("/") else self._ask(line)
                except UserError as error:
                    self._print(f"error: {error}")
                except KeyboardInterrupt:  # ends the answer, not the chat
                    self._session.turn = None
                    self._print("\n(interrupted; the question is dropped)")

    def _obey(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        session = self._session
        if command == "/reset":
            session.reset()
            self._print("(new dialogue)")
        elif command == "/temperature":
            session.temperature = _number(argument, float, 0.0)
        elif command == "/length":
            session.response_length = int(_number(argument, int, 1))
        elif command == "/better":
            session.improve(argument)
            self._print(f"(row written to {session.votes})")
        elif command == "/help":
            self._print(HELP)
        else:
            raise UserError(f"{command}: no such command; /help lists them")

    def _ask(self, line: str) -> None:
        if not line:
            return
        turn = self._session.ask(line)
        if len(turn.policies) == 1:
            for _, piece in pieces(turn):
                self._print(printable(piece), end="")
            self._print("")
            self._print(_describe(turn, self._session.measure(), 0))
            return
        self._stream_both(turn)
        measures = self._session.measure()
        if not self._session.blind:
            self._print_sides(turn, measures)
        refusal = self._session.refusal()
        if refusal:
            self._print(f"(no vote: {refusal})")
        elif (vote := self._read_vote()) is not None:
            try:
                self._session.vote(vote)
                self._print(f"(vote written to {self._session.votes})")
            except UserError as error:
                self._print(f"({error})")
        if self._session.blind:
            self._print_sides(turn, measures)

    def _stream_both(self, turn: Turn) -> None:
        texts = ["", ""]
        if not self._console.is_terminal:
            last = -1
            for side, piece in pieces(turn):
                if side != last:
                    self._print(f"{'' if last < 0 else chr(10)}{self._title(turn, side)}:")
                last = side
                self._print(printable(piece), end="")
            self._print("")
            return
        with Live(console=self._console, refresh_per_second=12) as live:
            for side, piece in pieces(turn):
                texts[side] += printable(piece)
                table = Table(*(self._title(turn, side) for side in (0, 1)), expand=True)
                table.add_row(*map(Text, texts))
                live.update(table)

    def _title(self, turn: Turn, side: int) -> str:
        return SIDES[side] if self._session.blind else f"{SIDES[side]} ({turn.policies[side]})"

    def _print_sides(self, turn: Turn, measures: list[Measures]) -> None:
        for side, name in enumerate(SIDES):
            self._print(f"{name}: {_describe(turn, measures, side)}")

    def _read_vote(self) -> Preference | None:
        while True:
            key = self._read(VOTE).strip().lower()
            if key in ("", *VOTES):
                return VOTES.get(key)

    def _print(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end)
        sys.stdout.flush()


def _number(text: str, kind: Callable[[str], float], least: float) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = -1.0
    if not least <= value < float("inf"):
        raise UserError(f"got '{text}', expected a number of at least {least}")
    return value


def _describe(turn: Turn, measures: list[Measures], side: int) -> str:
    """`ppo: score 1.23, KL 4.5 nats, 31 tokens, cut`."""
    numbers, response = measures[side], turn.responses[side]
    parts = [] if numbers.score is None else [f"score {numbers.score:.3g}"]
    parts += [] if numbers.kl is None else [f"KL {numbers.kl:.3g} nats"]
    parts += [f"{response.tokens} tokens"] + ([] if response.ended else ["cut at the response length"])
    return f"[{turn.policies[side]}: {', '.join(parts)}]"
