"""The API reference: `pdoc fnshard` builds without a warning, and has a page for every public module."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

import fnshard


@pytest.mark.long  # imports and writes all pages
def test_pdoc_builds_without_a_warning(tmp_path: Path) -> None:
    import pdoc

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc("fnshard", output_directory=tmp_path)
    assert [str(each.message) for each in caught if "pdoc" in each.filename] == []
    packages = {n for n in fnshard.__all__ if f"fnshard.{n}" in sys.modules}
    assert "optim" in packages and packages <= {page.stem for page in (tmp_path / "fnshard").glob("*.html")}
    text = (tmp_path / "fnshard.html").read_text(encoding="utf-8")
    assert text.index(">The map<") < text.index('<section id="AgreementError">')  # it opens the reference
    assert text.count("Arguments:</h6>") > 10  # Google's docstrings are parsed
