"""What becomes of processes, launches, checkpoints and files when something goes wrong: a table of the faults, each
with the tests that show what is done. Rows 71 to 89, numbers, are in step3_ppo/test_faults.py."""

import importlib
import importlib.util
import operator
from pathlib import Path

from tests.support.fault_names import require_collected

SITE = Path(__file__).parents[1] / "faults" / "site" / "sitecustomize.py"

ROWS_A: dict[int, tuple[str, ...]] = {
    # a rank is killed in a step; while it saves; between the data and the name of a checkpoint
    1: (
        "rlhf/chain/test_killed_chain.py::test_a_chain_killed_in_every_stage_goes_on_to_the_same_bytes",
        "faults/test_selection.py::test_killed_and_asked_to_end_and_it_is_the_same",
        "faults/test_kills.py::test_a_rank_killed_in_a_step",
        "faults/test_kills.py::test_a_stage_that_crashed_starts_again_by_itself",
        "multi_node/test_demo_on_two_nodes.py::test_a_rank_killed_on_the_other_host_and_then_a_signal",
    ),
    2: (
        "faults/test_kills.py::test_killed_while_it_saves",
        "faults/test_kills.py::test_killed_at_any_moment_of_saving",
    ),
    3: (
        "rlhf/training/test_checkpoints.py::test_a_process_that_dies_while_saving_leaves_the_old_or_the_new",
        "faults/test_kills.py::test_killed_while_it_saves",
    ),
    # signals: SIGTERM to the launcher, to one rank, while generating; a save that takes too long; SIGUSR1
    4: (
        "faults/test_signals.py::test_sigterm_to_the_launcher",
        "faults/test_signals.py::test_a_second_signal_ends_it_at_once",
        "rlhf/launch/test_launch.py::test_a_signal_ends_every_process",
    ),
    5: ("faults/test_signals.py::test_sigterm_to_one_rank_ends_all_in_order",),
    6: ("faults/test_signals.py::test_sigterm_in_the_middle_of_generation_waits_for_the_iteration",),
    7: (
        "faults/test_signals.py::test_a_save_slower_than_the_grace_is_waited_for",
        "rlhf/launch/test_supervisor.py::test_finished_steps_are_waited_for_however_long_the_present_one_takes",
    ),
    8: (
        "faults/test_signals.py::test_sigusr1_asks_to_be_started_again",
        "rlhf/launch/test_launch.py::test_usr1_is_passed_on_and_waited_for",
        "rlhf/launch/test_slurm.py::test_the_batch_script",
    ),
    # a rank that hangs, or fails alone
    9: ("faults/test_ranks.py::test_a_stopped_rank_is_named_after_the_timeout",),
    10: (
        "faults/test_ranks.py::test_an_exception_on_one_rank_is_what_is_said",
        "rlhf/launch/test_launch.py::test_the_first_to_fail_ends_the_others",
        "rlhf/training/test_stage_process.py::test_who_lost_its_peer_lets_the_peer_speak",
    ),
    11: ("rlhf/distributed/test_stragglers.py::test_the_slowest_and_the_fastest_rank_of_each_step",),
    # ports and directories that are in use; more processes than devices; no launcher; a clean end
    12: ("rlhf/distributed/test_rendezvous.py::test_a_port_that_is_taken_is_named_with_one_that_is_free",),
    13: (
        "rlhf/storage/test_checkpoint.py::test_one_process_locks_a_directory",
        "rlhf/chain/test_killed_chain.py::test_a_second_chain_leaves_the_first_alone",
        "faults/test_selection.py::test_a_directory_in_use_is_refused",
        "faults/test_ranks.py::test_a_second_run_in_one_directory_is_refused",
    ),
    14: ("rlhf/chain/test_errors.py::test_the_chain_refuses_before_anything_starts",),
    15: (
        "rlhf/launch/test_launch.py::test_a_process_alone_has_no_rank_and_two_have_their_own",
        "rlhf/chain/test_errors.py::test_a_stage_alone_refuses_too",
    ),
    16: (
        "rlhf/launch/test_launch.py::test_two_ranks_end_well_every_time",
        "faults/test_ranks.py::test_a_run_of_two_ends_with_code_0",
    ),
    # hosts that are missing, or have other code
    17: (
        "rlhf/distributed/test_rendezvous.py::test_who_is_missing_is_listed_and_the_others_released",
        "rlhf/launch/test_team.py::test_a_launcher_that_ends_early_is_said",
        "multi_node/test_demo_on_two_nodes.py::test_srun_with_a_task_missing",
    ),
    18: (
        "rlhf/distributed/test_rendezvous.py::test_a_difference_is_told_to_every_rank",
        "multi_node/test_demo_on_two_nodes.py::test_hosts_with_other_code_refuse_each_other",
    ),
    # no memory; a stage that crashes
    19: ("faults/test_ranks.py::test_out_of_memory_says_where_and_what_helps",),
    20: (
        "faults/test_ranks.py::test_a_stage_that_crashes_ends_the_chain",
        "rlhf/chain/test_errors.py::test_a_crash_names_the_stage_and_starts_no_later_one",
    ),
    # Ctrl-C
    42: (
        "faults/test_signals.py::test_ctrl_c_once_is_a_signal_as_any",
        "faults/test_signals.py::test_a_second_signal_ends_it_at_once",
    ),
}

