"""The pages of docs/environments: one for each environment, each with a played episode."""

import pytest

from slipstream.envhub.catalogue import ENVS, _maker, _signature
from slipstream.tools.lab.docs.env_pages import PAGES, with_episodes


def test_every_environment_has_a_page_that_names_its_options_and_every_page_an_environment() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(ENVS)
    index = (PAGES.parent / "environments.md").read_text()
    for name in ENVS:
        page = (PAGES / f"{name}.md").read_text()
        assert f"[`{name}`](environments/{name}.md)" in index and page.startswith(f"# {name}: ")
        for option in _signature(_maker(name)).parameters:
            assert f"`{option}`" in page, f"{name} has an option {option} that its page does not name"


@pytest.mark.parametrize("name", ENVS)
def test_the_episode_on_the_page_equals_a_played_one(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    assert f"<!-- episode of {name}: " in page
    assert with_episodes(page) == page, "run make env-pages, and read what changed"


def test_a_page_without_an_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="a page needs"):
        with_episodes("# nothing here")
