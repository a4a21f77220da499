import getpass
import re
import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from reft.elastic.options import OPTIONS, check, number, rendezvous_id, script_of
from reft.elastic.stores import etcd, tcp
from reft.errors import ConfigError

ROOT = Path(__file__).parents[2]


def parameters(endpoint="", nodes=1, **config):
    return RendezvousParameters("reft", endpoint, "none", nodes, nodes, **config)


def test_the_rendezvous_id_is_the_run_id_or_slurm_job_or_user_and_script():
    names = [
        rendezvous_id("run1", "7", "train.py"), rendezvous_id("none", "7", "train.py"), rendezvous_id("none", "", "train.py"),
        rendezvous_id("none", "", "other.py"), rendezvous_id("7", "", "train.py"),
    ]  # fmt: skip
    assert names[:2] == ["id.run1", "slurm.7"]
    assert names[2].startswith(f"script.{getpass.getuser()}.")
    assert len(set(names)) == len(names), "each job has its own id"


def test_the_script_is_found_among_the_flags_of_torchrun():
    def agent(*flags):
        return script_of(["/usr/bin/torchrun", "--nproc-per-node=2", "--rdzv-conf=a=1,b=2", *flags, "--lr", "1"])

    assert agent("train.py") == "train.py"
    assert agent("-m", "train.py") == "-m train.py"
    assert script_of(["my_launcher.py", "--lr", "1"]) == "my_launcher.py"


def test_unknown_options_and_wrong_numbers_are_refused():
    check(parameters(timeout=900, join_timeout="7"))
    for config in ({"join_timout": 7}, {"join_timeout": 0}, {"shrink_timeout": "soon"}, {"join_timeout": 10**15}):
        with pytest.raises(ConfigError):
            check(parameters(**config))
    assert number(parameters(), "shrink_timeout") == OPTIONS["shrink_timeout"][0]


def test_an_option_that_is_neither_yes_nor_no_is_refused():
    check(parameters(is_host="false", warm="y"))
    for name in ("is_host", "warm"):
        with pytest.raises(ConfigError, match=f"{name}=perhaps is neither yes nor no.\nFix: yes, no,"):
            check(parameters(**{name: "perhaps"}))


def test_several_nodes_need_a_valid_endpoint():
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        tcp.connect(parameters(nodes=2), "job")
    with pytest.raises(ConfigError, match="the port is missing"):
        tcp.connect(parameters("127.0.0.1:0", nodes=2), "job")
    for endpoint in ("etcd://", "etcd://host"):
        with pytest.raises(ConfigError, match="members"):
            etcd.connect(parameters(endpoint), "job")


def test_port_0_of_one_node_is_a_store_in_the_agent(monkeypatch):
    def start(*_):
        raise AssertionError("a process was started for the store of one agent")

    monkeypatch.setattr(tcp, "_ensure_host", start)
    backend, store = tcp.connect(parameters("localhost:0", read_timeout=5), "job")
    assert backend.get_state() is None
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_program_at_the_endpoint_that_is_no_store_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(
            RendezvousConnectionError, match=f"(?s)no store answers at {endpoint} within 1 s.*does torchrun run on"
        ):
            tcp.connect(parameters(endpoint, read_timeout=1), "job")


def test_the_readme_lists_all_options_with_their_defaults():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "reft/elastic/README.md").read_text(), re.MULTILINE)
    listed = {name: default.strip(" `") for name, default in rows if name in OPTIONS}
    assert listed == {name: str(default) if default not in ("", None) else "" for name, (default, _) in OPTIONS.items()}
