"""What step 3 must make of the responses that it sampled, in float64.

Taken from the run is which token was sampled, which must be the one that its uniform number points at. Everything else
is computed again.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count as forever
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batches import Batches
from rlhf.maths.uniforms import uniforms
from tests.options import reference
from tests.options.comparison import Comparison
from tests.options.harness import Ids
from tests.options.reference import Network, Trainer
from tests.options.reference_credit import Row, Scaling, Scored, Steering, Tokens, credit, policy_loss, value_loss
from tests.options.reference_metrics import averaged, compared, deviation, mean, name_of, named, rollout_metrics
from tests.options.reference_supervised import learned, require_micro_batches, token_loss
from tests.support import tiny

HELD_OUT = 2**20 - 1
"""the number of the rollout that held-out responses are drawn in"""
NEAR = 1e-5
"""how far from a token's share of the probability its uniform number may be: the errors, a few times 2^-24 each, of the
18 probabilities add up"""
Pair = tuple[Ids, Ids]
"""prompt and response"""
Table = list[Row]
"""a number for each token of each response"""


class Reinforcement:
    """One run. `prompts`, `held_out`: of either kind; `texts`: what the actor is fine-tuned on beside; `compared`: both
    sides of the pairs on which the critic is pretrained."""

    def __init__(
        self,
        o: dict[str, Any],
        comparison: Comparison,
        prompts: Sequence[Ids],
        held_out: Sequence[Ids],
        texts: Sequence[Ids] = (),
        compared: Sequence[Pair] = (),
    ) -> None:
        self.o, self.comparison, self.prompts, self.held_out = o, comparison, prompts, held_out
        self.rollouts, self.batches = iter(comparison.observed.rollouts), iter(comparison.observed.batches)
        self.approx_kls: list[float] = []
        self.iterations = o["total_episodes"] // o["batch_size"]
        self.has_critic = o["algorithm"] in ("ppo", "a2c")
        self.shared = self.has_critic and o["critic_model"] == "shared"
        self.actor = self.trainer_of_actor()
        self.reference, self.average = self.actor.network.copy(), self.actor.network.copy()
        self.critic = Trainer(self.critic_start(), o, o["critic_learning_rate"], self.steps(of_actor=False))
        self.scaling, self.steering = Scaling(o), Steering(o)
        self.texts, self.compared = self.batches_of_texts(texts), compared

    def trainer_of_actor(self) -> Trainer:
        o, start = self.o, reference.load(self.o["actor_model"])
        if not self.shared:
            return Trainer(start, o, o["learning_rate"], self.steps(of_actor=True))
        start = reference.with_new_head(start, o["seed"])
        return Trainer(start, o, o["learning_rate"], self.steps(of_actor=False), o["critic_learning_rate"])

    def critic_start(self) -> Network:
        o = self.o
        if o["critic_model"] in ("policy", "shared"):
            return reference.with_new_head(reference.load(o["actor_model"]), o["seed"])
        return reference.load(o["reward_model"] if o["critic_model"] in (None, "reward") else o["critic_model"])

    def steps(self, of_actor: bool) -> int:
        iterations = self.iterations - (self.o["critic_warmup_iterations"] if of_actor else 0)
        return iterations * self.o["num_ppo_epochs"] * self.o["num_mini_batches"]

    def run(self) -> None:
        o, best_at, networks = self.o, [], dict[str, Network]()
        before = after = self.evaluate()
        self.pretrain_critic()
        best, waited = -math.inf, 0
        for iteration, indices in enumerate(self.prompt_batches(), start=1):
            metrics = self.iterate(iteration, indices)
            if iteration == self.iterations or (o["eval_every"] and iteration % o["eval_every"] == 0):
                after = self.evaluate()
                metrics |= compared(before, after)
                waited += iteration > o["critic_warmup_iterations"]
                if o["keep_best"] is not None and metrics.get(o["keep_best"], -math.inf) > best:
                    best, waited = metrics[o["keep_best"]], 0
                    best_at.append(iteration - 1)
                    networks["best"] = self.actor.network.copy()
            self.comparison.step(metrics)
            if o["patience"] is not None and waited >= o["patience"]:
                break
        assert next(self.rollouts, None) is None and next(self.batches, None) is None, "the run went on"
        networks |= {"actor": self.actor.network}
        networks |= {"critic": self.critic.network} if self.has_critic and not self.shared else {}
        networks |= {"ema": self.average} if o["ema_decay"] is not None else {}
        at_end = {"eval_best_step": best_at[-1] + 1.0} if best_at else {}
        self.comparison.end(compared(before, after) | at_end, networks, best_at)

    def prompt_batches(self) -> Iterator[list[int]]:
        """The prompts of each iteration, each num_generations times in a row."""
        copies = self.o["num_generations"]
        batches = Batches(len(self.prompts), self.o["batch_size"] // copies, self.o["seed"])
        for _, indices in zip(range(self.iterations), batches.until_epoch(self.iterations), strict=False):
            yield [i for i in indices for _ in range(copies)]

    def pretrain_critic(self) -> None:
        """At the token before each token of a response, the critic learns its first number at the last one."""
        o, trainer, start = self.o, self.critic, self.critic.network.copy()
        responses = [side for pair in self.compared for side in pair[:2]]
        whole, rest = divmod(o["critic_pretraining_epochs"], 1)
        batches = Batches(max(1, len(responses)), min(o["batch_size"], max(1, len(responses))), o["seed"])
        steps = [*batches.until_epoch(int(whole))]
        steps += [*batches][: math.ceil(rest * (len(responses) // o["batch_size"]))]
        of_iterations, trainer.steps = trainer.steps, len(steps)
        for indices in steps:
            rows = [responses[i] for i in indices]
            self.require_rows("critic", rows)
            scores = start.scores(rows)

            def loss(network: Network, rows: list[Ids] = rows, scores: Tensor = scores) -> tuple[Tensor, dict]:
                values = network.scalars(rows)
                errors = [
                    (values[b, s - 1] - scores[b]).square() / 2 for b, ids in enumerate(rows) for s in learned(o, ids)
                ]
                return torch.stack(errors).mean(), {}

            trainer.take_step(loss)
        trainer.steps, trainer.step = of_iterations, 0

    # --- responses and scores

    def sampled(
        self, draw: int, prompts: Sequence[Ids], indices: Sequence[int], network: Network | None = None
    ) -> list[Pair]:
        """The response to each prompt as the run has it; each token is where its uniform number points."""
        rows = next(self.rollouts, [])
        assert sorted(row[0] for row in rows) == sorted(prompts[i] for i in indices)
        responses: dict[Ids, list[Ids]] = {}
        for prompt, response, ended in rows:
            assert ended == (response[-1] == tiny.EOS) and tiny.EOS not in response[:-1]
            assert len(response) == self.o["response_length"] or (ended and len(response) < self.o["response_length"])
            responses.setdefault(prompt, []).append(response)
        pairs, keys = [], []
        earlier: Counter[int] = Counter()
        for i in indices:
            pairs.append((prompts[i], responses[prompts[i]].pop(0)))
            keys.append((self.o["seed"], draw, i, earlier[i]))
            earlier[i] += 1
        draws = uniforms(keys, self.o["response_length"]).tolist()
        self.require_drawn(network or self.actor.network, pairs, draws, f"iteration {draw}")
        return pairs

    def require_drawn(self, network: Network, pairs: list[Pair], draws: list[Row], where: str) -> None:
        laws = network.distributions([[*p, *r] for p, r in pairs], self.o["temperature"])
        sums = laws.cumsum(-1)
        for b, (prompt, response) in enumerate(pairs):
            for t, token in enumerate(response):
                state = b, len(prompt) + t - 1, token
                high, low = sums[state].item(), (sums[state] - laws[state]).item()
                assert low - NEAR < draws[b][t] < high + NEAR, (
                    f"{where}: token {t} of response {b} is not the one drawn"
                )

    def logprobs(self, network: Network, pairs: list[Pair]) -> tuple[list[Tensor], list[Tensor]]:
        """Of the tokens of each response: log-probs, and entropies of what they were drawn from."""
        logprobs, entropies = network.logprobs([[*p, *r] for p, r in pairs], self.o["temperature"])
        ends = [(len(p), len(p) + len(r)) for p, r in pairs]
        return tuple([x[b, start:end] for b, (start, end) in enumerate(ends)] for x in (logprobs, entropies))

    def values(self, pairs: list[Pair], detached: bool = False) -> list[Tensor]:
        """The critic's number at the token before each token of each response."""
        network = (self.actor if self.shared else self.critic).network
        scalars = network.scalars([[*p, *r] for p, r in pairs], detached)
        return [scalars[b, len(p) - 1 : len(p) + len(r) - 1] for b, (p, r) in enumerate(pairs)]

    def scores(self, spec: str, pairs: list[Pair]) -> Row:
        """What one reward source gives each response."""
        name, _, rest = spec.partition(",")
        if name == "learned":
            model = reference.load(rest.removeprefix("model=") or self.o["reward_model"])
            return model.scores([[*p, *r] for p, r in pairs]).tolist()
        if name == "length":
            options = dict(pair.split("=") for pair in rest.split(","))
            over = [max(0, len(response) - int(options["target"])) for _, response in pairs]
            return [-float(options.get("penalty", 0.01)) * tokens for tokens in over]
        start = {"score": 0.0, "far": 1000.1}[name.rpartition(":")[2]]  # w0 has id 6
        return [start + sum(0.137 * ((i - 6) % 5 - 2.3) for i in response if i > 5) for _, response in pairs]

    def scored(self, pairs: list[Pair], penalty: float | None) -> tuple[Scored, dict[str, Row]]:
        """The rollout with scores not yet scaled, and the scores of each source."""
        o = self.o
        sources, weighted = {}, []
        for text in o["reward"]:
            weight, _, spec = text.rpartition("*")
            sources[spec] = self.scores(spec, pairs)
            if float(weight or 1) != 0:
                weighted.append([float(weight or 1) * score for score in sources[spec]])
        self.members = list(zip(*weighted, strict=True))
        combine = {"sum": sum, "min": min, "uncertain": self.cautious}[o["reward_combine"]]
        scores = [
            combine(each) - (0.0 if response[-1] == tiny.EOS else penalty or 0.0)
            for *each, (_, response) in zip(*weighted, pairs, strict=True)
        ]
        old, ref = (
            [x.tolist() for x in self.logprobs(network, pairs)[0]] for network in (self.actor.network, self.reference)
        )
        return Scored(scores, old, ref, [x.tolist() for x in self.values(pairs)]), sources

    def cautious(self, members: Row) -> float:
        """Their mean, less uncertainty_coef times their variance."""
        return mean(members) - self.o["uncertainty_coef"] * deviation(members) ** 2

    def evaluate(self) -> dict[str, Any]:
        """The held-out prompts, answered and scored."""
        indices = list(range(min(len(self.held_out), self.o["eval_samples"])))
        pairs = self.sampled(HELD_OUT, self.held_out, indices)
        judge = self.o["judge"]
        return {
            "scored": self.scored(pairs, self.o["missing_eos_penalty"])[0],
            "ended": sum(response[-1] == tiny.EOS for _, response in pairs) / len(pairs),
            "judge": None if judge is None else self.scores(judge, pairs),
        }

    # --- an iteration

    def iterate(self, iteration: int, indices: list[int]) -> dict[str, float]:
        o = self.o
        pairs = self.sampled(iteration - 1, self.prompts, indices)
        scored, sources = self.scored(pairs, o["missing_eos_penalty"])
        spread = mean([deviation(each) for each in self.members])
        plain = scored.scores
        scored.scores = self.scaling(plain)
        if iteration > o["critic_warmup_iterations"]:
            kls = [math.fsum(old) - math.fsum(ref) for old, ref in zip(scored.old, scored.ref, strict=True)]
            self.steering.observe(mean(kls), scored.scores)
        advantages, returns = credit(self.options_at(iteration), scored, self.steering.coef())
        metrics = {f"score_{name_of(spec)}": sum(scores) / len(scores) for spec, scores in sources.items()}
        metrics |= rollout_metrics(o, scored, plain) | {"kl_coef": self.steering.coef()}
        metrics |= {"score_disagreement": spread} if o["reward_combine"] == "uncertain" else {}
        rows = list(range(len(pairs)))
        if o["algorithm"] == "best_of_n":
            rows = [i for i in rows if advantages[i][0] == 1.0]
        steps = self.update(pairs, rows, (scored, advantages, returns), iteration)
        return metrics | averaged(steps)

    def options_at(self, iteration: int) -> dict[str, Any]:
        """While only the critic learns: lambda 1, and no clip."""
        pretraining = iteration <= self.o["critic_warmup_iterations"]
        return self.o | ({"lam": 1.0, "cliprange_value": math.inf} if pretraining else {})

    def update(
        self, pairs: list[Pair], rows: list[int], credited: tuple[Scored, Table, Table], iteration: int
    ) -> list[dict[str, float]]:
        """The metrics of each optimizer step: `rows` are shuffled by seed and iteration, anew every epoch."""
        o, steps = self.o, []
        words = np.random.SeedSequence([4, o["seed"], iteration - 1]).generate_state(1, np.uint64)
        draw = torch.Generator().manual_seed(int(words[0]))
        of_actor = iteration > o["critic_warmup_iterations"]
        for _ in range(o["num_ppo_epochs"]):
            for minibatch in torch.randperm(len(rows), generator=draw).tensor_split(o["num_mini_batches"]):
                chosen = [rows[i] for i in minibatch.tolist()]
                responses, constant = [pairs[i] for i in chosen], constants(chosen, *credited)
                metrics: dict[str, float] = {}
                if of_actor:
                    texts = next(self.texts) if o["ptx_coef"] else []
                    self.require_batch("actor", responses, texts)
                    metrics |= named("policy", self.actor_step(responses, constant, texts))
                if self.has_critic and not (self.shared and of_actor):
                    self.require_batch("actor" if self.shared else "critic", responses, [])
                    metrics |= named("value", self.critic_step(responses, constant, self.options_at(iteration)))
                steps.append(metrics)
                self.approx_kls.append(metrics.get("approx_kl", 0.0))
                if o["target_kl"] is not None and self.approx_kls[-1] > o["target_kl"]:
                    for trainer in (self.actor, self.critic):
                        trainer.left_out += o["num_ppo_epochs"] * o["num_mini_batches"] - len(steps)
                    return steps
        return steps

    def require_batch(self, title: str, responses: list[Pair], texts: list[Ids]) -> None:
        """The next optimizer step is that of `title`, on these rows."""
        of, micros = next(self.batches, ("", []))
        assert of == title, f"a step of '{of}', expected one of the {title}"
        of_responses = [micro for micro in micros if isinstance(micro[0][0], tuple)]
        assert sorted(row for micro in of_responses for row in micro) == sorted(responses)
        require_micro_batches(self.o, of_responses, len(responses), self.comparison.observed.ranks)
        assert sorted(row for micro in micros if micro not in of_responses for row in micro) == sorted(texts)

    def require_rows(self, title: str, rows: list[Ids]) -> None:
        of, micros = next(self.batches, ("", []))
        assert of == title and sorted(row for micro in micros for row in micro) == sorted(rows)
        require_micro_batches(self.o, micros, len(rows), self.comparison.observed.ranks)

    def actor_step(self, pairs: list[Pair], constant: Tokens, texts: list[Ids]) -> dict[str, float]:
        o = self.o

        def loss(network: Network) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, entropies = (torch.cat(x) for x in self.logprobs(network, pairs))
            value, metrics = policy_loss(o, logprobs, constant, self.steering.coef())
            value = value - o["entropy_coef"] * entropies.mean()
            if texts:
                metrics["ptx_nll"] = token_loss(network, {"ptx_objective": o["ptx_objective"]}, texts)
                value = value + o["ptx_coef"] * metrics["ptx_nll"]
            metrics["entropy"] = entropies.mean()
            if self.shared:
                error, of_values = value_loss(o, torch.cat(self.values(pairs)), constant)
                metrics |= of_values | {"value_loss": error, "of the policy": value}
                value = value + o["vf_coef"] * error
            return value, metrics

        metrics = self.actor.take_step(loss)
        metrics["loss"] = metrics.pop("of the policy", metrics["loss"])
        decay = o["ema_decay"] or 0.0
        self.average.vector = decay * self.average.vector + (1 - decay) * self.actor.network.vector
        return metrics

    def critic_step(self, pairs: list[Pair], constant: Tokens, o: dict[str, Any]) -> dict[str, float]:
        trainer = self.actor if self.shared else self.critic
        return trainer.take_step(
            lambda _: value_loss(o, torch.cat(self.values(pairs, self.shared)), constant), self.shared
        )

    def batches_of_texts(self, texts: Sequence[Ids]) -> Iterator[list[Ids]]:
        batches = Batches(len(texts), self.o["ptx_batch_size"], self.o["seed"])
        for epoch in forever(1):
            for rows in batches.until_epoch(epoch):
                yield [texts[i] for i in rows]


def constants(rows: list[int], scored: Scored, advantages: Table, returns: Table) -> Tokens:
    """What the losses of these responses take as given."""
    tables = (scored.old, scored.ref, advantages, scored.values, returns)
    columns = (torch.tensor([x for i in rows for x in table[i]], dtype=torch.float64) for table in tables)
    return Tokens(*columns, [len(scored.old[i]) for i in rows])
