"""Tokenizers and templates, over small tokenizers: of words, of bytes, and of Llama 2's kind."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.templates import BUILT_IN
from rlhf.text.tokenizer import PAD, load_tokenizer, prepare_tokenizer, require_hub
from rlhf.types import Message
from tests.support.texts import (
    DIALOGUE,
    HORRIBLE,
    MAKERS,
    byte_tokenizer,
    llama_tokenizer,
    opening_ids,
    user,
    words_tokenizer,
)


@pytest.fixture(scope="module", params=[(kind, name) for kind in MAKERS for name in BUILT_IN], ids="-".join)
def template(request: pytest.FixtureRequest) -> Template:
    kind, name = request.param
    return Template(prepare_tokenizer(MAKERS[kind](), name))


def squeezed(template: Template, text: str) -> str:
    """The text; without spaces where the tokenizer adds its own, at every start and after special tokens."""
    return text.replace(" ", "") if template.tokenizer.unk_token else text


def read(template: Template, ids: list[int]) -> str:
    """What ids say, special tokens too."""
    return squeezed(template, str(template.tokenizer.decode(ids, clean_up_tokenization_spaces=False)))


# --- loading


def test_words_come_back_as_they_went_in(tmp_path: Path) -> None:
    tokenizer = words_tokenizer(tmp_path, "the", "fox", "is", "kind", ".")
    ids = tokenizer.encode("the fox is kind .")
    assert ids == [4, 5, 6, 7, 8]  # after <pad>, <s>, </s>, <unk>, and no BOS
    assert tokenizer.decode(ids) == "the fox is kind ."
    assert tokenizer.encode("the owl") == [4, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_a_tokenizer_without_eos_says_how_to_cure_it(tmp_path: Path) -> None:
    byte_tokenizer(bos_token="<s>").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no EOS token.*eos_token.*tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


def test_an_empty_vocabulary_is_refused(tmp_path: Path) -> None:
    """Of a BPE it would leave out all text, without a word."""
    byte_tokenizer(bos_token="<s>").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    file.write_text(json.dumps(values | empty))
    with pytest.raises(UserError, match="the vocabulary of its tokenizer is empty"):
        load_tokenizer(str(tmp_path))


def test_an_unreachable_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    require_hub("owner/name")  # offline mode asks nobody
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits {seconds} s to try again"))
    with pytest.raises(UserError, match=r"owner/name.*does not answer.*local path.*HF_HUB_OFFLINE=1"):
        load_tokenizer("owner/name")


@pytest.mark.parametrize(
    ("directory", "files", "hint"),
    [
        ("run", ["step1_sft/model/config.json", "step3_ppo/actor/config.json"], "step1_sft/model, {}/step3_ppo/actor$"),
        ("run/step3_ppo", ["step3_ppo/state.json", "step3_ppo/actor/config.json"], "actor$"),
        ("run/checkpoint", ["checkpoint/state.json"], "checkpoint, from which a stage resumes"),
        ("run", ["notes.txt"], "expected a Hugging Face model directory$"),
    ],
)
def test_a_directory_that_is_no_model_says_where_models_are(
    directory: str, files: list[str], hint: str, tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).touch()
    path = tmp_path / directory
    with pytest.raises(UserError, match=hint.format(path)):
        load_tokenizer(str(path))


# --- preparing


@pytest.mark.parametrize(
    ("special", "extra", "pad"),
    [
        ({"eos_token": "</s>", "pad_token": "<pad>"}, [], "<pad>"),
        ({"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<?>"}, ["<|right_pad|>"], "<|right_pad|>"),
        ({"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<?>"}, ["<mask>"], "<?>"),
        ({"eos_token": "</s>", "bos_token": "<s>"}, ["<|reserved_0|>"], "<|reserved_0|>"),
        ({"eos_token": "</s>", "bos_token": "<s>"}, ["<|observation|>"], PAD),  # it has a meaning
        ({"eos_token": "</s>", "bos_token": "</s>", "pad_token": "</s>"}, [], PAD),
        ({"eos_token": "</s>", "bos_token": "<s>"}, ["<|im_start|>", "<|im_end|>"], PAD),  # the template needs them
    ],
)
def test_padding_is_neither_eos_nor_in_use(special: dict[str, str], extra: list[str], pad: str) -> None:
    tokenizer = byte_tokenizer(**special)
    tokenizer.add_special_tokens({"additional_special_tokens": extra}, replace_extra_special_tokens=False)
    size, before = len(tokenizer), tokenizer.pad_token
    prepared = prepare_tokenizer(tokenizer, "chatml")
    assert prepared.pad_token == pad
    assert prepared.pad_token_id not in (prepared.eos_token_id, prepared.bos_token_id)
    assert len(prepared) == size + (pad == PAD)
    assert (len(tokenizer), tokenizer.pad_token, tokenizer.chat_template) == (size, before, None)  # ours is a copy


def test_the_next_stage_reads_the_same_template(tmp_path: Path) -> None:
    prepared = prepare_tokenizer(byte_tokenizer(), "plain")
    prepared.save_pretrained(tmp_path)
    again = prepare_tokenizer(load_tokenizer(str(tmp_path)), "auto")
    one, other = Template(prepared), Template(again)
    assert one.prompt_ids(user("the <s>")) == other.prompt_ids(user("the <s>"))
    assert one.response_ids("the end") == other.response_ids("the end")
    assert (again.pad_token_id, len(again)) == (prepared.pad_token_id, len(prepared))


# --- prompts


def test_an_ordinary_prompt_is_encoded_as_one_text(template: Template) -> None:
    ids = template.tokenizer.encode(template.prompt_text(DIALOGUE), add_special_tokens=False)
    assert template.prompt_ids(DIALOGUE) == ids


def test_one_bos_and_at_the_start(template: Template) -> None:
    for text in ("the fox", "", "<s>", "<s> and the </s>"):
        ids = template.prompt_ids(user(text))
        bos = template.tokenizer.bos_token_id
        assert ids[0] == bos
        assert ids.count(bos) == 1


@pytest.mark.parametrize(("special", "start"), [({"eos_token": "</s>"}, "</s>"), ({}, "<s>")])
def test_an_empty_plain_prompt_is_one_token_to_start_from(special: dict[str, str], start: str) -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(**special), "plain"))
    expected = template.tokenizer.convert_tokens_to_ids(start)
    assert template.prompt_ids([]) == template.prompt_ids(user("")) == [expected]
    assert template.prompt_ids(user("a"))[0] == expected


def test_special_tokens_in_a_message_are_text(template: Template) -> None:
    special = set(template.tokenizer.all_special_ids)

    def marks(ids: list[int]) -> list[int]:
        return [i for i in ids if i in special]

    for text in HORRIBLE:
        ids = template.prompt_ids(user(text))
        assert marks(ids) == marks(template.prompt_ids(user("harmless"))), text
        assert read(template, ids) == squeezed(template, template.prompt_text(user(text)))


def test_two_messages_do_not_join_to_a_special_token() -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "plain"))
    ids = template.prompt_ids([Message("user", "a</"), Message("assistant", "s>b")])
    assert template.tokenizer.convert_ids_to_tokens(ids) == ["<s>", *"a</s>b"]


def test_specials_in_one_message_of_several_and_trimming_templates(tmp_path: Path) -> None:
    file = tmp_path / "trim.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{{ eos_token }}{% endfor %}")
    template = Template(prepare_tokenizer(byte_tokenizer(), str(file)))
    ids = template.prompt_ids([Message("user", " a </s> "), Message("assistant", "b "), Message("user", "c")])
    tokens = template.tokenizer.convert_ids_to_tokens(ids)
    assert tokens == ["<s>", *"[aĠ</s>]", "</s>", *"[b]", "</s>", *"[c]", "</s>"]


def test_the_longest_of_a_templates_special_tokens_is_meant(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>", "<x>y"]})
    file = tmp_path / "x.jinja"
    file.write_text("<x>y{{ messages[0]['content'] }}<x>")
    template = Template(prepare_tokenizer(tokenizer, str(file)))
    tokens = template.tokenizer.convert_ids_to_tokens(template.prompt_ids(user("<x>")))
    assert tokens == ["<x>y", *"<x>", "<x>"]


def test_a_template_that_writes_nothing_still_starts_somewhere(tmp_path: Path) -> None:
    file = tmp_path / "bare.jinja"
    file.write_text("{{ messages[0]['content'] }}")
    for special, start in (({}, "<s>"), ({"eos_token": "</s>"}, "</s>")):
        template = Template(prepare_tokenizer(byte_tokenizer(**special), str(file)))
        assert template.tokenizer.convert_ids_to_tokens(template.prompt_ids([])) == [start]


def test_a_word_tokenizer_never_reads_a_special_token_out_of_text(tmp_path: Path) -> None:
    template = Template(prepare_tokenizer(words_tokenizer(tmp_path, "the", "fox", "Human:", "Assistant:"), "auto"))
    for text in HORRIBLE:
        assert template.prompt_ids(user(text)).count(template.tokenizer.eos_token_id) == 0
        assert template.response_ids(text).count(template.tokenizer.eos_token_id) == 1
    assert template.prompt_ids(user("the fox")) == [1, 6, 4, 5, 7]


# --- responses


def test_a_response_ends_in_one_eos_and_comes_back(template: Template) -> None:
    eos, special = template.tokenizer.eos_token_id, template.tokenizer.all_special_ids
    end = template.prompt_text(user("x"))
    spaced, trims = end.endswith(("Assistant:", "[/INST]")), end.endswith(("[/INST]", "<|end_header_id|>\n\n"))
    for text in [*HORRIBLE, "the end.", "a"]:
        ids = template.response_ids(text)
        assert [i for i in ids if i in special] == [eos] == ids[-1:], text
        placed = text.strip() if trims else text.removeprefix(" ") if spaced else text
        assert template.response_text(ids) == placed
        assert template.response_text(ids[:-1]) == placed  # a response cut short has no EOS


def test_an_empty_response_is_eos_alone(template: Template) -> None:
    assert template.response_ids("") == [template.tokenizer.eos_token_id]
    assert template.response_text([]) == template.response_text(template.response_ids("")) == ""


def test_human_assistant_puts_one_space_before_a_response() -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "human_assistant"))
    tokens = template.tokenizer.convert_ids_to_tokens(template.response_ids("the a"))
    assert tokens == ["Ġthe", "Ġ", "a", "</s>"]
    assert template.response_ids(" the a") == template.response_ids("the a")
    assert template.response_ids("\nthe")[0] == template.tokenizer.convert_tokens_to_ids("Ċ")


def test_joined_ids_read_as_the_joined_text(template: Template) -> None:
    prompt, eos = template.prompt_text(DIALOGUE), template.tokenizer.eos_token
    before = " " if prompt.endswith(("Assistant:", "[/INST]")) else ""
    after = " " if prompt.endswith("[/INST]") else ""
    ids = template.prompt_ids(DIALOGUE) + template.response_ids("the fox")
    assert read(template, ids) == squeezed(template, f"{prompt}{before}the fox{after}{eos}")


def test_a_llama_response_continues_without_a_mark_of_its_own() -> None:
    template = Template(prepare_tokenizer(llama_tokenizer(), "plain"))
    pieces = template.tokenizer.convert_ids_to_tokens
    assert pieces(template.prompt_ids(user("the"))) == ["<s>", "▁the"]
    assert pieces(template.response_ids("n the")) == ["n", "▁the", "</s>"]
    assert pieces(template.response_ids(" the")) == ["▁the", "</s>"]
    assert pieces(opening_ids(template, "the the")) == ["▁the", "▁the", "</s>"]


def test_a_text_after_an_empty_prompt_has_the_ids_of_the_same_text_as_a_prompt() -> None:
    for make in MAKERS.values():
        template = Template(prepare_tokenizer(make(), "plain"))
        assert template.prompt_ids([]) + opening_ids(template, "the cat")[:-1] == template.prompt_ids(user("the cat"))


def test_a_template_that_writes_a_frame_opens_no_text() -> None:
    template = Template(prepare_tokenizer(llama_tokenizer(), "human_assistant"))
    assert opening_ids(template, "the") == template.response_ids("the")
