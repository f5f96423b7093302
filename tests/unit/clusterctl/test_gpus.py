"""The interfaces left to NCCL, by the forms that its documentation gives for NCCL_SOCKET_IFNAME."""

import pytest

from tandem.clusterctl.doctor.gpus import matching

HERE = ("lo", "docker0", "eth0", "eth1", "eth10")


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("eth", ["eth0", "eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("ib,docker", ["docker0"]),
        ("eth0:4000", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10"]),
        ("^=eth1", ["lo", "docker0", "eth0", "eth10"]),
        ("^lo,docker,eth", []),
        ("ib0", []),
        ("=eth", []),
    ],
)
def test_interfaces_by_prefix_by_name_and_without(wanted: str, left: list[str]) -> None:
    assert matching(wanted, HERE) == left
