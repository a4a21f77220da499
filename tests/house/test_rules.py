"""House rules. Each rule is a function of text; tests show that each finds its violations."""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("reft", "daemon", "proto", "examples", "tests", "bench", ".ci")
TOP = ("pyproject.toml", "README.md", "Makefile", ".gitignore")
TEXT = {
    ".py",
    ".pyi",
    ".c",
    ".proto",
    ".md",
    ".toml",
    ".txt",
    ".sh",
    ".yaml",
    ".yml",
    ".json",
    ".html",
    ".css",
    ".js",
    "",
}
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

MOST_LINES_A_FILE = 800  # split a file by subject, not at this number
MOST_LINES_A_FUNCTION = 60
MOST_WORDS_A_FIRST_SENTENCE = 15  # a word has a letter or digit

# path prefix → the rules (names of functions) that do not hold there
EXCEPTIONS: dict[str, set[str]] = {
    "reft/config.py": {"environment"},  # the only module that reads the environment
    "reft/elastic/": {"environment"},  # sets variables for its workers
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s|\n\s*\n")
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


# All rules look at one file before the next, so the newest text is enough.
@functools.lru_cache(maxsize=1)
def nodes(text: str) -> list[ast.AST]:
    """Returns the syntax tree of a file, node by node."""
    return list(ast.walk(ast.parse(text)))


@functools.lru_cache(maxsize=1)
def dotted(text: str) -> list[tuple[str, int]]:
    """Returns every imported name, and every a.b that is used, with its line."""
    found: list[tuple[str, int]] = []
    for node in nodes(text):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += ((f"{node.module or ''}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
            found.append((ast.unparse(node), node.lineno))
    return found


def length(text: str) -> list[str]:
    lines = len(text.splitlines())
    return [f"{lines} lines, at most {MOST_LINES_A_FILE}"] if lines > MOST_LINES_A_FILE else []


def functions(text: str) -> list[str]:
    violations = []
    for node in nodes(text):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_A_FUNCTION:
                violations.append(f"{node.lineno}: {node.name} has {lines} lines, at most {MOST_LINES_A_FUNCTION}")
    return violations


def first_sentence(text: str) -> list[str]:
    """Finds docstrings whose first sentence is long, or runs on into a second line."""
    violations = []
    for node in nodes(text):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if not docstring:
            continue
        sentence = SENTENCE_END.split(docstring.strip(), maxsplit=1)[0]
        words = sum(any(map(str.isalnum, token)) for token in sentence.split())
        where = f"{getattr(node, 'lineno', 1)}: {sentence.splitlines()[0]}"
        if words > MOST_WORDS_A_FIRST_SENTENCE:
            violations.append(f"{where}: {words} words, at most {MOST_WORDS_A_FIRST_SENTENCE}")
        elif "\n" in sentence:
            violations.append(f"{where}: more than one line")
    return violations


def dangerous(text: str) -> list[str]:
    """Finds code that runs other people's data as code.

    Also finds multiprocessing.shared_memory: its tracker unlinks segments that others still use.
    """
    violations = []
    for name, line in dotted(text):
        if name.partition(".")[0] in UNPICKLERS or name == "torch.load":
            violations.append(f"{line}: {name} runs what it reads")
        if name.startswith("multiprocessing.shared_memory"):
            violations.append(f"{line}: {name}: its tracker unlinks segments that others still use")
    for node in nodes(text):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            violations.append(f"{node.lineno}: {node.func.id}")
        if isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) != "False":
            violations.append(f"{node.value.lineno}: a shell reads its arguments as code")
    return violations


def vetoed(text: str) -> list[str]:
    """Finds stack frames, executable memory, and addresses of torch's own objects."""
    names = {"_getframe", "_current_frames", "PROT_EXEC", "_cdata"}
    strings = re.compile(r"_cdata|PROT_EXEC|_getframe")
    violations = [f"{line}: {name}" for name, line in dotted(text) if name.rpartition(".")[2] in names]
    for node in nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and strings.fullmatch(node.value):
            violations.append(f"{node.lineno}: {node.value}")
    return violations


def environment(text: str) -> list[str]:
    names = {f"os.{name}" for name in ENVIRONMENT}
    return [f"{line}: {name}: ask reft.config" for name, line in dotted(text) if name in names]


def sleeps(text: str) -> list[str]:
    lines = [line for name, line in dotted(text) if name == "time.sleep"]
    return [f"{line}: a test waits for an event, not for a time" for line in lines]


def asserts(text: str) -> list[str]:
    for node in nodes(text):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.raises"):
            return []
    return ["asserts nothing"]


def leftovers(text: str) -> list[str]:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME)\b")  # in two parts, so that this line is none
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if words.search(line)]


