"""A token or a password among options is refused before anything is written."""

import json
from pathlib import Path

import pytest

from rlhf.config import parser
from rlhf.config.secrets import masked, refuse_secrets
from rlhf.errors import UserError
from step1_sft.config import SFTConfig

HF = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--model", HF], "--model"),
        (["--data-path", "https://me:pass@host/x.jsonl"], "--data-path"),
        (["--data-path", "x.jsonl", f"mine.py,api_key={HF}:y"], "--data-path"),
        (["--data-path", "mine.py,api_key=abcd1234"], "--data-path"),
        (["--output-dir", "runs/hf_test123"], "--output-dir"),
        (["--model", "Bearer abcdefgh1"], "--model"),
        (["--adapter", "sk-" + "a1" * 12], "--adapter"),
        (["--adapter", "glpat-" + "a1" * 12], "--adapter"),
        (["--data-path", "mine.py,token=abcd1234"], "--data-path"),
        (["--data-path", "https://host/x.jsonl?a=1&X-Amz-Signature=abcd1234"], "--data-path"),
        (["--data-path", "https://host/x.jsonl?sig=abcd1234"], "--data-path"),
    ],
)
def test_a_secret_is_no_option(argv: list[str], option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test123")
    with pytest.raises(UserError, match="environment variable") as caught:
        parser.parse(SFTConfig, argv, "sft", "")
    assert str(caught.value).startswith(f"{option}: ")
    assert not any(word in str(caught.value) for word in (HF, "test123", "pass@", "abcd"))
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps({argv[0][2:]: argv[1:] if option == "--data-path" else argv[1]}))
    with pytest.raises(UserError, match="environment variable"):
        parser.parse(SFTConfig, ["--config", str(file)], "sft", "")


VALUE = "a1B2c3D4" * 5


@pytest.mark.parametrize(
    "text",
    [
        *(f"https://host/x?{name}={VALUE}" for name in ("key", "auth", "access_key", "api_token", "token", "pwd")),
        *(f"https://host/x?a=1&{name}={VALUE}" for name in ("key", "auth", "accesskey", "sig", "private-key")),
        *(f"mine.py,a=1,{name}={VALUE}" for name in ("api_token", "auth", "auth_token", "openai_api_key")),
        *(f"mine.py,{name}={VALUE}" for name in ("client_secret", "db_password", "credentials", "Authorization")),
        f"github_pat_{VALUE}", f"sk_live_{VALUE}", f"sk-ant-api03-{VALUE}", f"nvapi-{VALUE}", f"gsk_{VALUE}",
        f"xai-{VALUE}", f"npm_{VALUE}", f"pypi-AgE{VALUE}", f"ya29.{VALUE}", f"wandb_v1_{VALUE}", f"SG.{VALUE}.{VALUE}",
        f"xapp-1-{VALUE}", "ASIAABCDEFGHIJKLMNOP", f"eyJ{VALUE}.eyJ{VALUE}.{VALUE}", "-----BEGIN RSA PRIVATE KEY-----",
    ],
)  # fmt: skip
def test_tokens_and_names_of_secrets(text: str) -> None:
    """In an address, among the options of a plug-in, and by themselves."""
    with pytest.raises(UserError, match="--x: got what looks like"):
        refuse_secrets({"x": ["a", text]}, {})
    assert masked({"x": [text]}, {}) == {"x": ["***"]}


def test_names_of_secrets_in_a_file_of_options() -> None:
    """`reward: {python: {api_key: ...}}` has the name and the value apart."""
    options = {"reward": {"python": {"api_key": "abcd1234", "key": "answer", "pad_token": "<pad>"}}}
    with pytest.raises(UserError, match=r"--reward\.python\.api-key: got what looks like"):
        refuse_secrets(options, {})
    expected = {"api_key": "***", "key": "answer", "pad_token": "<pad>"}
    assert masked(options, {}) == {"reward": {"python": expected}}


@pytest.mark.parametrize(
    "value",
    [
        "mine.py,key=answer,author=twain,pad_token=<pad>",
        "Authors/keys-and-tokens",
        "sk-learn-a-long-name",
        "opt-1.3b",
        "meta-llama/Llama-3.2-1B",
        "hf_model",
        "sk-learn",
        "runs/token",
        "x.jsonl@refs/convert/parquet",
        "1",
        "add_token=yes1",
        "signal?a=1",
    ],
)
def test_what_is_no_secret(value: str) -> None:
    specs = ["lora,r=8,target_modules=[q_proj,v_proj]", "match,pattern='#### (.+)'", "hh_rlhf:Anthropic/hh-rlhf"]
    environment = {"HF_TOKEN": "hf_test123", "TOKENIZERS_PARALLELISM": "false", "SSH_KEY": "1", "HOME": "opt-1.3b"}
    refuse_secrets({"a": {"b": [value, *specs]}}, environment)


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_APIKEY", "my_api_key_2", "SECRET", "PASSWORDS", "AWS_KEY_ID"])
def test_variables_that_are_secrets(name: str) -> None:
    with pytest.raises(UserError, match="--model: got what looks like a token"):
        refuse_secrets({"model": "models/opt-1.3b"}, {name: "models/opt-1.3b"})


@pytest.mark.parametrize("name", ["TOKENIZER_PATH", "KEYBOARD", "SSL_KEY_FILE", "TOKEN_NAME", "MONKEY"])
def test_variables_that_are_none(name: str) -> None:
    refuse_secrets({"model": "models/opt-1.3b"}, {name: "models/opt-1.3b"})
