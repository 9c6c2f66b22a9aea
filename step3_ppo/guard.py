"""The end of a run whose policy has left the reference for good."""

from collections.abc import Iterable, Iterator

from rlhf.nonfinite import NonFiniteError
from rlhf.types import Metrics


class RunawayError(NonFiniteError):
    """The run must end: a number is beyond what training can come back from."""


def ended_by_kl(steps: Iterable[Metrics], limit: float | None, in_a_row: int) -> Iterator[Metrics]:
    """The iterations, until `kl`, nats per response, was above `limit` in `in_a_row` of them in a row; none: all.

    The last iteration is passed on before the end. `kl` is the same on every rank, so all end together. An iteration
    without one, left out, counts for nothing.
    Raises: RunawayError, naming the iteration.
    """
    beyond = 0
    for iteration, metrics in enumerate(steps, start=1):
        yield metrics
        if limit is None or "kl" not in metrics:
            continue
        beyond = beyond + 1 if metrics["kl"] > limit else 0
        if beyond == in_a_row:
            times = f" for {in_a_row} iterations" if in_a_row > 1 else ""
            said = f"kl is {metrics['kl']:.4g} nats per response, above --abort-kl {limit:g}{times}"
            advice = "lower --learning-rate, raise --kl-coef, or set --target-kl"
            raise RunawayError(f"iteration {iteration}: {said}; {advice}")
