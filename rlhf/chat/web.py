"""`rlhf chat --web`: a page on 127.0.0.1, made with Gradio. One dialogue for each open page.

With two policies, names and scores are shown after the vote.
"""

import contextlib
import html
import os
import re
from collections.abc import Callable, Iterator

import gradio as gr
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf import console
from rlhf.chat.options import ChatOptions
from rlhf.chat.session import Session, Turn, describe, pieces
from rlhf.chat.votes import Preference
from rlhf.errors import UserError
from rlhf.types import Message

HOSTS = ["127.0.0.1", "localhost"]
"""names under which a browser may open the page: a foreign site's name that leads here (DNS rebinding) is refused.
Gradio does not do that; it only keeps a foreign site's page from asking this one."""
FONTS = ["system-ui", "sans-serif"]
"""the page loads nothing from elsewhere"""
MAX_BODY = 2**20
"""bytes of a request: a message and what Gradio adds are far shorter"""
SIDES = ("left", "right")
STYLE = """
.dialogue { height: 56vh !important; }
@media (max-width: 640px) { .dialogue { height: calc(54vh / var(--dialogues)) !important; } h1 { font-size: 1.1rem; } }
"""
"""on a phone too, all dialogues and the message box below them fit on the screen"""
Messages = list[dict[str, str]]


def shown(history: tuple[Message, ...], *answer: str) -> Messages:
    """A dialogue, and an answer that is still being written, as Gradio shows it."""
    messages = [(m.role, m.content) for m in history if m.role != "system"]
    messages += [("assistant", text) for text in answer]
    return [{"role": role, "content": as_html(text)} for role, text in messages]


def as_html(text: str) -> str:
    """HTML that shows the text as it is. Gradio shows the HTML in a message even with `render_markdown=False`, and
    removes the indentation of lines."""
    return re.sub(" (?= )", "&nbsp;", html.escape(text)).replace("\n", "<br>")


class Page:
    """The handlers of the page's events: each gets the session of its page, and returns the dialogue of each side, for
    `ask` the input, the status, and whether the row of votes is shown."""

    def __init__(self, session: Session, options: ChatOptions) -> None:
        self._session, self._options = session, options
        self.sides = len(session.policies)

    def open(self) -> Session:
        """The session of a page that was just opened; all share the models."""
        return Session(self._session.models, self._session.policies, self._options)

    def ask(self, session: Session, text: str) -> Iterator[list[object]]:
        """The answers as they are written."""
        try:
            turn = session.ask(text)
        except UserError as error:
            yield [*self._sides(session), text, f"error: {error}", _votes(False)]
            return
        answers = [""] * self.sides
        for side, piece in pieces(turn):
            answers[side] += piece
            yield [*(shown(turn.messages, answer) for answer in answers), "", "writing ...", _votes(False)]
        if session.turn is not turn:  # the person has started a new dialogue meanwhile
            return
        try:
            session.score()
        except UserError as error:
            yield [*self._sides(session), "", f"error: {error}", _votes(False)]
            return
        refusal = session.refusal() if self.sides == 2 else ""
        status = "which answer is better?" if self.sides == 2 else _names(turn)
        status = f"no vote: {refusal}. {_names(turn)}" if refusal else status
        yield [*_answers(turn), "", status, _votes(self.sides == 2 and not refusal)]

    def vote(self, preference: Preference) -> Callable[[Session], list[object]]:
        def handle(session: Session) -> list[object]:
            turn = session.turn
            try:
                session.vote(preference)
            except UserError as error:
                return [*self._sides(session), f"{error}", _votes(False)]
            assert turn is not None
            written = f"vote written to {session.votes}. {_names(turn)}"
            return [*_answers(turn), written, _votes(False)]

        return handle

    def reset(self, session: Session) -> list[object]:
        session.reset()
        return [*self._sides(session), "new dialogue", _votes(False)]

    def _sides(self, session: Session) -> list[Messages]:
        turn = session.turn
        if turn is None or any(generation.response is None for generation in turn.generations):
            return [shown(session.history)] * self.sides
        return _answers(turn)


