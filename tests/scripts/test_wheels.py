"""scripts/wheels.sh: every wheel has a pinned version."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheels_for_a_machine_without_an_index_are_pinned() -> None:
    names = re.search(r"^names=\((.*)\)$", (ROOT / "scripts/wheels.sh").read_text(), re.MULTILINE)[1].split()  # type: ignore[index]
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names and {name.lower() for name in (*names, "deepspeed")} <= pins
