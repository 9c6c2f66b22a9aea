"""JSON as people mean it: without repeated keys, of which Python takes the last, and without NaN, which is no JSON."""

import json
from json import JSONDecoder

from rlhf.config import Tree


def _refuse_duplicate_keys(pairs: list[tuple[str, object]]) -> Tree:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {json.dumps(repeated)[:60]} is repeated")
    return record


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"got {constant}, expected a finite number or null")


DECODER = JSONDecoder(object_pairs_hook=_refuse_duplicate_keys, parse_constant=_refuse_constant)
"""raises ValueError, with what is wrong"""
