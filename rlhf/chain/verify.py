"""`rlhf verify RUN`: whether the numbers of a finished run hold when plain transformers computes them again."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rlhf import console
from rlhf.chain import report
from rlhf.config import Config, parser
from rlhf.errors import UserError


class VerifyConfig(Config):
    """The run."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("run",)

    run: str = ""
    """output directory of a run, or of one of its stages"""


def main(argv: Sequence[str] | None = None, program: str = "python -m rlhf verify") -> int:
    """Exit code 1 if a number differs, 2 for a user's mistake."""
    words = console.words(argv)
    options = parser.parse(VerifyConfig, words, program, "Compute again what a finished run claims.")
    if not options.run:
        raise UserError("rlhf verify: no run is named; expected the --output-dir of a run, or one of its stages")
    console.loading(program, words)
    console.quiet_libraries()
    from rlhf.chain.recount import finished_stages, recount, sealed_files
    from rlhf.report import seal
    from rlhf.storage import manifests

    run = Path(options.run)
    stages = finished_stages(run)
    (run / seal.SEAL).unlink(missing_ok=True)
    console.say(f"{'claim':>68}{'recount':>14}{'bound':>14}")
    claims = []
    for step, stage in stages:
        console.say(stage.directory.name)
        try:
            for claim in recount(step, stage):
                console.say(claim.line)
                claims.append((stage.directory.name, claim))
        except report.FAILURES as error:
            other = manifests.other_writer(stage.manifest or {})
            reason = f"of files of a run, unchanged, expected other content ({error!r}){other}"
            raise UserError(f"{stage.directory}: cannot be verified: {reason}") from error
    wrong = [f"{name}: {claim.name}" for name, claim in claims if not claim.holds]
    counted = sum(claim.recount is not None for _, claim in claims)
    left = len(claims) - counted
    if wrong:
        console.say(f"{len(wrong)} of {counted} numbers differ: {', '.join(wrong)}")
        return 1
    seal.write(run, [file for _, stage in stages for file in sealed_files(stage)], counted, left)
    console.say(f"verified: {counted} numbers hold; {left} were not computed again")
    if (run / report.REPORT).is_file():
        console.say(f"the report shows it: {report.write(report.ReportConfig(runs=(str(run),)))}")
    return 0
