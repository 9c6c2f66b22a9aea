#!/usr/bin/env bash
# Wheels for a GPU machine that has torch, transformers and peft but no network:
#
#     scripts/wheels.sh [3.12]      here: into build/wheels, 6 MB, for that Python on x86-64 Linux
#
# There, in a copy of this folder with build/wheels:
#
#     python3 -m pip install -q --no-index --no-deps --target /tmp/site build/wheels/*.whl
#     PYTHONPATH=/tmp/site python3 -m benchmarks.gpu --only ppo profile --output results
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
folder=build/wheels
# what torch, transformers, accelerate, peft, pyarrow and pytest do not bring
names=(annotated-types datasets dill hjson multiprocess pydantic pydantic_core typing-inspection typing_extensions vaderSentiment)
pins=()
platforms=()

pinned() { grep -i "^$1==" constraints.txt; }
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${tag}_x86_64"); done
rm -rf "$folder" && mkdir -p "$folder"
for name in "${names[@]}"; do pins+=("$(pinned "$name")"); done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version "${1:-3.12}" --implementation cp "${platforms[@]}" -d "$folder" "${pins[@]}"
# The index has DeepSpeed's source alone. Without operators compiled ahead its wheel is pure Python.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel -q --no-deps -w "$folder" "$(pinned deepspeed)"
du -sh "$folder"
