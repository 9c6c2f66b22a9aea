"""One frozen base model for several roles: policy, reference, critic and reward model are adapters on it.

A role is a named adapter of peft, and for a scalar model a head. A pass of a role activates its adapter, which then
stays active until a pass of another role begins. So the backward pass of a role, which may compute its layers again
(gradient checkpointing), must come before that.
"""

from collections.abc import Iterator
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from rlhf.models import adapter_files, packing
from rlhf.models.head import ScoreHead
from rlhf.models.policy import ActorCritic, Policy
from rlhf.models.scalar import ScalarModel


class Trunk:
    """A language model whose own weights are frozen, and the adapters on it by role."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm.requires_grad_(False)
        if packing.packs(lm, 1):  # scalar models call the model without its head
            packing.detect_support(self.backbone, unsharded=True)
        self._layers: list[Any] = []
        self.active = ""

    @property
    def backbone(self) -> Any:
        """The same model without its head."""
        return self.lm.base_model

    def load(self, role: str, path: str) -> None:
        """Add the adapter in a directory as `role`. Raises: UserError if it does not fit the model."""
        adapter_files.load(self.lm, role, path)
        self._added()

    def create(self, role: str, options: "adapter_files.PeftConfig") -> None:
        """Add a new adapter as `role`. options: of peft"""
        adapter_files.inject(self.lm, role, options)
        self._added()

    def _added(self) -> None:
        self._layers = [layer for _, layer in adapter_files.tuner_layers(self.lm)]
        self.lm.eval()  # peft's new modules are in training mode
        self.active = ""

    def activate(self, role: str) -> None:
        """Passes of the model compute with the adapter `role`; without any if there is none of this name.

        peft's own `set_adapter` would also change which weights require gradients.
        """
        if self.active != role:
            for layer in self._layers:
                layer._active_adapter = [role]
            self.active = role

    def weights_of(self, role: str) -> set[int]:
        """The ids of the weights of one adapter."""
        return {id(weight) for name, weight in self.lm.named_parameters() if role in name.split(".")}


class Role(nn.Module):
    """One role of a trunk as a model of its own, beside the class of the model.

    Its parameters are those of the role alone: an engine trains, counts and saves these, and leaves the trunk to the
    other roles.
    """

    trunk: Trunk
    role: str

    def bind(self, trunk: Trunk, role: str, trained: bool) -> None:
        """Bind the model to its role. trained: whether the weights of the role require gradients"""
        self.trunk, self.role = trunk, role
        every = {id(weight) for _, weight in super().named_parameters()}
        own = every - {id(weight) for weight in trunk.lm.parameters()} | trunk.weights_of(role)
        self._own = [(name, weight) for name, weight in super().named_parameters() if id(weight) in own]
        self.requires_grad_(trained)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights of the role, by their names in the whole model. The role itself has none without `recurse`."""
        before = f"{prefix}." if prefix else ""
        return ((before + name, weight) for name, weight in self._own if recurse)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the trunk, which all roles share. If it has that mode, its modules are not visited: with four
        adapters on each layer of a model of 135M that takes 40 ms."""
        self.training = mode
        if self.trunk.lm.training != mode:
            self.trunk.lm.train(mode)
        return self

    def forward(self, *args: object, **options: object) -> Any:
        """The pass of the model with the adapter of the role."""
        self.trunk.activate(self.role)
        return super().forward(*args, **options)


class PolicyRole(Role, Policy):
    """A policy, or the reference, on a trunk."""

    def __init__(self, trunk: Trunk, role: str, trained: bool = True) -> None:
        super().__init__(trunk.lm)
        self.bind(trunk, role, trained)


class ActorCriticRole(Role, ActorCritic):
    """A policy with a value head on a trunk."""

    def __init__(self, trunk: Trunk, role: str, head: ScoreHead) -> None:
        super().__init__(trunk.lm, head)
        self.bind(trunk, role, trained=True)


class ScalarRole(Role, ScalarModel):
    """A critic or a reward model on a trunk."""

    def __init__(self, trunk: Trunk, role: str, head: ScoreHead, trained: bool) -> None:
        super().__init__(trunk.backbone, head)
        self.bind(trunk, role, trained)


def prepare_inference(model: nn.Module) -> None:
    """Set a role of a trunk to eval mode, with its adapter active: another role may have trained since. Other models
    stay as they are."""
    if isinstance(model, Role):
        model.eval()
        model.trunk.activate(model.role)
