"""Rewards of your own for the rows of NAME.jsonl, in TRL's signature: one number for each completion."""


def brief(completions: list[str], prompts: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for an answer without further words; each column of NAME.jsonl is an argument."""
    return [float(len(text.split()) <= 1) for text in completions]