ROWS_B: dict[int, tuple[str, ...]] = {
    # the disk: full, too small, not to be written to
    21: (
        "rlhf/training/test_checkpoints.py::test_a_disk_that_is_full_costs_one_checkpoint",
        "rlhf/training/test_checkpoints.py::test_a_small_file_that_cannot_be_written_costs_one_checkpoint",
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
        "rlhf/training/test_going_on_otherwise.py::test_a_run_outlives_a_full_disk",
    ),
    22: ("rlhf/training/test_going_on_otherwise.py::test_too_little_room_is_foreseen",),
    23: (
        "rlhf/storage/test_checkpoint.py::test_the_write_test_leaves_no_files",
        "rlhf/storage/test_checkpoint.py::test_a_directory_that_is_not_writable",
        "rlhf/chain/test_errors.py::test_a_directory_that_cannot_be_made",
    ),
    # files that are cut, changed by a bit, missing, too many
    24: (
        "rlhf/training/test_checkpoints.py::test_a_damaged_one_is_named_and_passed_over",
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
    ),
    25: (
        "rlhf/training/test_checkpoints.py::test_a_damaged_one_is_named_and_passed_over",
        "rlhf/training/test_checkpoints.py::test_every_flipped_bit_of_a_manifest_is_detected",
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
        "rlhf/storage/test_checkpoint.py::test_a_damaged_stage_is_refused",
    ),
    26: (
        "rlhf/training/test_checkpoints.py::test_a_damaged_one_is_named_and_passed_over",
        "rlhf/training/test_checkpoints.py::test_a_stray_file_is_said_and_ignored",
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
    ),
    # a file `latest`; no checkpoint that is whole
    27: (
        "rlhf/training/test_checkpoints.py::test_no_file_says_which_is_the_newest",
        "rlhf/training/test_checkpoints.py::test_a_damaged_one_is_named_and_passed_over",
        "rlhf/training/test_going_on_otherwise.py::test_a_run_without_a_whole_checkpoint_is_not_begun_again",
    ),
    # a pickle among them
    28: (
        "rlhf/training/test_security_checkpoints.py::test_strays_in_a_checkpoint_are_ignored",
        "rlhf/training/test_security_checkpoints.py::test_a_file_that_became_a_pickle_is_not_read",
        "rlhf/training/test_security_checkpoints.py::test_a_pickle_that_the_manifest_vouches_for_does_not_run",
        "rlhf/training/test_security_checkpoints.py::test_a_checkpoint_holds_no_pickle",
    ),
    # another number of ranks, another ZeRO stage
    29: ("rlhf/training/test_resume.py::test_more_ranks_and_fewer_go_on",),
    30: (
        "rlhf/training/test_resume.py::test_another_zero_stage_goes_on_from_it",
        "rlhf/training/test_resume.py::test_with_dropout_it_goes_on_to_the_bit",
    ),
    # other options, data, libraries
    31: (
        "rlhf/training/test_going_on_otherwise.py::test_what_changes_no_result_changes_freely",
        "rlhf/training/test_going_on_otherwise.py::test_how_long_and_what_is_looked_at_changes_with_a_note",
        "rlhf/training/test_going_on_otherwise.py::test_what_changes_the_result_is_refused_unless_asked_for",
        "rlhf/training/test_going_on_otherwise.py::test_the_classes_name_options_that_there_are",
        "rlhf/training/test_going_on_otherwise.py::test_more_epochs_and_fewer",
        "rlhf/training/test_going_on.py::test_fewer_iterations_than_are_done_end_the_run",
        "rlhf/training/test_checkpoints.py::test_what_a_checkpoint_does_not_have_begins_anew",
    ),
    32: ("rlhf/training/test_going_on_otherwise.py::test_data_that_changed_is_refused_by_name",),
    33: ("rlhf/training/test_going_on_otherwise.py::test_another_version_of_a_library_is_said",),
    # the same command again: after the end, in the middle of a chain, without the stages before
    34: (
        "rlhf/chain/test_killed_chain.py::test_a_chain_killed_in_every_stage_goes_on_to_the_same_bytes",
        "rlhf/training/test_going_on_otherwise.py::test_a_process_that_dies_at_the_end_is_finished_or_not",
        "rlhf/chain/test_train.py::test_finished_stages_are_skipped",
    ),
    35: (
        "rlhf/chain/test_killed_chain.py::test_a_chain_killed_in_every_stage_goes_on_to_the_same_bytes",
        "rlhf/training/test_going_on.py::test_step_3_goes_on_to_the_same_bytes",
        "rlhf/training/test_going_on.py::test_step_3_goes_on_from_every_iteration",
        "rlhf/training/test_going_on.py::test_step_3_goes_on_from_any_iteration_alone",
        "rlhf/training/test_going_on.py::test_other_runs_of_step_3_go_on",
        "rlhf/training/test_going_on.py::test_a_run_that_patience_ended_stays_ended",
        "faults/test_kills.py::test_a_chain_killed_anywhere_ends_as_if_it_was_not",
    ),
    36: ("rlhf/chain/test_killed_chain.py::test_step_3_alone_needs_the_stages_before_it",),
    37: (
        "rlhf/chain/test_killed_chain.py::test_step_3_alone_needs_the_stages_before_it",
        "rlhf/training/test_going_on_otherwise.py::test_a_process_that_dies_at_the_end_is_finished_or_not",
        "rlhf/chain/test_errors.py::test_an_unfinished_or_damaged_stage_is_no_input",
    ),
    # old checkpoints go, what a crash left goes, what is the user's stays
    38: (
        "rlhf/training/test_checkpoints.py::test_an_old_one_goes_once_the_new_one_is_whole",
        "rlhf/training/test_checkpoints.py::test_a_process_that_dies_while_saving_leaves_the_old_or_the_new",
        "rlhf/training/test_checkpoints.py::test_one_checkpoint_alone_is_refused",
        "rlhf/training/test_checkpoints.py::test_what_lies_beyond_a_damaged_one_goes_with_the_next_save",
        "rlhf/training/test_going_on_otherwise.py::test_a_save_that_was_cut_off_costs_nothing",
    ),
    39: (
        "rlhf/training/test_checkpoints.py::test_only_what_a_save_has_left_is_swept",
        "rlhf/chain/test_killed_chain.py::test_a_chain_killed_in_every_stage_goes_on_to_the_same_bytes",
    ),
    # network file systems; clocks that jump
    40: (
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
        "rlhf/training/test_checkpoints.py::test_a_directory_that_shows_late_is_waited_for",
        "rlhf/training/test_checkpoints.py::test_a_directory_that_never_shows_is_not_waited_for_for_ever",
    ),
    41: ("rlhf/training/test_checkpoints.py::test_the_step_in_the_name_counts_whatever_the_clock_says",),
}

