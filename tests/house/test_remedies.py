"""A remedy names only what exists: commands, options, environment variables and arguments.

The texts are read from the source: the second argument of each error, and each "Fix: ". A value
that is only known at run time stands there as X.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields

import click
import pytest
from torch.distributed.run import get_args_parser

import reft
from reft import errors
from reft.cli.main import main
from reft.config import SECRET_VARIABLES, Config
from reft_daemon.main import main as daemon
from tests.support.commands import ROOT

FIX = errors.FIX.strip()
COMMAND = re.compile(
    r"reft-cli (?!(?:on|where|must)\b)([a-z]+)((?: (?:--[a-z-]+|X|[A-Z][A-Z/|]*|…|[a-z]+=X|\S*X\S*))*(?: -- .+)?)"
)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")
VARIABLE = re.compile(r"REFT_[A-Z]+(?:_[A-Z]+)*(?![A-Z_])")
ARGUMENT = re.compile(r"(?<![\w-])([a-z_]+)=(?=['\[(\w])")
# What remedies name of other programs and functions, and whose it is.
OTHERS = {
    "--pid": "docker",
    "per_device_train_batch_size": "transformers.TrainingArguments",
    "callbacks": "transformers.Trainer",
    "use_cudagraphable_rng": "megatron.core.tensor_parallel.model_parallel_cuda_manual_seed",
    "overlap_with_ddp": "torch.distributed.optim.ZeroRedundancyOptimizer",
    "lose": "reft-cli status --what-if",
    "seed": "reft.ResumableLoader",
    "in_order": "torch.utils.data.DataLoader",
    "dispatch_batches": "accelerate.utils.DataLoaderConfiguration",
    "use_stateful_dataloader": "accelerate.utils.DataLoaderConfiguration",
    "storage": "reft.integrations.torchtitan.ReftCheckpointManager.Config",
    "enable": "torchtitan.components.checkpoint.CheckpointManager.Config",
}


def classes() -> set[str]:
    """Returns the names of all classes of errors, those of single modules too."""
    found = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    while True:
        more = {
            node.name
            for _, tree in trees()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in found for base in node.bases)
        }
        if more <= found:
            return found - {"DamagedSlot", "UnreadableSlot"}  # their second argument is the message
        found |= more


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yields the path and the syntax tree of each file of the product."""
    for folder in ("reft", "daemon"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def texts_of(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yields the texts that an expression can have."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(each.value if isinstance(each, ast.Constant) else "X" for each in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.IfExp):
        yield from texts_of(node.body, constants)
        yield from texts_of(node.orelse, constants)
    elif isinstance(node, ast.BoolOp):
        for each in node.values:
            yield from texts_of(each, constants)
    elif isinstance(node, ast.Name) and node.id in constants:
        yield from texts_of(constants[node.id], {})


def remedies_in(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yields line and text of each remedy in a file."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names:
            given = node.args[1:2] + [each.value for each in node.keywords if each.arg == "hint"]
            for each in given:
                yield from ((node.lineno, text) for text in texts_of(each, constants))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node not in parts:
            yield from ((node.lineno, text.partition(FIX)[2].strip()) for text in texts_of(node, {}) if FIX in text)
        elif isinstance(node, ast.FunctionDef) and node.name.strip("_").startswith("remedy"):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield from ((each.lineno, text) for text in texts_of(each.value, constants))


def remedies() -> list[tuple[str, str]]:
    """Returns place and text of each remedy of the product."""
    names = classes()
    return [(f"{path}:{line}", text) for path, tree in trees() for line, text in remedies_in(tree, names) if text]


REMEDIES = remedies()


def options_of(command: click.Command) -> set[str]:
    return {option for each in command.params for option in each.opts if option.startswith("--")}


def variables() -> set[str]:
    """Returns all variables that something reads."""
    read = {f"REFT_{each.name.upper()}" for each in fields(Config)}
    read |= {f"REFT_{option[2:].replace('-', '_').upper()}" for option in options_of(daemon)}
    read |= {str(each.envvar) for verb in main.commands.values() for each in verb.params if each.envvar}
    read |= {"REFT_X", *SECRET_VARIABLES}
    return read | set(re.findall(r'\bget\("(REFT_[A-Z_]+)"', (ROOT / "reft/config.py").read_text()))


def wrong_commands(text: str) -> list[str]:
    """Returns the commands of `reft-cli` in a text that can't be typed so."""
    wrong = []
    for match in COMMAND.finditer(text):
        verb, words = match[1], match[2].split()
        if verb not in main.commands:
            wrong.append(match[0])
            continue
        needed = [each for each in main.commands[verb].params if isinstance(each, click.Argument)]
        bare = [each for each in words if not each.startswith("--")]
        is_short = len(bare) < sum(each.required for each in needed) or (verb == "purge" and not words)
        if is_short or not set(OPTION.findall(match[2])) <= options_of(main.commands[verb]):
            wrong.append(match[0])
    return wrong


def test_remedies_are_found():
    assert len(REMEDIES) > 150
    assert ("status", "purge") <= tuple(
        sorted({match[1] for _, text in REMEDIES for match in COMMAND.finditer(text)}, reverse=True)
    )
    tree = ast.parse('R = "a"\nraise NoRoom("x", R if y else f"b {z}")\nlog("Fix: c")\ndef remedy_of(): return "d"\n')
    assert sorted(text.strip() for _, text in remedies_in(tree, {"NoRoom"})) == ["a", "b X", "c", "d"]


def test_each_command_of_a_remedy_can_be_typed():
    assert [(place, wrong) for place, text in REMEDIES if (wrong := wrong_commands(text))] == []
    assert wrong_commands("reft-cli purge, or reft-cli list shows them; reft-cli prune X") == [
        "reft-cli purge", "reft-cli list", "reft-cli prune X",
    ]  # fmt: skip
    assert wrong_commands("reft-cli purge JOB --force") == ["reft-cli purge JOB --force"]
    assert wrong_commands("reft-cli purge X --yes; reft-cli status lists them; reft-cli verify X shows it") == []


def test_each_option_of_a_remedy_exists():
    known = {option for verb in main.commands.values() for option in options_of(verb)} | options_of(daemon)
    known |= {option for action in get_args_parser()._actions for option in action.option_strings} | OTHERS.keys()
    unknown = [(place, sorted(rest)) for place, text in REMEDIES if (rest := set(OPTION.findall(text)) - known)]
    assert unknown == []


def test_each_variable_of_a_remedy_is_read():
    known = variables()
    unknown = [(place, sorted(rest)) for place, text in REMEDIES if (rest := set(VARIABLE.findall(text)) - known)]
    assert unknown == [] and "REFT_TLS_CERT" in known and "REFT_JOB" in known and "REFT_NONE" not in known


def test_each_argument_of_a_remedy_exists():
    known = set(inspect.signature(reft.attach).parameters) | {each.name for each in fields(Config)} | OTHERS.keys()
    unknown = [(place, sorted(rest)) for place, text in REMEDIES if (rest := set(ARGUMENT.findall(text)) - known)]
    assert unknown == []


@pytest.mark.parametrize("text", sorted({text for _, text in REMEDIES}))
def test_a_remedy_is_no_sentence_glued_to_another(text):
    assert FIX not in text and not text.endswith(".") and text == text.strip()
