"""Chat templates: what they write, who may write them, and the token that ends a turn."""

from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.text.dialogues import Template
from rlhf.text.templates import BUILT_IN, find_template, template_name
from rlhf.text.tokenizer import describe_template, prepare_tokenizer
from rlhf.training.checks import check_start
from rlhf.types import Message, Row
from tests.support.texts import DIALOGUE, byte_tokenizer, slow_tokenizer, user, with_chat_tokens

ALPACA = (
    "<s>Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
)  # fmt: skip
SYSTEM = [Message("system", "Be kind."), *DIALOGUE]
WRITTEN = {
    "plain": ("<s>hiyesgo on", "<s>Be kind.hiyesgo on"),
    "human_assistant": (
        "<s>\n\nHuman: hi\n\nAssistant: yes\n\nHuman: go on\n\nAssistant:",
        "<s>Be kind.\n\nHuman: hi\n\nAssistant: yes\n\nHuman: go on\n\nAssistant:",
    ),
    "chatml": (
        "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n",
        "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "yes<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama_2": (
        "<s>[INST] hi [/INST] yes </s><s>[INST] go on [/INST]",
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nhi [/INST] yes </s><s>[INST] go on [/INST]",
    ),
    "llama_3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "yes<|eot_id|><|start_header_id|>user<|end_header_id|>\n\ngo on<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "yes<|eot_id|><|start_header_id|>user<|end_header_id|>\n\ngo on<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "alpaca": (
        ALPACA + "### Instruction:\nhi\n\n### Response:\nyes</s>\n\n### Instruction:\ngo on\n\n### Response:\n",
        "<s>Be kind.\n\n### Instruction:\nhi\n\n### Response:\nyes</s>\n\n### Instruction:\ngo on\n\n### Response:\n",
    ),
}
"""what each built-in template makes of the dialogue, without and with a system message"""

HUB = sorted((Path(__file__).parent / "hub_templates").glob("*.jinja"))
"""short templates in the shapes of those that most models of the hub have"""


def prepared(tmp_path: Path, source: str) -> PreTrainedTokenizerBase:
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    return prepare_tokenizer(byte_tokenizer(), str(file))


# --- what they write


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_by_hand(name: str) -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), name))
    assert (template.prompt_text(DIALOGUE), template.prompt_text(SYSTEM)) == WRITTEN[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_need_no_bos(name: str) -> None:
    text = Template(prepare_tokenizer(byte_tokenizer(eos_token="</s>"), name)).prompt_text(DIALOGUE)
    assert text == WRITTEN[name][0].replace("<s>", "</s>" if name == "plain" else "")


@pytest.mark.parametrize(
    ("messages", "written"),
    [
        ([("system", " a ")], "<s>[INST] <<SYS>>\n a \n<</SYS>> [/INST]"),
        ([("system", "a"), ("assistant", "b")], "<s>[INST] <<SYS>>\na\n<</SYS>> [/INST] b </s>"),
        ([("system", "a"), ("system", "b"), ("user", " c ")],
         "<s>[INST] <<SYS>>\na\n<</SYS>>\n\n<<SYS>>\nb\n<</SYS>>\n\n c [/INST]"),
        ([("user", " a\n"), ("assistant", "\nb "), ("user", "c")], "<s>[INST] a [/INST] b </s><s>[INST] c [/INST]"),
        ([("assistant", "a"), ("user", "b")], "<s> a </s><s>[INST] b [/INST]"),
        ([("user", "a"), ("user", "b")], "<s>[INST] a [/INST]<s>[INST] b [/INST]"),
        ([("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")],
         "<s>[INST] a [/INST] b </s><s>[INST] <<SYS>>\nc\n<</SYS>>\n\nd [/INST]"),
    ],
)  # fmt: skip
def test_llama_2_writes_every_order_of_turns(messages: list[tuple[str, str]], written: str) -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "llama-2"))
    assert template.prompt_text([Message(*message) for message in messages]) == written


def test_llama_3_trims_as_its_reference_does() -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), "llama-3"))
    assert template.prompt_text(user("\n hi ")) == template.prompt_text(user("hi"))


