"""The pages' Python runs top to bottom, one namespace a page, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.M | re.S)
PAGES = ["tutorial", "coming-from"]


def as_pattern(text):
    """What a page says is printed; "..." stands for what differs from run to run."""
    return re.escape(text).replace(re.escape("..."), r"[^\n]*")


@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (DOCS / f"{page}.md").read_text()
    blocks = list(BLOCK.finditer(source))
    assert len(blocks) == source.count("```python") >= 5
    names: dict = {"__name__": page}
    for found in blocks:
        code, said = found.groups()
        line = source[: found.start()].count("\n") + 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # As many empty lines as lead to the block: an error then names the page's own line.
            exec(compile("\n" * line + code, str(DOCS / f"{page}.md"), "exec"), names)
        assert re.fullmatch(as_pattern(said or ""), printed.getvalue()), (
            f"docs/{page}.md:{line} printed\n{printed.getvalue()}and says\n{said}"
        )
