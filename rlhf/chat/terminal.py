"""`rlhf chat` in a terminal: answers appear as they are written; commands begin with a slash."""

import contextlib
import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlhf.chat.session import Session, Turn, describe, pieces
from rlhf.chat.votes import Preference
from rlhf.errors import UserError
from rlhf.streams import printable

HELP = """\
/reset       start a new dialogue
/help, /quit
l, r, t      after two answers: the left one is better, the right one, a tie"""
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
        if line == "/reset":
            self._session.reset()
            self._print("(new dialogue)")
        elif line == "/help":
            self._print(HELP)
        else:
            raise UserError(f"{line}: no such command; /help lists them")

    def _ask(self, line: str) -> None:
        if not line:
            return
        turn = self._session.ask(line)
        if len(turn.policies) == 1:
            for _, piece in pieces(turn):
                self._print(printable(piece), end="")
            self._print("")
            self._print(f"[{describe(turn, self._session.score(), 0)}]")
            return
        self._stream_both(turn)
        scores = self._session.score()
        refusal = self._session.refusal()
        if refusal:
            self._print(f"(no vote: {refusal})")
        elif (vote := self._read_vote()) is not None:
            try:
                self._session.vote(vote)
                self._print(f"(vote written to {self._session.votes})")
            except UserError as error:
                self._print(f"({error})")
        for side, name in enumerate(SIDES):
            self._print(f"{name}: {describe(turn, scores, side)}")

    def _stream_both(self, turn: Turn) -> None:
        texts = ["", ""]
        with Live(console=self._console, refresh_per_second=12) as live:
            for side, piece in pieces(turn):
                texts[side] += printable(piece)
                table = Table(*SIDES, expand=True)
                table.add_row(*map(Text, texts))
                live.update(table)

    def _read_vote(self) -> Preference | None:
        while True:
            key = self._read(VOTE).strip().lower()
            if key in ("", *VOTES):
                return VOTES.get(key)

    def _print(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end)
        sys.stdout.flush()
