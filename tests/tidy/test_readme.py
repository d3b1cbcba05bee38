"""What the documents claim: the settings are the code's, the examples run, the proofs exist."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvfabric.fabric.config import FileTierConfig, MemoryTierConfig, PoolConfig, TierConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
RUN_S = 50
"""Below a test's 60 s; an example takes 2 s, one with a Ray cluster 15, on an idle machine."""

PROOF = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
LINK = re.compile(r"\]\(([^)\s#]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

RAY_PRELUDE = """
from kvfabric.actors.netns import isolate_network
from kvfabric.actors.quiet import quiet_ray
quiet_ray()
isolate_network()
"""


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, default and bounds of every setting, as the README's table says them."""
    for name, field in model.model_fields.items():
        part: Any = field.annotation
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield from settings(part, f"{prefix}{name}.")
        elif name == "tiers":
            yield f"{prefix}{name}", "empty", "a list of these:"
            for tier in get_args(get_args(TierConfig)[0]):
                kind = tier.model_fields["type"].default
                rows = settings(tier, f"{kind}: ")
                yield from (row for row in rows if row[0] != f"{kind}: type")
        else:
            yield f"{prefix}{name}", default(field), bounds(field)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if isinstance(value, str):
        return f"`{value}`"
    return "none" if value is None else f"{value:,g}"


def rules(field: FieldInfo) -> Iterator[Any]:
    """Yield the constraints of a field, those of an optional one too."""
    inside: list[Any] = [
        each for kind in get_args(field.annotation) for each in getattr(kind, "__metadata__", ())
    ]
    for each in [*field.metadata, *inside]:
        yield from getattr(each, "metadata", [each])


def bounds(field: FieldInfo) -> str:
    said: list[str] = []
    for rule in rules(field):
        for name, text in (("gt", "above {}"), ("ge", "at least {}"), ("le", "at most {}")):
            if (value := getattr(rule, name, None)) is not None:
                said.append(text.format(f"{value:,g}"))
        if (value := getattr(rule, "multiple_of", None)) is not None:
            said.append(f"a multiple of {value:,g}")
        if getattr(rule, "pattern", None):
            said.append("1 to 64 of `A-Za-z0-9_.-`")
    if "Literal" in str(field.annotation):
        said.append(" or ".join(f"`{value}`" for value in get_args(field.annotation)))
    return ", ".join(said)


def test_the_settings_table_is_the_code():
    table = README.partition("| setting | default | bounds | meaning |")[2].partition("\n\n")[0]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[2:]]
    expected = [list(row) for row in settings(PoolConfig)]
    assert [[row[0].strip("`"), *row[1:3]] for row in rows] == expected
    assert all(row[3] for row in rows), "every setting says what it means"
    assert {FileTierConfig, MemoryTierConfig} == set(get_args(get_args(TierConfig)[0]))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=[pytest.mark.nixl, pytest.mark.slow]),
        pytest.param(1, marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
)
def test_the_examples_run(number: int, machine):
    code = EXAMPLES[number].replace('"readme', f'"readme-{os.getpid()}')
    if "import ray" in code:
        code = RAY_PRELUDE + code
    done = subprocess.run(
        machine.command([sys.executable, "-P", "-c", code]),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert machine.left() == []


def test_every_example_is_run():
    assert len(EXAMPLES) == 2


def test_the_tests_that_documents_name_exist():
    problems: list[str] = []
    for document in DOCUMENTS:
        for path, test in PROOF.findall(document.read_text()):
            file = ROOT / path
            if not file.exists() or (test and f"def {test}(" not in file.read_text()):
                problems.append(f"{document.relative_to(ROOT)}: {path} {test}")
    assert not problems, "\n" + "\n".join(problems)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def test_anchors_lead_to_headings():
    problems: list[str] = []
    for document in DOCUMENTS:
        for target, name in LINK.findall(document.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            file = document.parent / target if target else document
            if name not in {anchor(each) for each in HEADING.findall(file.read_text())}:
                problems.append(f"{document.relative_to(ROOT)}: {target}#{name}")
    assert not problems, "\n" + "\n".join(problems)


def test_the_picture_is_small():
    assert (ROOT / "docs" / "demo.png").stat().st_size < 150_000
