"""The room for CPUs is used by its functions; private members of other libraries are known here, each in one file."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.test_architecture import PACKAGES, PRODUCT, PYTHON, each, imports, shown, tree

# Seen in torch 2.11 to 2.14, transformers 5.17 to 5.24, peft 0.21.2 and DeepSpeed 0.19.8. What is reached from the name
# `torch` on needs no line.
MEMBERS = {
    "torch:Tensor": "_indices _values",
    "torch:UntypedStorage": "_cdata",
    "torch.nn:Module": "_forward_hooks _parameters",
    "transformers:PreTrainedModel": "_no_split_modules _tied_weights_keys _can_set_attn_implementation _from_config",
    "transformers:PreTrainedConfig": "_attn_implementation _experts_implementation",
    "transformers:AutoModelForCausalLM": "_model_mapping",
    "transformers.integrations.peft:PeftAdapterMixin": "_hf_peft_config_loaded",
    "peft.tuners.tuners_utils:BaseTunerLayer": "_active_adapter",
    "deepspeed.runtime.zero.parameter_offload": "_register_deepspeed_module _in_forward",
    "deepspeed.runtime.zero.stage_1_and_2": "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state",
    "deepspeed.utils.mixed_precision_linkage": "_hp_mapping",
    "deepspeed.utils.groups": "_WORLD_GROUP _TENSOR_MODEL_PARALLEL_GROUP _MODEL_PARALLEL_GROUP _DATA_PARALLEL_GROUP",
}
IN_TWO_FILES = {"_forward_hooks", "torch.utils._python_dispatch"}
PRIVATE = re.compile(r"(^|\.)_[^_]")
OTHERS = ("os.", "atexit.", "self.store.")  # Python and fsspec


@each([path for path in PYTHON if not shown(path).startswith(("rlhf/kernels/", "tests/"))])
def test_kernels_are_used_by_the_functions_of_their_package(path: Path) -> None:
    for line, name in imports(path):
        assert not name.startswith("rlhf.kernels."), f"{shown(path)}:{line}: {name}; expected one of its __init__"


def private_members(path: Path) -> Iterator[str]:
    """Private modules that are imported, and attributes that the file does not define itself: from `torch` on, or the
    name alone."""
    nodes = list(ast.walk(tree(path)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in (node for node in nodes if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr)):
        chain = ast.unparse(node)
        if node.attr not in own and not re.fullmatch(r"self\.\w+", chain) and not chain.startswith(OTHERS):
            yield chain if chain.startswith("torch.") else node.attr
    yield from (name for _, name in imports(path) if PRIVATE.search(name) and name.split(".")[0] not in PACKAGES)


def test_every_private_member_is_known_and_used_in_one_file() -> None:
    files: dict[str, set[str]] = {}
    for path in (path for path in PRODUCT if not path.name.endswith("_private.py")):
        for name in private_members(path):
            files.setdefault(name, set()).add(shown(path))
    known = " ".join(MEMBERS.values()).split()
    assert not {name: files[name] for name in files if not name.startswith("torch.") and name not in known}
    assert not {name: files[name] for name in files.keys() - IN_TWO_FILES if len(files[name]) > 1}
    for name in (name for name in files if name.startswith("torch.")):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("owner", MEMBERS)
def test_the_library_still_has_a_private_member(owner: str) -> None:
    value = pkgutil.resolve_name(owner)
    for name in MEMBERS[owner].split():
        assert hasattr(value, name) or re.search(rf"\.{name}\b", inspect.getsource(value)), f"{owner} has no {name}"
