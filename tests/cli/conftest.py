import pytest
from cli_runner import CONFIG, PROGRAM, Program, sample_text


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    assert PROGRAM.exists(), f"no program at {PROGRAM}: run `make build`"
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(sample_text(4000))
    (folder / "tiny.toml").write_text(CONFIG)
    return Program(folder)


@pytest.fixture(scope="session")
def trained(program):
    """A finished run that the tests only read."""
    run = program.folder / "trained"
    program.ok("train", "tiny.toml", "--data", "text.txt", "--out", run)
    return run
