"""`rlhf export --at`: a policy on the straight line between its reference and the tuned one.

tests/contracts/test_trunk.py has the merged adapters.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.chain import export
from rlhf.errors import UserError
from tests.support import chat_runs, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_runs.write(tmp_path_factory.mktemp("run"))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [0.0, 0.25, 1.0, 1.5])
def test_every_weight_is_so_far_on_the_way(run: Path, tmp_path: Path, at: float) -> None:
    """Also beyond the tuned policy; the sum is in float64, of numpy."""
    assert export.main([str(run), "--merge", str(tmp_path / "out"), "--at", str(at)]) == 0
    reference, policy = weights(run / "step1_sft/model"), weights(run / "step3_ppo/actor")
    exported = weights(tmp_path / "out")
    assert {*exported} == {*policy} and any(not torch.equal(reference[name], policy[name]) for name in policy)
    for name, weight in exported.items():
        first, last = reference[name].double().numpy(), policy[name].double().numpy()
        expected = torch.from_numpy(first + at * (last - first))
        torch.testing.assert_close(weight.double(), expected, rtol=2**-22, atol=1e-7)
        if at in (0.0, 1.0):
            assert torch.equal(weight, (reference if at == 0 else policy)[name])
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_tied_weights_go_the_way_once(tmp_path: Path) -> None:
    for seed, name in enumerate(("reference", "policy")):
        torch.manual_seed(seed)
        config = tiny.config_of("llama")
        config.tie_word_embeddings = True
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tiny.tokenizer().save_pretrained(tmp_path / name)
    export.between(str(tmp_path / "reference"), str(tmp_path / "policy"), 0.25, tmp_path / "out")
    first, last, exported = (weights(tmp_path / name) for name in ("reference", "policy", "out"))
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    for name, weight in exported.items():
        torch.testing.assert_close(weight, 0.75 * first[name] + 0.25 * last[name], rtol=1e-6, atol=1e-7)


def test_what_has_no_line_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--merge", str(out), "--at", "0.5"]
    with pytest.raises(UserError, match="does not say what its policy was trained from; expected a run"):
        export.main([str(run / "base"), *words])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).touch()
    with pytest.raises(UserError, match=r"--at 0\.5: .*adapter is an adapter, expected whole models"):
        export.between(str(adapter), str(run / "base"), 0.5, out)
    assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(UserError, match="it exists, expected a new directory"):
        export.main([str(run), *words])
    assert [path.name for path in out.iterdir()] == ["mine"]
