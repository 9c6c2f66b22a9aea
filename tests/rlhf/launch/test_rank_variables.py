"""The rank of a process under srun, deepspeed and mpirun, and what accelerate passes on."""

from pathlib import Path

import pytest

from rlhf.launch import rank_variables
from rlhf.launch.rank_variables import settings_of_accelerate

STEP = {
    "SLURM_JOB_ID": "31234",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[03-05,09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


def adopted(**environment: str) -> dict[str, str]:
    rank_variables.adopt(environment)
    return environment


def test_a_task_of_a_step_has_its_place() -> None:
    variables = {name: value for name, value in adopted(**STEP).items() if name not in STEP}
    assert variables == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }
    assert adopted(**STEP, MASTER_ADDR="10.0.0.1")["MASTER_ADDR"] == "10.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script's
        {**STEP, "RANK": "0"},  # torchrun inside of a step
    ],
)
def test_what_is_no_task_among_several_stays_as_it_is(environment: dict[str, str]) -> None:
    assert adopted(**environment) == environment


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("a,b", "a"),
        ("gpu[07-09,12],m1", "gpu07"),
        ("r1n[3]-ib,x", "r1n3-ib"),
        ("c[1,4]", "c1"),
        ("rack[1-2]n[01-04],x", "rack1n01"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert rank_variables.first_host(nodes) == first


def test_tasks_per_node() -> None:
    assert rank_variables.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert rank_variables.tasks_per_node("8") == [8] and rank_variables.tasks_per_node("") == []


def test_a_process_of_deepspeed_or_mpirun() -> None:
    of_deepspeed = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert adopted(**of_deepspeed) == of_deepspeed | {"LOCAL_WORLD_SIZE": "2"}
    of_mpirun = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    variables = adopted(**{f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpirun.items()})
    ours = {name: value for name, value in variables.items() if not name.startswith("OMPI")}
    assert ours == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_mpirun_on_one_host_needs_no_address() -> None:
    of_mpirun = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    of_mpirun |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
    first, other = (adopted(**of_mpirun, PMIX_NAMESPACE=job) for job in ("prterun-a@1", "prterun-b@1"))
    assert first["MASTER_ADDR"] == "127.0.0.1" and int(first["MASTER_PORT"]) in rank_variables.PORTS
    assert first["MASTER_PORT"] != other["MASTER_PORT"]
    assert adopted(**of_mpirun, MASTER_ADDR="n01", MASTER_PORT="29500")["MASTER_PORT"] == "29500"


def test_accelerate_on_the_cpu_hides_the_gpus() -> None:
    assert adopted(ACCELERATE_USE_CPU="True")["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in adopted(ACCELERATE_USE_CPU="False")


def test_a_setting_of_accelerate_is_said() -> None:
    """Not what every `accelerate launch` says."""
    silent = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}
    assert [*settings_of_accelerate(silent)] == []
    asked = silent | {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert [*settings_of_accelerate(asked)] == [
        "--dtype here, in place of ACCELERATE_MIXED_PRECISION=bf16",
        "--zero-stage here, in place of ACCELERATE_DEEPSPEED_ZERO_STAGE=3",
    ]


@pytest.mark.parametrize("name", sorted(rank_variables.ACCELERATE))
def test_the_variables_are_those_that_accelerate_sets(name: str) -> None:
    """Read from its source: a variable that it no longer knows would never arrive."""
    from accelerate.utils import dataclasses, launch

    source = "".join(Path(str(module.__file__)).read_text() for module in (dataclasses, launch))
    assert name in source
