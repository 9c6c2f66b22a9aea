"""Which processes run the stages of a chain: on this machine, on several hosts, or those of another launcher."""

from dataclasses import replace

from rlhf.chain.options import ChainConfig
from rlhf.errors import UserError
from rlhf.launch import launcher, rank_variables
from rlhf.launch.hosts import Deployment, LaunchOptions, open_deployment

SLOTS = ("hostfile", "include", "exclude", "num_gpus")
"""options that choose hosts, or slots of this machine"""
HOSTS_ONLY = ("num_nodes", "launcher_args", "master_addr", "master_port")


def resolve_deployment(chain: ChainConfig) -> Deployment:
    """The hosts and the number of processes of each stage; under another launcher, those that it has started.

    Raises: UserError if the hosts or devices do not exist.
    """
    options = LaunchOptions(**{name: getattr(chain, name) for name in LaunchOptions.model_fields})
    if rank_variables.world_size() > 1:
        return Deployment(rank_variables.world_size(), options=options)
    _refuse_contradictions(chain, options)
    if not any(getattr(options, name) is not None for name in SLOTS):
        return Deployment(launcher.local_processes(chain.deployment_type, chain.num_processes), options=options)
    most = launcher.require_devices("--num-gpus", (options.num_gpus or 0) if options.hostfile is None else 0)
    deployment = open_deployment(options, most)
    return deployment if launcher.torch_gpus() else replace(deployment, slots=())


def _refuse_contradictions(chain: ChainConfig, options: LaunchOptions) -> None:
    """Raises: UserError for options of hosts and processes that exclude each other."""
    kind = chain.deployment_type
    if kind == "multi_node" and options.hostfile is None:
        raise UserError(
            "--deployment-type multi_node: got no --hostfile, expected one with 'name slots=N' a line; for this "
            "machine alone use single_node"
        )
    excluded = {
        "auto": HOSTS_ONLY if options.hostfile is None else (),
        "single_gpu": (*SLOTS, *HOSTS_ONLY),
        "single_node": ("hostfile", *HOSTS_ONLY),
        "multi_node": (),
    }
    for name in excluded[kind]:
        if getattr(options, name) is not None:
            expected = "single_node" if name in SLOTS[1:] else "multi_node with --hostfile"
            option = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise UserError(f"{option}: got --deployment-type {kind}, expected {expected}")
    if kind == "single_gpu" and (chain.num_processes or 1) > 1:
        raise UserError(f"--num-processes {chain.num_processes}: got --deployment-type {kind}, expected single_node")
    if chain.num_processes is not None and any(getattr(options, name) is not None for name in SLOTS):
        raise UserError(
            f"--num-processes {chain.num_processes}: got it with --hostfile, --include, --exclude or --num-gpus, which "
            "count the processes too; expected one of them"
        )
