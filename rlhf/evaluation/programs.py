"""What the programs that evaluate share: their options, read and checked before libraries are imported. Torch-free."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from rlhf import console
from rlhf.config import Config, parser
from rlhf.config.options import PromptFileOptions
from rlhf.errors import UserError

C = TypeVar("C", bound=Config)


def read_options(cls: type[C], argv: Sequence[str], program: str, description: str, check: Callable[[C], None]) -> C:
    """The options of the command line after `check`. Then a line announces the import of the libraries, and one names
    an accelerator that is not used.

    Raises: UserError.
    """
    options = parser.parse(cls, argv, program, description)
    check(options)
    console.loading(program, argv)
    console.quiet_libraries()
    from rlhf.training import hardware  # imported here because it imports torch

    hardware.say_accelerator()
    return options


def run_on_processes(module: str, argv: Sequence[str], options: PromptFileOptions, run: Callable[[], None]) -> int:
    """Call `run` in this process, or in the processes of `--num-processes`: `python -m module` with `argv` in each.
    Returns the exit code.

    Raises: UserError if there are not so many devices; in one of several processes it ends the process with one line.
    """
    from rlhf.distributed import collectives
    from rlhf.launch import launcher, rank_variables
    from rlhf.launch.supervisor import USER_ERROR
    from rlhf.training.stage_process import end_well, give_up

    if rank_variables.world_size() > 1:
        try:
            with collectives.process_group():
                run()
                collectives.barrier()
        except UserError as error:
            give_up(f"error: {error}", USER_ERROR)
        end_well()
        return 0
    processes = launcher.local_processes(options.deployment_type, options.num_processes)
    if processes > 1:
        return int(launcher.run(module, argv, processes))
    run()
    return 0


def require_prompts(options: PromptFileOptions) -> None:
    """Raises: UserError if no file of prompts is named."""
    if options.prompts is None:
        raise UserError("--prompts: not given, expected a file with a column prompt, or .txt")
