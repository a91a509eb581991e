"""Run what README.md shows, and check that its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_run_in_order(page):
    namespace = {"__name__": "__main__"}  # torch looks its classes up in their module
    for block in python_blocks(page):
        exec(compile(block, page.name, "exec"), namespace)  # warnings are errors, as in every test


def test_the_readme_shows_every_kind_of_model():
    text = "\n".join(python_blocks(ROOT / "README.md"))
    for word in ("np.exp", "torch.exp", "theta", "torch.nn.Module", "residual=", "curve_fit", "report()"):
        assert word in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)#]*(?:#[^)]*)?)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
