"""The steps of the Dockerfile, as they are run in a Debian root without a container engine."""

from pathlib import Path

import pytest

from slipstream.tools.run.image_root import Root, Step, main, read_steps

REPOSITORY = Path(__file__).parents[3]


def test_the_steps_are_those_of_the_dockerfile() -> None:
    steps = read_steps((REPOSITORY / "Dockerfile").read_text())
    assert [step.word for step in steps].count("RUN") == 2
    assert Step("RUN", "make $SETUP && rm -rf /var/lib/apt/lists/*") in steps
    assert Step("COPY", ". .") in steps


def test_a_line_that_continues_is_one_step_and_comments_are_none() -> None:
    text = '# an image\nFROM python:3.11-slim-bookworm\nRUN a && \\\n  b\n# more\nCMD ["x"]\n'
    assert read_steps(text)[1:] == [Step("RUN", "a &&   b"), Step("CMD", '["x"]')]


@pytest.mark.parametrize("text", ["", "FROM alpine\n", "FROM python:3.11-slim-bookworm\nADD x /\n"])
def test_a_dockerfile_with_other_steps_or_another_base_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Dockerfile"):
        read_steps(text)


def test_arguments_and_variables_are_those_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    root = Root(tmp_path, {"SETUP": "setup-gpu"})
    for step in read_steps((REPOSITORY / "Dockerfile").read_text()):
        if step.word not in ("FROM", "RUN"):
            root.run(step)
    assert root.variables["SETUP"] == "setup-gpu" and root.variables["OMP_NUM_THREADS"] == "1"
    assert root.variables["PATH"].startswith("/slipstream/.venv/bin:/usr/local/sbin")
    assert (tmp_path / "slipstream/tools/run/image_root.py").exists() and (tmp_path / "data").is_dir()
    assert not (tmp_path / "slipstream/.git").exists() and not (tmp_path / "slipstream/.venv").exists()
    with pytest.raises(ValueError, match=r"only `COPY \. \.` is known"):
        root.run(Step("COPY", "a b"))


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "image_root: " in capsys.readouterr().err and not list(tmp_path.iterdir())