ROWS_C: dict[int, tuple[str, ...]] = {
    # the power fails: after the end, in training; a log that is shorter than it was
    96: (
        "rlhf/training/test_power_cut.py::test_nothing_promised_is_lost",
        "rlhf/training/test_power_cut.py::test_the_same_command_ends_with_the_same_bytes",
        "rlhf/training/test_power_cut.py::test_a_log_that_lost_rows_is_named",
        "faults/test_power_cut.py::test_a_power_cut_after_the_end_loses_nothing",
        "faults/test_power_cut.py::test_a_power_cut_in_training_leaves_the_last_checkpoint",
    ),
    # what a finished stage says of itself; what it started from
    97: (
        "rlhf/storage/test_checkpoint.py::test_a_damaged_stage_is_refused",
        "rlhf/storage/test_checkpoint.py::test_every_flipped_bit_of_a_manifest_is_detected",
        "rlhf/storage/test_checkpoint.py::test_the_layout_of_a_manifest_does_not_matter",
    ),
    98: (
        "rlhf/storage/test_checkpoint.py::test_a_result_is_not_replaced_when_its_input_changed",
        "rlhf/storage/test_checkpoint.py::test_an_unfinished_stage_restarts_when_its_input_changed",
    ),
    # what this user may not read or write; links
    99: (
        "rlhf/storage/test_unreadable.py::test_an_unreadable_checkpoint_is_skipped",
        "rlhf/storage/test_unreadable.py::test_a_disk_that_fails_costs_one_checkpoint",
        "rlhf/storage/test_unreadable.py::test_a_stage_with_unlistable_checkpoints_does_not_restart",
        "rlhf/storage/test_unreadable.py::test_a_save_that_cannot_start_fails_at_once",
        "rlhf/storage/test_unreadable.py::test_an_unwritable_folder_is_refused_at_the_start",
        "rlhf/storage/test_unreadable.py::test_a_lock_of_another_user_is_one_line",
        "rlhf/storage/test_unreadable.py::test_a_manifest_that_is_no_regular_file_is_damaged",
    ),
    # Ctrl-C, SIGTERM and SIGKILL while rows are tokenised
    102: (
        "data/prepare/test_forked.py::test_a_failing_job_ends_the_others",
        "data/prepare/test_forked.py::test_no_process_outlives_its_parent",
        "faults/test_signals.py::test_a_chain_that_tokenises_ends_whole",
    ),
    # a disk that is full anywhere else; the modes of files
    103: (
        "rlhf/storage/test_full_disk.py::test_a_model_that_cannot_be_written_is_one_line",
        "rlhf/storage/test_full_disk.py::test_a_small_file_that_cannot_be_written_is_named",
        "rlhf/storage/test_full_disk.py::test_metrics_that_cannot_be_written_are_one_line",
        "rlhf/storage/test_full_disk.py::test_what_the_machine_refuses_at_the_start_is_one_line",
    ),
    104: ("rlhf/storage/test_full_disk.py::test_a_model_that_cannot_be_written_is_one_line",),
    # the cache of tokenised rows
    105: ("data/prepare/test_cache.py::test_a_changed_entry_is_not_read",),
    # what strangers wrote, made to take all time or memory: rows, YAML, tokenizers, templates
    106: ("data/test_faults.py::test_a_bad_row_stops_the_run",),
    107: ("rlhf/config/test_config.py::test_a_mistake_in_a_file_names_the_file_and_the_place",),
    108: (
        "rlhf/hub/test_model_faults.py::test_a_tokenizer_that_explodes_is_one_line",
        "rlhf/hub/test_model_faults.py::test_a_panic_of_the_tokenizer_over_a_row_is_one_line",
        "rlhf/hub/test_model_faults.py::test_ids_with_gaps_are_refused_by_a_smaller_embedding",
        "rlhf/hub/test_model_faults.py::test_padding_beyond_the_embedding_is_one_line",
    ),
    109: ("rlhf/hub/test_security.py::test_a_template_that_takes_too_much_is_refused",),
    # what the shell gives: stdout, a terminal, limits, words
    110: ("rlhf/test_streams.py::test_a_text_ends_and_a_run_goes_on",),
    111: ("rlhf/training/test_ending.py::test_a_terminal_that_is_gone_asks_to_end_as_sigterm_does",),
    112: (
        "rlhf/launch/test_launch.py::test_too_few_open_files_are_refused_at_the_start",
        "rlhf/config/test_config.py::test_a_word_that_is_no_utf8_is_refused",
    ),
    # a checkpoint that is written beside training
    113: (
        "rlhf/training/test_checkpoints.py::test_a_process_that_dies_while_saving_leaves_the_old_or_the_new",
        "rlhf/training/test_checkpoints.py::test_two_ranks_save_and_fall_back_together",
        "rlhf/training/test_saving.py::test_a_checkpoint_has_the_state_of_its_step",
        "rlhf/training/test_saving.py::test_the_next_save_and_the_end_wait_for_the_one_before",
        "rlhf/training/test_saving.py::test_a_full_disk_is_told_in_the_loop",
        "rlhf/training/test_going_on.py::test_step_3_goes_on_to_the_same_bytes",
    ),
    # values, models and files that break libraries
    114: (
        "rlhf/chain/test_errors.py::test_the_chain_refuses_before_anything_starts",
        "rlhf/chain/test_errors.py::test_a_directory_that_is_none",
        "rlhf/chain/test_errors.py::test_the_home_directory_has_a_name",
    ),
    115: ("step3_ppo/test_stage.py::test_a_model_without_a_finite_loss_is_refused_and_not_exported",),
    116: ("rlhf/hub/test_model_faults.py::test_a_config_that_makes_no_sense_is_one_line",),
    117: (
        "data/read/test_bad_rows.py::test_a_broken_file_is_refused",
        "data/read/test_shapes.py::test_mistaken_records",
    ),
    118: (
        "data/read/test_remote.py::test_a_failed_request_is_one_line",
        "data/read/test_remote.py::test_what_is_not_there_is_one_line",
    ),
    119: ("rlhf/test_plugins.py::test_a_file_that_cannot_be_imported_is_one_line",),
    120: (
        "rlhf/chain/test_restarts.py::test_a_stage_that_ends_without_its_manifest_has_failed",
        "rlhf/test_plugins.py::test_a_file_that_cannot_be_imported_is_one_line",
        "contracts/test_rewards.py::test_mistakes_of_a_function_are_one_line",
    ),
    121: ("rlhf/models/cpu/test_compiling.py::test_half_a_file_of_a_killed_compilation_is_named_with_its_cure",),
    101: ("rlhf/launch/test_launch.py::test_nothing_of_the_current_directory_runs",),
    100: ("rlhf/storage/test_unreadable.py::test_links_are_followed_or_refused_at_the_start",),
}


