"""What needs no Ray: it is not imported, and where it is missing, that is what is said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hotkv_trio import InvalidInput
from hotkv_trio.ray import DeploymentFailed, DeploymentUnknown, ReplicaId
from hotkv_trio.ray._names import check_name, replica_name, replicas_in, room_name, tenants_of


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("module", ["hotkv_trio", "hotkv_trio.ray", "hotkv_trio._cli"])
def test_importing_does_not_import_ray(module: str) -> None:
    assert run(f"import sys, {module}; print('ray' in sys.modules)") == "False\n"


def test_without_ray_it_says_how_to_get_it() -> None:
    said = run(
        "import sys; sys.modules['ray'] = None\n"
        "import trio, hotkv_trio\n"
        "from hotkv_trio.ray import discover\n"
        "try: trio.run(discover, 'x')\n"
        "except hotkv_trio.InvalidInput as error: print(error)"
    )
    assert "pip install '.[ray]' in hotkv-trio's folder" in said


def test_names_say_what_they_are_of() -> None:
    ids = [ReplicaId(1, 0), ReplicaId(0, 12), ReplicaId(0, 2)]
    assert replica_name("m.1", ReplicaId(0, 12)) == "hotkv:m.1:0:12"
    others = ["hotkv:m.1:keeper", "hotkv:mx1:0:0", "hotkv:m.1:0", "elsewhere"]
    assert replicas_in("m.1", [*others, *(replica_name("m.1", one) for one in ids)]) == sorted(ids)
    assert tenants_of("m.1", room_name("m.1", ids)) == ids
    assert tenants_of("m", room_name("m.1", ids)) == []


@pytest.mark.parametrize("name", ["", "a:b", "a b", "-a", "a" * 64, "a\n"])
def test_a_name_that_could_be_taken_for_another_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        check_name(name)


def test_errors_say_which_deployment() -> None:
    assert "m.1" in str(DeploymentUnknown("m.1"))
    assert str(DeploymentFailed("m.1", "no room")) == "deployment m.1: no room"