def test_chatml_does_not_write_a_bos_that_opens_each_turn_anyway() -> None:
    tokenizer = byte_tokenizer(bos_token="<|im_start|>", eos_token="<|im_end|>")
    ids = Template(prepare_tokenizer(tokenizer, "chatml")).prompt_ids(user("a"))
    assert ids[0] == tokenizer.bos_token_id != ids[1]
    assert ids.count(tokenizer.bos_token_id) == 2  # the user's turn and the assistant's


# --- names and files


def test_templates_by_name_and_by_file(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    assert prepare_tokenizer(tokenizer, "auto").chat_template == BUILT_IN["human_assistant"]
    tokenizer.chat_template = "own{{ messages[0]['content'] }}"
    assert prepare_tokenizer(tokenizer, "auto").chat_template == tokenizer.chat_template
    assert Template(prepared(tmp_path, "{{ messages[0]['content'] }}!")).prompt_text(user("x")) == "x!"


def test_a_file_that_is_no_utf_8_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_bytes(b"{{ 1 }}\xff")
    with pytest.raises(UserError, match=r"chat template .*mine\.jinja: byte 7 is not UTF-8; expected a Jinja file"):
        find_template(str(path), None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_hyphen_is_an_underscore(name: str) -> None:
    text = find_template(name.replace("_", "-"), None)
    assert text == find_template(name, None)
    assert template_name(text) == name
    assert template_name(text + " ") is None


SAYS = "{% for m in messages %}\n{{ m['content'] }}\n{% endfor %}\n"


@pytest.mark.parametrize(
    "source",
    [
        "{% if thinking is defined and thinking %}!{% endif %}",
        "{{ date | default('') }}",
        "{% if tools is not undefined and not tools %}!{% endif %}",
        "{% if xml_tools or not python_tools %}{{ '!' if thinking else '?' }}{% endif %}",
        "{% generation %}{% endgeneration %}",
        "{% for i in range(9) %}{% if i %}{% break %}{% endif %}{% endfor %}",
        "{% set mine = 1 %}{{ mine }}{{ strftime_now('%Y') }}{{ messages | tojson }}",
    ],
)
def test_what_hub_templates_do_is_accepted(tmp_path: Path, source: str) -> None:
    assert "hi" in Template(prepared(tmp_path, SAYS + source)).prompt_text(DIALOGUE)


@pytest.mark.parametrize("file", HUB, ids=lambda file: file.stem)
def test_templates_of_the_hub_write_what_transformers_writes(file: Path) -> None:
    template = Template(prepare_tokenizer(byte_tokenizer(), str(file)))
    for messages in (DIALOGUE, SYSTEM):
        dicts = [{"role": message.role, "content": message.content} for message in messages]
        options = {"chat_template": file.read_text(), "add_generation_prompt": True, "tokenize": False}
        assert template.prompt_text(messages) == byte_tokenizer().apply_chat_template(dicts, **options)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch owned') }}",
        "{{ lipsum.__globals__['os'].system('touch owned') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__.open('owned', 'w') }}",
        "{{ ('{0.__class__}' | format)(messages) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(content='owned') }}",
        "{% include 'owned' %}",
        "{% import 'os' as os %}{{ os.system('touch owned') }}",
        "{% extends '../owned' %}",
        "{{ open('owned', 'w') }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"mine\.jinja"):
        prepared(tmp_path, SAYS + attack)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = SAYS + attack  # as it comes with a stranger's model
    with pytest.raises(UserError, match="auto: the chat template, line 4,"):
        prepare_tokenizer(tokenizer, "auto")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jinja"]


def test_roles_that_a_template_refuses(tmp_path: Path) -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}"
    template = Template(prepared(tmp_path, refusal + SAYS))
    with pytest.raises(UserError, match=r"roles \(system, user\): no system"):
        template.prompt_ids([Message("system", "s"), *user("x")])
    with pytest.raises(UserError, match=r"roles \(system, user\): no system"):
        template.prompt_ids_many([Row(tuple(user("x"))), Row((Message("system", "s"), *user("x")))])


# --- one end token


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("plain", "</s>"),
        ("human_assistant", "</s>"),
        ("chatml", "<|im_end|>"),
        ("llama_2", "</s>"),
        ("llama_3", "<|eot_id|>"),
        ("alpaca", "</s>"),
    ],
)
def test_the_token_that_closes_a_turn_ends_responses(tmp_path: Path, name: str, eos: str) -> None:
    tokenizer = with_chat_tokens(byte_tokenizer())
    ready = prepare_tokenizer(tokenizer, name)
    assert (ready.eos_token, tokenizer.eos_token) == (eos, "</s>")
    assert ready.pad_token not in ("</s>", eos)  # the one that was EOS may still be sampled
    assert prepare_tokenizer(byte_tokenizer(), name).eos_token == "</s>"  # there it is so much text
    ready.save_pretrained(tmp_path)
    again = prepare_tokenizer(AutoTokenizer.from_pretrained(tmp_path), "auto")
    assert describe_template(again) == describe_template(ready) == {"chat_template": BUILT_IN[name], "eos_token": eos}
    assert (again.pad_token_id, again.eos_token_id, len(again)) == (ready.pad_token_id, ready.eos_token_id, len(ready))
    ids = Template(again).response_ids(eos)
    assert ids.count(again.eos_token_id) == 1
    assert ids[-1] == again.eos_token_id