IN_FAULTS = (
    *(f"faults/test_{name}.py" for name in ("kills", "power_cut", "ranks", "selection", "signals")),
    "multi_node/test_demo_on_two_nodes.py",
    "rlhf/launch/test_launch.py::test_two_ranks_end_well_every_time",
    "rlhf/training/test_going_on.py::test_step_3_goes_on_from_every_iteration",
    "rlhf/training/test_going_on.py::test_step_3_goes_on_from_any_iteration_alone",
    "rlhf/training/test_power_cut.py::test_the_same_command_ends_with_the_same_bytes",
)
"""What only `make test-faults` runs; `make test` runs the other tests of the tables."""


def test_every_fault_has_tests_and_they_exist() -> None:
    rows = ROWS_A | ROWS_B | ROWS_C
    assert len(rows) == len(ROWS_A) + len(ROWS_B) + len(ROWS_C)
    assert sorted(rows)[:42] == list(range(1, 43)) and min(ROWS_C) == 96  # 43 to 95 are of data, models and numbers
    require_collected(rows, IN_FAULTS)


def test_the_points_at_which_faults_happen_exist() -> None:
    """`make test` notices a renamed function, which `make test-faults` would need minutes to find."""
    spec = importlib.util.spec_from_file_location("faults_on_demand", SITE)
    assert spec is not None and spec.loader is not None
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    for module, path, _ in faults.POINTS.values():
        assert callable(operator.attrgetter(path)(importlib.import_module(module))), path
