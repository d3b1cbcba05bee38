"""Sizes, words and habits of the source that no linter knows. Exceptions: exceptions.toml."""

import ast
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("fabric", "tiers", "router", "kernels", "actors")
EXCEPTIONS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (Path(__file__).parent / "exceptions.toml").read_text()
)

FILE_LINES_MAX = 450
""""About 400", so that a file of 410 is not cut in two at a bad place."""
FUNCTION_LINES_MAX = 60
"""What fits on a screen. The docstring does not count."""

# In two halves, so that this file does not contain what it bans.
WORDS = {
    r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b": "do it, leave it out, or file an issue",
    r"(?<![\w.~-])/(wo" + r"rk|ro" + r"ot)/": "a folder of one machine: use tmp_path or an option",
    r"pypi\.o" + r"rg|pythonho" + r"sted|npm" + r"js\.|deb\.deb" + r"ian": "a registry's host: "
    "name packages, not where they come from",
    r"index-u" + r"rl|find-li" + r"nks": "where packages come from is the machine's setting",
}
REAL_TIME = re.compile(
    r"(time\.(sleep|time|monotonic|perf_counter|process_time)(_ns)?|asyncio\.sleep"
    r"|(datetime\.)?datetime\.(now|utcnow|today)|SystemClock)"
)
REAL_TIME_MARKS = re.compile(r"\bmark\.(ray|nixl|gpu|real_vllm)\b")
"""Tests of real processes may wait for them, with a deadline."""


def text_files() -> Iterator[Path]:
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ""}
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if is_ours(Path(folder) / name)]
        for file in map(Path(folder).joinpath, files):
            if file.suffix in suffixes and not file.is_symlink() and not file.name.startswith("."):
                yield file


def is_ours(folder: Path) -> bool:
    built = folder.name in ("build", "dist", "__pycache__") or folder.suffix == ".egg-info"
    hidden = folder.name.startswith(".") and folder.name != ".ci"
    return not (built or hidden or (folder / "pyvenv.cfg").exists())


def python_files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if folder != "kvfabric" or file.parent == ROOT / folder:
                yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    def walk(
        node: ast.AST, prefix: str
    ) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(decorator) for decorator in function.decorator_list}
    return not decorators.isdisjoint({"triton.jit", "kernel"})  # `kernel` is kernels.jit's


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def judge(rule: str, offences: Mapping[str, str]) -> None:
    """Fail for what broke the rule without an exception, and for exceptions without an offence."""
    excused = EXCEPTIONS[rule]
    problems = [f"{place}: {why}" for place, why in offences.items() if place not in excused]
    problems += [
        f"{place}: not needed any more in exceptions.toml [{rule}]"
        for place in excused
        if place not in offences
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_files_are_short() -> None:
    offences = {}
    for path, tree in python_files(*ROOMS, "kvfabric", "examples", "tests"):
        lines = len((ROOT / path).read_text().splitlines())
        if lines > FILE_LINES_MAX and not any(is_triton(node) for _, node in functions(tree)):
            offences[path] = f"{lines} lines, more than {FILE_LINES_MAX}: split it by subject"
    judge("long_file", offences)


def test_functions_are_short() -> None:
    offences = {
        f"{path}:{name}": f"{length(node)} lines, more than {FUNCTION_LINES_MAX}: split it"
        for path, tree in python_files(*ROOMS, "kvfabric", "examples")
        for name, node in functions(tree)
        if length(node) > FUNCTION_LINES_MAX and not is_triton(node)
    }
    judge("long_function", offences)


def test_no_banned_words() -> None:
    offences = {}
    for file in text_files():
        text = file.read_text(errors="replace")
        for pattern, instead in WORDS.items():
            if found := re.search(pattern, text):
                line = text.count("\n", 0, found.start()) + 1
                path = str(file.relative_to(ROOT))
                offences[path] = f"line {line} says {found.group()!r}: {instead}"
    judge("word", offences)


def is_broad(node: ast.AST) -> bool:
    """Whether this catches everything and goes on. Cleaning up and raising again is fine."""
    everything = {"Exception", "BaseException"}
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {ast.unparse(each) if each else "BaseException" for each in caught}
        return bool(names & everything) and not isinstance(node.body[-1], ast.Raise)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
        return any(ast.unparse(each) in everything for each in node.args)
    return False


def test_errors_are_caught_by_name() -> None:
    offences = {}
    for path, tree in python_files(*ROOMS, "kvfabric", "examples"):
        places = [("module", tree), *functions(tree)]
        for node in ast.walk(tree):
            if is_broad(node):
                line = getattr(node, "lineno", 0)
                inside = [name for name, place in places[1:] if spans(place, line)]
                offences[f"{path}:{inside[-1] if inside else 'module'}"] = (
                    f"line {line} catches everything: name the error. Only a thread's outermost "
                    "loop may, if it counts kvfabric_loop_errors_total: list it in exceptions.toml"
                )
    judge("broad_except", offences)


def spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= getattr(node, "end_lineno", 0)


def test_rooms_are_imported_through_the_package() -> None:
    problems = []
    for path, tree in python_files(*ROOMS, "kvfabric", "examples", "tests"):
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            problems += [
                f"{path}:{node.lineno}: import kvfabric.{name}"
                for name in names
                if name.partition(".")[0] in ROOMS
            ]
    assert not problems, "\n" + "\n".join(problems)


def test_tests_neither_sleep_nor_read_the_clock() -> None:
    offences = {}
    for path, tree in python_files("tests"):
        if path.startswith("tests/bench/") or REAL_TIME_MARKS.search((ROOT / path).read_text()):
            continue
        for node in ast.walk(tree):
            used = ""
            if isinstance(node, ast.Attribute | ast.Name):
                used = ast.unparse(node)
            elif isinstance(node, ast.ImportFrom) and node.module in ("time", "asyncio"):
                used = next((f"{node.module}.{alias.name}" for alias in node.names), "")
            if REAL_TIME.fullmatch(used):
                offences[path] = f"line {node.lineno} uses {used}: take the `clock` fixture"
    judge("real_time", offences)
