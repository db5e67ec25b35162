"""Prints the page of one trajectory for `slipstream replay show`."""

from typing import Any

from rich.console import Console
from rich.text import Text

from slipstream.common.process.printable import printable
from slipstream.tools.terminal.output_lines import printable_lines

BAR = "  | "  # before text from the environment or the policy


def print_page(facts: dict[str, Any]) -> None:
    """Print the result of `trajectory_facts`, turn by turn."""
    console = Console(highlight=False)
    page = _head(facts)
    for index, turn in enumerate(facts["turns"]):
        _add_turn(page, index, turn, console)
    console.print(page, soft_wrap=True)


def _head(facts: dict[str, Any]) -> Text:
    """The head of the page: task, return, length, sampling and actor, and its fork and parts if it has any."""
    sampling, kept, fork = facts["sampling"], facts["kept_tokens_mean"], facts["fork"]
    among = "" if kept is None else f", each from {kept:.1f} candidates on average"
    claimed = "" if facts["step"] is None else f", claimed for step {facts['step']}"
    lines = [
        f"{facts['task']}: group {facts['group_id']}, member {facts['member']}, attempt {facts['attempt']}, "
        f"{facts['state']}{claimed}",
        f"return {facts['return']:.4g}, score {facts['score']:.4g}, {'success' if facts['success'] else 'no success'}; "
        f"stop reason {facts['stop_reason']}, outcome {facts['outcome']}",
        f"{facts['num_turns']} turns, {facts['num_tokens']} tokens in {facts['num_branches']} branch(es), policy "
        f"versions {facts['oldest_policy_version']} to {facts['newest_policy_version']}",
        f"sampled at temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}, top_k {sampling['top_k']}, "
        f"at most {sampling['max_turn_tokens']} tokens per turn{among}",
        f"{facts['duration_s']:.2f} s by {facts['actor']} on {facts['host']} ({facts['instance_kind']}, "
        f"${facts['price_per_hour']:g} per hour)",
    ]
    if fork:
        lines.append(f"its first {fork['num_turns']} turns are those of member {fork['parent']}")
    if facts["part_values"]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in facts["part_values"].items())
        lines.append(f"parts of the reward, without their weights: {values}; {facts['scoring_s']:.2f} s")
    return Text("".join(printable(line) + "\n" for line in lines))


def _add_turn(page: Text, index: int, turn: dict[str, Any], console: Console) -> None:
    again = ", a new branch: the chat template rewrote earlier text" if turn["new_branch"] else ""
    page.append(f"\nturn {index}: prompt{again}\n", style="bold")
    _add_quoted(page, turn["prompt"], console, style="dim")
    if turn["state_key"]:
        page.append(f"turn {index}: state\n", style="bold")
        _add_quoted(page, turn["state_key"], console, style="dim")
    versions = ", ".join(map(str, turn["policy_versions"]))
    page.append(
        f"turn {index}: action of {turn['num_tokens']} tokens by version {versions}, log-probability "
        f"{turn['logprob_mean']:.3f} mean, {turn['logprob_min']:.3f} minimum, {turn['generate_s']:.2f} s\n",
        style="bold",
    )
    _add_quoted(page, turn["action"], console, style="green")
    rewards = ", ".join(f"{name} {reward:.4g}" for name, reward in turn["rewards"].items())
    result = (
        f"turn {index}: reward {rewards}; {'valid' if turn['valid_action'] else 'invalid'} action, ended by "
        f"{turn['finish_reason']}, environment {turn['env_s']:.2f} s"
    )
    page.append(printable(result) + "\n", style="bold")


def _add_quoted(page: Text, words: str, console: Console, *, style: str) -> None:
    """Add text from elsewhere with a bar before each line, so that no line can pass for one of ours."""
    for line in printable_lines(words, console, indent=len(BAR)):
        page.append(BAR)
        page.append(line + "\n", style=style)