def _votes(shown: bool) -> object:
    """The row of votes: whether it is shown."""
    return gr.update(visible=shown)


def _answers(turn: Turn) -> list[Messages]:
    """The dialogue of each side with its own answer."""
    return [shown(turn.messages, response.text) for response in turn.responses]


def _names(turn: Turn) -> str:
    """`left: ppo, score 1.2, 31 tokens. right: ...`"""
    sides = [describe(turn, turn.scores or (None, None), side) for side in range(len(turn.policies))]
    return sides[0] if len(sides) == 1 else f"left: {sides[0]}. right: {sides[1]}"


def build(session: Session, options: ChatOptions) -> gr.Blocks:
    """The page."""
    page = Page(session, options)
    with gr.Blocks(title="rlhf chat", analytics_enabled=False) as blocks:
        state = gr.State()
        title = "Which answer is better? Names are shown after the vote." if page.sides == 2 else session.policies[0]
        gr.HTML(f"<style>:root {{ --dialogues: {page.sides}; }}</style><h1>{html.escape(title)}</h1>", padding=False)
        with gr.Row():
            labels = SIDES if page.sides == 2 else session.policies
            plain = {"render_markdown": False, "latex_delimiters": [], "buttons": [], "feedback_options": None}
            plain |= {"elem_classes": "dialogue"}
            chats = [gr.Chatbot(label=label, elem_id=f"chat-{i}", **plain) for i, label in enumerate(labels)]
        message = gr.Textbox(label="Message", elem_id="message", autofocus=True, submit_btn="Send", interactive=False)
        status = gr.Textbox(label="Status", elem_id="status", interactive=False)
        with gr.Row(visible=False, elem_id="votes") as votes:
            for preference, text in (("a", "Left is better"), ("tie", "Tie"), ("b", "Right is better")):
                button = gr.Button(text, elem_id=f"vote-{preference}", variant="primary")
                button.click(page.vote(preference), [state], [*chats, status, votes])  # type: ignore[arg-type]
        new = gr.Button("New dialogue", elem_id="new")
        message.submit(page.ask, [state, message], [*chats, message, status, votes])
        for clear in (new.click, *(chat.clear for chat in chats)):
            clear(page.reset, [state], [*chats, status, votes])
        # Until then a message would have no session.
        blocks.load(page.open, None, [state]).then(lambda: gr.update(interactive=True), None, [message])
    return blocks


class Limits:
    """Refuses long requests, and files: the page has no use for them, and Gradio would store any number."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        answer: ASGIApp = self.app
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            answer = PlainTextResponse("the page takes no files", 403)
        elif "transfer-encoding" in headers or int(headers.get("content-length", 0)) > MAX_BODY:
            answer = PlainTextResponse(f"expected a request of known length, at most {MAX_BODY} bytes", 413)
        await answer(scope, receive, send)


def launch(session: Session, options: ChatOptions) -> tuple[gr.Blocks, str]:
    """Start the page in the background. Returns (it, its URL). Raises: UserError if the port is in use."""
    blocks = build(session, options)
    theme = gr.themes.Default(font=FONTS, font_mono=["monospace"])
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS), Middleware(Limits)]
    no_proxy = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), *HOSTS]
    os.environ |= dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, no_proxy)))  # Gradio asks its own page
    try:
        _, url, _ = blocks.launch(
            server_name=HOSTS[0],
            server_port=options.port or None,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            footer_links=[],
            ssr_mode=False,
            theme=theme,
            css=STYLE,
            app_kwargs={"middleware": middleware},
        )
    except OSError as error:
        raise UserError(f"--port {options.port}: cannot listen there ({error}); choose another --port") from None
    return blocks, url


def serve_page(session: Session, options: ChatOptions) -> None:
    """Serve the page until Ctrl-C. Raises: UserError."""
    blocks, url = launch(session, options)
    console.say(f"chat with {' and '.join(session.policies)} at {url}; votes go to {session.votes}; Ctrl-C ends")
    with contextlib.suppress(KeyboardInterrupt):
        blocks.block_thread()
    blocks.close()
