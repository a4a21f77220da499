"""Each word has one meaning: class names are unique, and the page explains their words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.support.syntax import classes_of, tree

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "reft/WORDS.md"
ROW = re.compile(r"^\| ([a-z][a-z -]*) \| (?!meaning)(.+) \|$", re.MULTILINE)
CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
# Adapters for trainers take their names from these trainers; descriptions of schedules have the
# field's names.
ASIDE = ("reft/integrations/", "reft/schedules.py")
SINGULAR = {"leaves": "leaf", "losses": "loss", "reattach": "re-attach"}


def sources() -> dict[str, str]:
    """Returns the text of each module of the product, without generated ones."""
    paths = [*ROOT.glob("reft/**/*.py"), *ROOT.glob("daemon/**/*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if "/v1/" not in str(path)}


def classes(texts: dict[str, str]) -> dict[str, list[str]]:
    """Returns the public top-level classes and their files, exceptions included."""
    files_by_class = defaultdict(list)
    for path, text in texts.items():
        if not path.startswith(ASIDE):
            for node in tree(text).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files_by_class[node.name].append(path)
    return files_by_class


def exceptions(texts: dict[str, str]) -> set[str]:
    """Returns the names of all classes that derive from an exception, directly or not."""
    bases = {
        node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
        for text in texts.values()
        for node in classes_of(text)
    }
    raised = {
        name
        for name in (base for parents in bases.values() for base in parents)
        if name.endswith(("Error", "Exception"))
    }
    while more := {name for name, parents in bases.items() if name not in raised and raised.intersection(parents)}:
        raised |= more
    return raised


def noun(name: str) -> str:
    """Returns the last word of a class name, in the singular."""
    word = CAMEL.findall(name)[-1].lower()
    return SINGULAR.get(word, word)


def unexplained(names: set[str], words: set[str]) -> list[str]:
    """Returns the class names whose last word is not on the page."""
    return sorted(name for name in names if not {noun(name), noun(name).removesuffix("s")} & words)


def test_no_class_name_is_defined_twice():
    assert {name: files for name, files in classes(sources()).items() if len(files) > 1} == {}


def test_each_class_name_ends_in_a_word_of_the_page():
    texts = sources()
    words = {word for word, _ in ROW.findall(PAGE.read_text())}
    assert unexplained(set(classes(texts)) - exceptions(texts), words) == []


def test_each_word_stands_on_the_page_once():
    words = [word for word, _ in ROW.findall(PAGE.read_text())]
    assert sorted(words) == sorted(set(words))


def test_each_word_of_the_page_is_used():
    text = "\n".join(sources().values()).lower().replace("_", " ")
    used = set(re.findall(r"[a-z]+", text))
    unused = [word for word, _ in ROW.findall(PAGE.read_text()) if not {word, f"{word}s", f"{word}es"} & used]
    unused = [word for word in unused if not re.search(rf"\b{word}(s|es)?\b", text)]  # words such as "record slot"
    names = {noun(name) for name in classes(sources())}
    assert [word for word in unused if word not in names] == []


def test_each_rule_finds_its_violation():
    twice = {"reft/a.py": "class Plan:\n    pass\n", "daemon/b.py": "class Plan:\n    pass\n"}
    assert classes(twice) == {"Plan": ["reft/a.py", "daemon/b.py"]}
    raised = {"a.py": "class A(ReftError):\n    pass\nclass B(A):\n    pass\nclass C(Thing):\n    pass\n"}
    assert exceptions(raised) == {"ReftError", "A", "B"}
    assert unexplained({"SavePlan", "CopyStats", "OwnLeaves", "BigRiddle"}, {"plan", "stat", "leaf"}) == ["BigRiddle"]
