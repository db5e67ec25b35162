"""What of the contract somebody else's environment can be held to: checks of tests/envhub/test_env_contract.py."""

from collections.abc import Callable

from tests.envhub import test_env_contract as contract
from tests.envhub.env_cases import Case

# What makes no sense leaves no trace, the expert plays well, and so on, are up to who wrote the environment.
ALWAYS: tuple[Callable[[Case], None], ...] = (
    contract.test_the_same_task_and_actions_give_the_same_episode_on_every_instance,
    contract.test_reset_leaves_nothing_of_the_episode_before,
    contract.test_an_unknown_split_is_refused,
    contract.test_a_restored_snapshot_goes_on_as_the_original,
    contract.test_bytes_that_are_no_snapshot_are_refused_and_change_nothing,
    contract.test_no_action_takes_long_to_read,
    contract.test_a_slow_answer_is_cut_at_the_step_timeout,
    contract.test_step_before_reset_is_an_error,
    contract.test_close_may_be_called_twice_and_a_closed_one_starts_again,
)
