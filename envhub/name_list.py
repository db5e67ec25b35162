"""Writes a table of names as text, which is shorter than a tuple of strings."""


def name_list(text: str) -> tuple[str, ...]:
    """Return the names in `text`, separated by commas: "red, forest green" gives ("red", "forest green")."""
    return tuple(name.strip() for name in text.split(","))
