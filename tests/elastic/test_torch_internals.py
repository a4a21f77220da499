"""A missing private name of torch or Python: the backend refuses it by name, or prints a line."""

from __future__ import annotations

import importlib.util
import re
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from reft.elastic import torch_internals
from reft.elastic.torch_internals import CACHES, REQUIRED, WARM, forget_worker_store, missing, missing_in, require
from reft.errors import ConfigError

TABLES = {**REQUIRED, **WARM}


def without(path: str, name: str):
    """Returns a `find` for a torch without one name."""

    def find(asked: str) -> object:
        if asked != path:
            return resolve_name(asked)
        return type("Owner", (), dict.fromkeys(each.name for each in TABLES[path] if each.name != name))

    return find


def test_this_torch_and_python_have_all_names():
    assert missing(REQUIRED) == missing(WARM) == []


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in TABLES.items() for name in names])
def test_each_missing_name_is_found(path, name):
    table = REQUIRED if path in REQUIRED else WARM
    assert missing(table, without(path, name.name)) == [name]


def test_a_missing_name_is_refused_with_the_remedy():
    (path, names), *_ = REQUIRED.items()
    with pytest.raises(
        ConfigError, match=rf"torch 2\.99 has no {re.escape(str(names[0]))}.*\nFix: install torch 2\.13"
    ):
        require(missing(REQUIRED, without(path, names[0].name)), "2.99")


def test_all_names_of_a_missing_module_or_class_are_missing():
    def find(path: str) -> object:
        raise ImportError(path) if ":" not in path else AttributeError(path)

    assert missing(REQUIRED, find) == [name for names in REQUIRED.values() for name in names]


@pytest.mark.parametrize("name", ["_Action", "_RendezvousStateHolder", "_remove_participant_epilogue"])
def test_torchrun_gets_the_refusal_when_it_loads_the_handler(name, monkeypatch):
    monkeypatch.delattr(dynamic_rendezvous, name)
    spec = importlib.util.spec_from_file_location("loaded_anew", torch_internals.__file__)
    with pytest.raises(ConfigError, match=rf"dynamic_rendezvous\.{name}, which reft needs for --rdzv-backend=reft"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_both_caches_are_cleared_and_a_missing_one_is_named():
    handler = SimpleNamespace(_bootstrap_store_info=1, _shared_tcp_store_server=2)
    forget_worker_store(handler)
    assert vars(handler) == {"_bootstrap_store_info": None, "_shared_tcp_store_server": None}
    del handler._bootstrap_store_info
    assert [str(name) for name in missing_in(CACHES, handler)] == ["DynamicRendezvousHandler._bootstrap_store_info"]
    forget_worker_store(handler)
    assert not hasattr(handler, "_bootstrap_store_info")


def test_the_outputs_of_a_worker_are_torchs_files_or_the_agents_own(tmp_path):
    with open(tmp_path / "out", "w") as file:
        assert torch_internals.outputs_of(SimpleNamespace(_stdout=file, _stderr=None)) == [file.fileno(), 2]
    assert torch_internals.outputs_of(SimpleNamespace(_stdout=None)) is None
