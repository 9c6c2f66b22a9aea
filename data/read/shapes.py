"""The shapes that the columns of a record may have: FORMATS is their table, with a reader for each.

A shape is named after the columns that it requires, such as `prompt-chosen-rejected`. A format that is new is one row
of the table: docs/data.md has the same rows, and the tests read its example.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from data.read.pairs import (
    PROMPT_NAMES,
    SIDES,
    read_pair,
    read_pair_in_dialogue,
    read_pair_without_prompt,
    read_preferred,
    read_voted,
)
from data.read.rankings import RATINGS, read_ranked, read_rated, read_with_ranks
from data.read.records import Record, column_names
from data.read.singles import (
    Reader,
    read_conversation,
    read_labelled,
    read_plain_text,
    read_prompt_only,
    read_single,
)

PAIR, SINGLE, NO_RESPONSE = 2, 1, 0
"""how many responses a record of a shape has; a ranked list counts as a pair"""
LABEL = "label"

INSTRUCTION_COLUMNS = ("system", "input", "context", "history")
BESIDE_PROMPT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"instruction": INSTRUCTION_COLUMNS, "input": (), "text": ()}
)
"""optional columns beside the column of the prompt; beside all others a system message"""
OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": PROMPT_NAMES,
        "chosen": ("chosen_response", "response_chosen", "response"),
        "rejected": ("rejected_response", "response_rejected"),
        "response": ("completion", "output", "answer"),
        "ratings": ("rating",),
        LABEL: ("kto_tag",),
    }
)
"""names that other tools give to columns, which an error then maps"""
PAIRS_OR_DEMONSTRATIONS = (
    "files,prompt=COLUMN,chosen=COLUMN,rejected=COLUMN:PATH (pairs) or files,prompt=COLUMN,response=COLUMN:PATH"
)


@dataclass(frozen=True, slots=True)
class Format:
    """A row of the table: shapes that differ in the name of their first column."""

    first: tuple[str, ...]
    """names of the first column, of which a record has one"""
    following: tuple[str, ...]
    """the other columns that it must have"""
    responses: int
    """PAIR, SINGLE or NO_RESPONSE"""
    read: Reader
    meaning: str
    example: Record
    source: str
    """tools and datasets that write it"""
    optional: tuple[str, ...] = ()
    """columns that are used if the record has them, but for those of BESIDE_PROMPT"""

    @property
    def columns(self) -> str:
        return ", ".join(("/".join(self.first), *self.following))


@dataclass(frozen=True, slots=True)
class Shape:
    """A format with one name of its first column."""

    format: Format = field(hash=False)
    columns: tuple[str, ...]
    """required columns, in the order of the shape's name"""

    @property
    def name(self) -> str:
        return "-".join(self.columns)

    @property
    def responses(self) -> int:
        return self.format.responses

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns that are used if the record has them."""
        return *BESIDE_PROMPT.get(self.columns[0], ("system",)), *self.format.optional


ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}
PROMPTS = ("prompt", "instruction", "question")

PAIRS = (
    Format(
        (*PROMPTS, "conversations", "context"),
        SIDES,
        PAIR,
        read_pair,
        meaning="a preference; a list of several responses on a side gives each chosen one with each rejected one, "
        "which together weigh as one pair",
        example={"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        source="TRL, LLaMA-Factory, Axolotl, NeMo RL; Tulu 3, Intel/orca_dpo_pairs, RewardBench 2",
    ),
    Format(
        (SIDES[0],),
        SIDES[1:],
        PAIR,
        read_pair_without_prompt,
        optional=("messages",),
        meaning="a preference: two lists of messages, or two texts, whose common beginning is the prompt; or two "
        "responses to the dialogue in `messages`",
        example={"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        source="TRL, Axolotl; Skywork-Reward-Preference",
    ),
    Format(
        ("messages",),
        ("rejected_response",),
        PAIR,
        read_pair_in_dialogue,
        meaning="a preference: the dialogue ends in the chosen response",
        example={"messages": [ASK, GOOD], "rejected_response": "No."},
        source="ms-swift",
    ),
    Format(
        ("messages",),
        ("rejected_messages",),
        PAIR,
        read_pair_in_dialogue,
        meaning="a preference: two dialogues of the same prompt",
        example={"messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]},
        source="ms-swift",
    ),
    Format(
        ("input",),
        ("preferred_output", "non_preferred_output"),
        PAIR,
        read_preferred,
        meaning="a preference",
        example={"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        source="OpenAI",
    ),
    Format(
        ("prompt",),
        ("response_a", "response_b", "preference"),
        PAIR,
        read_voted,
        meaning="a preference by a person, a or b; a tie or an empty preference is dropped and counted",
        example={"prompt": "Why?", "response_a": "So.", "response_b": "No.", "preference": "a"},
        source="`rlhf pairs`",
    ),
    Format(
        ("context",),
        ("completions",),
        PAIR,
        read_with_ranks,
        meaning="several responses, each with its rank, 0 the best: all pairs of unequal rank, which together weigh as "
        "one pair in the reward model's loss",
        example={
            "context": [ASK],
            "completions": [{"rank": 0, "completion": [GOOD]}, {"rank": 1, "completion": [BAD]}],
        },
        source="NeMo RL",
    ),
    Format(
        PROMPTS,
        ("responses",),
        PAIR,
        read_ranked,
        optional=tuple(dict(RATINGS)),
        meaning="several responses, the best first, or each with a number in `scores`, `ratings` (the highest is the "
        "best) or `ranks` (the lowest): all pairs, as above; a response whose number is null is left out",
        example={"prompt": "Why?", "responses": ["No.", "So."], "scores": [1, 4.5]},
        source="Argilla",
    ),
    Format(
        PROMPTS,
        ("generations",),
        PAIR,
        read_ranked,
        optional=tuple(dict(RATINGS)),
        meaning="the same",
        example={"instruction": "Why?", "generations": ["So.", "No.", "?"], "ratings": [5, 1, None]},
        source="distilabel",
    ),
    Format(
        PROMPTS,
        ("completions",),
        PAIR,
        read_rated,
        meaning="the same, as objects with `response` and `overall_score`, `score` or `rating`",
        example={
            "instruction": "Why?",
            "completions": [{"response": "So.", "overall_score": 8}, {"response": "No.", "overall_score": 2}],
        },
        source="openbmb/UltraFeedback",
    ),
)
SINGLES = (
    Format(
        ("prompt",),
        ("completion",),
        SINGLE,
        read_single,
        meaning="a demonstration",
        example={"prompt": "Why?", "completion": "So."},
        source="TRL",
    ),
    Format(
        PROMPTS,
        ("response",),
        SINGLE,
        read_single,
        meaning="a demonstration; `input` or `context` follows an instruction",
        example={"instruction": "Why?", "context": "The sky is blue.", "response": "So."},
        source="Dolly",
    ),
    Format(
        ("instruction",),
        ("output",),
        SINGLE,
        read_single,
        meaning="a demonstration; `history` has earlier turns; a list of outputs is ranked, the best first",
        example={"instruction": "Why?", "input": "The sky is blue.", "output": "So."},
        source="Alpaca, LLaMA-Factory",
    ),
    Format(
        ("question",),
        ("answer",),
        SINGLE,
        read_single,
        meaning="a demonstration; the answer may be a number",
        example={"question": "2 + 2?", "answer": "4"},
        source="openai/gsm8k",
    ),
    Format(
        ("messages", "conversations"),
        (),
        SINGLE,
        read_conversation,
        meaning="a dialogue, {role, content} or {from, value}; where it ends in the user's turn, fine-tuning learns "
        "the last answer, and PPO responds to the whole",
        example={"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        source="TRL, OpenAI, ShareGPT, LLaMA-Factory",
    ),
)
LABELLED = tuple(
    Format(
        format.first,
        (*format.following, LABEL),
        SINGLE,
        partial(read_labelled, format.read),
        meaning="one response, good or bad: good ones are demonstrations, a good and a bad one to a prompt are a pair",
        example={**format.example, LABEL: True},
        source="KTO in TRL, Axolotl, LLaMA-Factory",
    )
    for format in SINGLES
)
FORMATS = (
    *PAIRS,
    *SINGLES,
    *LABELLED,
    Format(
        ("text",),
        (),
        NO_RESPONSE,
        read_plain_text,
        meaning="plain text; or a dialogue that is [rendered already](#from-text-to-tokens)",
        example={"text": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>"},
        source="TRL, Unsloth",
    ),
    Format(
        ("prompt",),
        (),
        NO_RESPONSE,
        read_prompt_only,
        meaning="prompts only, for PPO",
        example={"prompt": [ASK], "reward_model": {"ground_truth": "So."}},
        source="TRL, verl",
    ),
)
SHAPES = tuple(Shape(format, (column, *format.following)) for format in FORMATS for column in format.first)


def match_shape(
    columns: tuple[str, ...], name: str | None, mapped: frozenset[str]
) -> tuple[Shape, tuple[str, ...]] | str:
    """The shape of records with these columns, and the columns that it does not use; or an error message.

    name: the shape that the user chose, or None. mapped: columns that the user renamed; the shape must use all of them.
    Shapes with a pair precede those with a single response, and these precede prompts alone. Ties go to the shape that
    requires the most columns, then to the one that uses the most.
    The error is that no shape fits, that several fit, that a prompt has only one side of a pair beside it, or that
    columns have other names.
    """
    available = frozenset(columns)
    shapes = _fitting(available, name, mapped)
    if name is None and not mapped and (mapping := _mapping(available, shapes)):
        as_is = f", or to read them as they are files,shape={shapes[0].name}:PATH" if shapes else ""
        return f"got the columns {column_names(columns)}; write {mapping}{as_is}"
    if not shapes:
        expected, paths = "those of a shape of docs/data.md", PAIRS_OR_DEMONSTRATIONS
        if name is not None:
            required = name.split("-")
            expected = f"those of shape={name}: {', '.join(required)}"
            paths = f"files,{','.join(f'{column}=COLUMN' for column in required)}:PATH"
        return f"got the columns {column_names(columns)}; expected {expected}; map the columns: {paths}"
    present = available & {*SIDES}
    if name is None and len(present) == 1 and shapes[0].responses == NO_RESPONSE:
        missing = "rejected" if "chosen" in present else "chosen"
        similar = difflib.get_close_matches(missing, available - present, n=1)
        cure = f"if '{similar[0]}' is it, write files,{missing}={similar[0]}:PATH; " if similar else ""
        cure += f"if the rows are prompts only, write files,shape={shapes[0].name}:PATH"
        return f"no column '{missing}' beside '{min(present)}'; have {column_names(columns)}; {cure}"
    if len(shapes) > 1:
        names = " and ".join(shape.name for shape in shapes)
        return f"the columns fit the shapes {names}; choose one, as in files,shape={shapes[0].name}:PATH"
    used = _used(shapes[0], available)
    return shapes[0], tuple(column for column in columns if column not in used)


def _fitting(available: frozenset[str], name: str | None, mapped: frozenset[str]) -> list[Shape]:
    """The shapes that these columns may be meant by: one, unless none fits, or several fit equally well."""
    shapes = [shape for shape in SHAPES if name in (None, shape.name) and available.issuperset(shape.columns)]
    shapes = [shape for shape in shapes if mapped <= {*shape.columns, *shape.optional}]
    shapes = [shape for shape in shapes if shape.responses == max(other.responses for other in shapes)]
    shapes = [shape for shape in shapes if not any(set(shape.columns) < set(other.columns) for other in shapes)]
    used = {shape: _used(shape, available) for shape in shapes}
    return [shape for shape in shapes if not any(used[shape] < used[other] for other in shapes)]


def _used(shape: Shape, available: frozenset[str]) -> frozenset[str]:
    return available & {*shape.columns, *shape.optional}


def _mapping(available: frozenset[str], shapes: list[Shape]) -> str:
    """The data path by which columns with OTHER_NAMES say more than `shapes`, those that fit; else an empty text."""
    least = max(map(_content, shapes), default=(NO_RESPONSE, False))
    renamed = {shape: names for shape in SHAPES if _content(shape) > least and (names := _renamed(available, shape))}
    if not renamed:
        return ""

    # The prompt keeps its name where it can, because `instruction` takes an `input` along.
    def fitness(shape: Shape) -> tuple[object, ...]:
        return _content(shape), shape.columns[0] in available, len(shape.columns), -len(renamed[shape])

    best = max(renamed, key=fitness)
    if shapes and best.responses == SINGLE and LABEL not in best.columns:
        return ""  # prompts with an answer, which a reward function may read
    options = renamed[best]
    if _fitting(available - {*options.values()} | {*options}, None, frozenset(options)) != [best]:
        options = {"shape": best.name, **options}
    return f"files,{','.join(f'{option}={value}' for option, value in options.items())}:PATH"


def _content(shape: Shape) -> tuple[int, bool]:
    """What a record of the shape has: its responses, and whether one is labelled."""
    return shape.responses, LABEL in shape.columns


def _renamed(available: frozenset[str], shape: Shape) -> dict[str, str]:
    """The columns of a shape that the record has under another name, if it has all others; else nothing."""
    renamed: dict[str, str] = {}
    for column in (*shape.columns, *shape.optional):
        if column not in available:
            other = next((name for name in OTHER_NAMES.get(column, ()) if name in available), None)
            if other is not None:
                renamed[column] = other
            elif column in shape.columns:
                return {}
    return renamed
