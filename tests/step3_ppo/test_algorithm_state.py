"""What an algorithm keeps from one iteration to the next, in a checkpoint and after a resume."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from step3_ppo import algorithms
from step3_ppo.algorithms import Iteration
from tests.support import tiny
from tests.support.players import on_stage, players, twice_each


def test_what_an_algorithm_keeps_is_in_a_checkpoint(tmp_path: Path) -> None:
    """A moving average of the scores as its baseline, by hand: half of 4, then half of that and of 2."""
    file = tmp_path / "moving.py"
    file.write_text(
        "from step3_ppo.algorithms import reinforce\n"
        "Config = reinforce.Config\n"
        "class Moving(reinforce.Reinforce):\n"
        "    mean = 0.0\n"
        "    def credit(self, rollout, iteration):\n"
        "        self.mean = 0.5 * self.mean + 0.5 * rollout.scores.mean().item()\n"
        "        return super().credit(rollout, iteration)\n"
        "    def state_dict(self): return {'mean': self.mean}\n"
        "    def load_state_dict(self, state): self.mean = state['mean']\n"
        "build = Moving\n"
    )
    with tiny.one_rank():
        game = players("reinforce")
        learners = []
        for _ in range(2):
            algorithm = algorithms.load(game.config.model_copy(update={"algorithm": str(file)}))
            learners.append(on_stage(replace(game, algorithm=algorithm)))
        rollout = game.score(game.sample(twice_each()))
        first, resumed = learners
        first.algorithm.credit(replace(rollout, scores=torch.full((8,), 4.0)), Iteration(0, []))
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        resumed.algorithm.credit(replace(rollout, scores=torch.full((8,), 2.0)), Iteration(1, []))
        assert resumed.state_dict()["algorithm"] == {"mean": 2.0}
        plain = on_stage(game)
        plain.load_state_dict(first.state_dict())  # of an algorithm without state
        assert "algorithm" not in plain.state_dict()