def machine_paths(text: str) -> list[str]:
    paths = re.compile(r"(?<![\w.~})-])/" + r"(home|work|root|Users)(?![\w-])")
    return [f"{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if paths.search(line)]


def checkers(path: str) -> list[Callable[[str], list[str]]]:
    """Returns the rules for the file at this path (relative, with slashes)."""
    rules = [leftovers, machine_paths]
    if path.endswith(".py"):
        rules += [length, functions, dangerous]
        if path.startswith(("reft/", "daemon/")):
            rules += [environment, vetoed, first_sentence]
        if path.startswith("tests/"):
            rules.append(sleeps)
            if path.rpartition("/")[2].startswith("test_"):
                rules.append(asserts)
    spared = set().union(*(names for prefix, names in EXCEPTIONS.items() if path.startswith(prefix)))
    return [rule for rule in rules if rule.__name__ not in spared]


def files(root: Path) -> list[str]:
    paths = [name for name in TOP if (root / name).is_file()]
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                paths.append(path.relative_to(root).as_posix())
    return [path for path in paths if not GENERATED.search(path)]


def test_the_house_rules_hold():
    violations = []
    for path in files(ROOT):
        text = (ROOT / path).read_text()
        violations += [f"{path}: {rule.__name__}: {each}" for rule in checkers(path) for each in rule(text)]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        (length, "x = 1\n" * 801, "x = 1\n" * 800),
        (functions, "def f():\n" + "    x = 1\n" * 60, "def f():\n" + "    x = 1\n" * 59),
        (
            functions,
            "class A:\n    async def f():\n" + "        x = 1\n" * 60,
            "class A:\n" + "    x = 1\n" * 99,
        ),
        (first_sentence, f"'{'word ' * 16}'", f"'{'word ' * 15}→ —'"),
        (first_sentence, f"'{'word ' * 15}v1.2. More.'", f"'{'word ' * 14}v1.2. {'more ' * 16}'"),
        (first_sentence, f"'{'word ' * 15}last: more'", f"'A title: {'more ' * 16}'"),
        (
            first_sentence,
            "class A:\n    def f():\n        '''Runs\n        on.'''",
            f"class A:\n    def f():\n        '''A title\n\n        {'more ' * 16}'''",
        ),
        (dangerous, "import pickle", "import json"),
        (dangerous, "from dill import loads", "from json import loads"),
        (dangerous, "eval('1')", "model.eval()"),
        (dangerous, "torch.load(f)", "safetensors.torch.load_file(f)"),
        (dangerous, "from torch import load", "from json import load"),
        (dangerous, "from multiprocessing import shared_memory", "import multiprocessing"),
        (dangerous, "f = multiprocessing.shared_memory", "mmap.mmap(-1, 1)"),
        (dangerous, "subprocess.run('ls', shell=True)", "subprocess.run(['ls'])"),
        (vetoed, "sys._getframe(1)", "inspect.signature(f)"),
        (vetoed, "from sys import _getframe", "from sys import flags"),
        (vetoed, "mmap.mmap(-1, 1, prot=mmap.PROT_EXEC)", "mmap.mmap(-1, 1, prot=mmap.PROT_READ)"),
        (vetoed, "getattr(tensor, '_cdata', 0)", "tensor.data_ptr()"),
        (environment, "os.environ['A']", "os.path.join('a')"),
        (environment, "from os import getenv", "from os import path"),
        (sleeps, "time.sleep(1)", "time.monotonic()"),
        (sleeps, "from time import sleep", "asyncio.sleep(0)"),
        (asserts, "def test():\n    f()", "def test():\n    assert f()"),
        (
            asserts,
            "def test():\n    g.raises(1)",
            "def test():\n    with pytest.raises(OSError):\n        f()",
        ),
        (leftovers, "# TO" + "DO: later", "# to do it later"),
        (machine_paths, "cd /ho" + "me/me/x", "cd ~/x; cat reft/home; echo $DIR/work"),
        (machine_paths, "'/wo" + "rk'", "https://example.org/work /work-around"),
    ],
)
def test_each_rule_finds_its_violation_and_nothing_else(rule, bad, good):
    assert len(rule(bad)) == 1
    assert rule(good) == []


def test_an_exception_holds_only_for_its_path():
    assert environment not in checkers("reft/config.py")
    assert environment in checkers("reft/client/config.py")
    assert dangerous in checkers("reft/elastic/handler.py")
