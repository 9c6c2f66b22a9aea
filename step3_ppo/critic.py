"""What the critic starts from: the reward model, the policy with a new value head, or another scalar model."""

from rlhf.errors import UserError
from rlhf.hub.short_names import resolve
from rlhf.models import virtual_tokens
from rlhf.text.tokenizer import load_tokenizer, prepare_tokenizer, same_ids
from step3_ppo.config import POLICY, SHARED, Step3Config


def choose(option: str | None, models: Step3Config) -> str:
    """What the critic starts from: the word `policy` or `shared`, or the path of a scalar model.

    option: --critic-model; models: the options with the paths of all models, that of the critic included. A critic
    reads the actor's ids, and has whole weights. So by default it starts from the reward model if that has the same
    tokenizer and template and no virtual tokens, otherwise from the policy.
    Raises: UserError if the model that the option names reads other ids, or has virtual tokens.
    """
    if option in (POLICY, SHARED):
        return option
    path = str(models.critic_model)
    virtual = virtual_tokens.are_in(resolve(path))
    if not virtual and reads_same_ids(models, path):
        return path
    if option is None:
        return POLICY
    if virtual:
        raise UserError(
            f"critic '{path}': got virtual tokens, expected whole weights; add a new value head to the actor's model "
            f"with --critic-model {POLICY}"
        )
    raise UserError(
        f"critic '{path}': its tokenizer or chat template gives other ids than that of the actor "
        f"'{models.actor_model}'; expected models of one family: choose another with --critic-model, or add a new "
        f"value head to the actor's model with --critic-model {POLICY}"
    )


def describe(option: str | None, models: Step3Config) -> str:
    """A line for the user: what `choose` has chosen, which is `models.critic_model`, and why."""
    start = f"'{models.critic_model}'"
    if models.critic_model == SHARED:
        return "the critic is a new value head on the actor (--critic-model shared)"
    if models.critic_model == POLICY:
        start = f"'{models.actor_model}', the policy, with a new value head"
    if option is not None:
        reason = f"--critic-model {option}"
    elif models.critic_model == POLICY:
        reason = f"the reward model '{models.reward_model}' has another tokenizer or chat template, or virtual tokens"
    else:
        reason = "the reward model, with the actor's tokenizer"
    return f"the critic starts from {start} ({reason})"


def reads_same_ids(models: Step3Config, path: str) -> bool:
    """Whether the tokenizer and template of the model at `path` give the same ids as the actor's."""
    actor, other = (
        prepare_tokenizer(load_tokenizer(resolve(str(model))), models.chat_template, variables)
        for model, variables in ((models.actor_model, models.chat_template_kwargs), (path, None))
    )
    return same_ids(actor, other)