def test_an_end_token_keeps_its_ways(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])  # as Phi 3's, but not marked special
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|unused_0|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{% endfor %}"
    ready = prepare_tokenizer(tokenizer, "auto")
    assert (ready.eos_token, ready.pad_token) == ("<|end|>", "<|unused_0|>")  # the roles' tokens are in use
    assert ready.encode("<|end|>\n\na") == tokenizer.encode("<|end|>\n\na")
    assert ready.eos_token_id not in Template(ready).response_ids("<|end|>")[:-1]


def test_a_template_for_single_prompts_changes_no_end(tmp_path: Path) -> None:
    strict = "{% if messages[1] %}{{ raise_exception('one message') }}{% endif %}{{ messages[0]['content'] }}"
    assert prepared(tmp_path, strict).eos_token == "</s>"


def test_slow_tokenizers_have_one_end_too() -> None:
    template = Template(prepare_tokenizer(slow_tokenizer(), "alpaca"))
    end = template.tokenizer.eos_token_id
    assert template.prompt_ids([Message("user", "</s>"), Message("assistant", "</s>")]).count(end) == 1
    assert template.response_ids("</s>").count(end) == 1


# --- starting from another stage


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """What a stage leaves, as far as the start of the next one looks: a model with a chatml tokenizer."""
    model = tmp_path / "step1_sft/model"
    prepare_tokenizer(with_chat_tokens(byte_tokenizer()), "chatml").save_pretrained(model)
    LlamaConfig(max_position_embeddings=64).save_pretrained(model)
    for name in ("config.yaml", "metrics.jsonl"):
        (model.parent / name).touch()
    return model


@pytest.mark.parametrize("name", ["auto", "chatml"])
def test_a_stage_goes_on_with_its_own_template(stage: Path, name: str) -> None:
    check_start(str(stage), name, 64)


def test_another_template_than_the_stages_is_refused(stage: Path) -> None:
    message = r"chatml and end token <\|im_end\|>, but .* llama-3 \(end token <\|eot_id\|>\).*--chat-template auto.*"
    with pytest.raises(UserError, match=message + "--convert-template"):
        check_start(str(stage), "llama-3", 64)
    check_start(str(stage), "llama-3", 64, convert_template=True)
    (stage.parent / "config.yaml").unlink()  # a model from elsewhere may get any template
    check_start(str(stage), "llama-3", 64)


def test_another_end_token_than_the_stages_is_refused(stage: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stage)
    tokenizer.eos_token = "</s>"
    tokenizer.save_pretrained(stage)
    with pytest.raises(UserError, match=r"end token </s>, but got --chat-template chatml \(end token <\|im_end\|>\)"):
        check_start(str(stage), "chatml", 64)
    check_start(str(stage), "auto", 64)
