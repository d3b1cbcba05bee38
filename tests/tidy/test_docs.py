"""The documents: their links lead somewhere, their commands exist, their tables are the code's."""

import re
from pathlib import Path

from kvfabric.fabric.metrics import markdown

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    file
    for file in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")))
    if file.exists()
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAKE = re.compile(r"(?:`|^\s*\$? ?)make ([a-z]+)", re.MULTILINE)


def test_the_documents_are_there() -> None:
    assert ROOT / "AGENTS.md" in DOCUMENTS
    assert ROOT / "docs" / "HACKING.md" in DOCUMENTS


def test_relative_links_resolve() -> None:
    problems = [
        f"{file.relative_to(ROOT)}: {target}"
        for file in DOCUMENTS
        for target in LINK.findall(file.read_text())
        if not re.match(r"[a-z]+:|#", target)
        and not (file.parent / target.partition("#")[0]).exists()
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_the_make_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "soak", "gpu", "bench", "lint", "clean"} <= targets
    problems = [
        f"{file.relative_to(ROOT)}: make {target}"
        for file in DOCUMENTS
        for target in MAKE.findall(file.read_text())
        if target not in targets
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_the_metrics_document_is_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "run `make docs`"
