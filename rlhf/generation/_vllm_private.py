"""What vLLM does not document but this backend needs, as in vLLM 0.32.0. test_vllm_itself.py tests it on vLLM."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def shut_down(engine: Any) -> None:
    """Release what the engine holds, but not the process group, which is the run's.

    vLLM's own shutdown, at the latest when the process ends, also destroys the process group; or it fails, if that is
    gone already.
    """
    from vllm.distributed import parallel_state

    client = engine.llm_engine.engine_core
    if client._finalizer.detach() is None:  # vLLM has done it
        return
    client.engine_core.model_executor.shutdown()
    parallel_state.destroy_model_parallel()
    parallel_state.get_world_group().destroy()
    parallel_state._WORLD = None


def pack_weights(worker: Any) -> None:
    """On a CPU vLLM multiplies by packed copies of the weights. `reload_weights` packs those of most layers, but not of
    a mixture of experts, nor a head with the weights of the embedding, which would keep the copy of the start."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
        elif isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def add_head_bias(worker: Any) -> None:
    """Give the head of vLLM's model a bias if it has none: `reload_weights` would drop one that it has added itself, as
    it does for a model type that vLLM has no code for (Phi)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead) and module.bias is None:
            with worker.device:
                module._register_bias()


def restore_classes(lm: PreTrainedModel) -> None:
    """A model type that vLLM has no code for runs on transformers' class, such as GPTNeoXModel. vLLM replaces the
    `__call__` of that class, also for the actor, whose hooks would not run. Give it back to all but vLLM's objects."""
    for kind in {type(module) for module in lm.modules()}:
        theirs = vars(kind).get("__call__")
        if theirs is not None and theirs.__module__.partition(".")[0] == "vllm":
            kind.__call__ = _dispatching(theirs)  # type: ignore[method-assign]


def _dispatching(theirs: Callable[..., object]) -> Callable[..., object]:
    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        own = "do_not_compile" not in vars(module)  # vLLM sets it when it makes one
        return nn.Module.__call__(module, *args, **kwargs) if own else theirs(module, *args, **kwargs)

    return call
