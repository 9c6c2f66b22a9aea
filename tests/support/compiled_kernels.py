"""`python -m tests.support.compiled_kernels`: compiles the Triton kernels for GPUs that are not here, a JSON line each.

Triton's wheel has its compiler and ptxas. What a launch on a GPU finds out by itself is said here: 16 divides
pointers and strides, without which no load is wide.
"""

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from rlhf.kernels import one_token_triton as kernels

TARGETS = (80, 90, 100)
"""A100, H100 and H200, B200"""
SHAPES = ((64, 1, 1), (64, 4, 2), (80, 1, 1), (128, 8, 1), (128, 1, 4), (256, 2, 1))
"""width of the heads, queries of a key head, splits: OPT and Llama 3.2, OPT-2.7B, Qwen 3, few rows, Gemma"""
POINTERS = {"Visible": "*u8", "Sums": "*fp32", "Largest": "*fp32", "Weights": "*fp32"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"


def compiled(kernel: Any, constants: dict[str, Any], target: int, warps: int) -> dict[str, Any]:
    """Target, name, loads, registers, spilled bytes and shared memory of a kernel in bf16."""
    names = kernel.arg_names
    kinds = {name: POINTERS.get(name, "*bf16" if name[0].isupper() else "i32") for name in names} | {
        "scale": "fp32",
        "cap": "fp32",
    }
    signature = {name: "constexpr" if name in constants else kinds[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name not in (*constants, "scale", "cap", "visible_row", "length")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "maxnreg": kernels.REGISTERS}
    result = compile(source, target=GPUTarget("cuda", target, 32), options=options)
    ptx = result.asm["ptx"]
    architecture = re.search(r"\.target (\w+)", ptx)[1]  # type: ignore[index]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [PTXAS, "-v", f"-arch={architecture}", file.name, "-o", os.devnull]
        report = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    return {
        "name": kernel.fn.__name__,
        "target": architecture,
        "shape": constants,
        "copies": Counter(str(int(size, 0)) for size in re.findall(r"cp\.async\.c[ag]\S* [^;]*?\], (0x\w+|\d+)", ptx)),
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),  # type: ignore[index]
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared": result.metadata.shared,
    }


def main() -> None:
    for target in TARGETS:
        for d, group, splits in SHAPES:
            wide = triton.next_power_of_2(d)
            sizes = {"tile": kernels.FEWEST_ROWS, "block": kernels.block_of(wide), "scan": 512}
            widths = {"d_k": d, "d_v": d, "wide_k": wide, "wide_v": wide}
            for capped in (False, True) if d >= 128 else (False,):  # Gemma 2
                constants = {"masked": True, "capped": capped, "group": group, "splits": splits, **sizes, **widths}
                print(json.dumps(compiled(kernels.attend_split, constants, target, kernels.warps_of(wide))))
        print(json.dumps(compiled(kernels.join_splits, {"splits": 8, "d_v": 128, "wide_v": 128}, target, 4)))


if __name__ == "__main__":
    main()
