"""Makes text of models, environments and other processes safe to show in a terminal."""


def printable(text: str) -> str:
    """`text` with every character that is not visible escaped, as \\x1b or \\u202e or \\n.

    Such text cannot move the cursor, hide itself or reorder its neighbours. With `rich`, show the result as a
    `rich.text.Text`: rich interprets markup in plain strings.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def printable_block(text: str) -> str:
    """`text` with its line breaks, and each line made printable."""
    return "\n".join(map(printable, text.split("\n")))
