"""What a container may do: as the daemon was told, and as its first process finds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Run = Callable[[str], str]  # runs a Python program inside and returns what it prints

PROBE = """
import errno, json, os
status = dict(line.split(":", 1) for line in open("/proc/1/status").read().splitlines())
def attempt(folder):
    path = os.path.join(folder, "probe")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        return errno.errorcode[error.errno]
    os.unlink(path)
    return "written"
wanted = ("Uid", "Gid", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
print(json.dumps({
    "status": {name: status[name].split() for name in wanted},
    "written": {folder: attempt(folder) for folder in ("/", "/etc", "/opt", "/usr/bin", "/tmp", os.environ["HOME"])},
}))
"""


def check_told(attributes: dict[str, Any]) -> None:
    """What `docker inspect` says."""
    host, config = attributes["HostConfig"], attributes["Config"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert not host["Privileged"]
    assert host["PidMode"] != "host"
    assert host["NetworkMode"] != "host"
    assert not host["Devices"]
    assert config["User"] == "10001:10001"
    assert all(mount["Type"] != "bind" or not mount["RW"] for mount in attributes["Mounts"])


def check_found(run: Run) -> None:
    """What its first process is, and what can be written in there."""
    found = json.loads(run(PROBE))
    status = found["status"]
    assert status["Uid"] == status["Gid"] == ["10001"] * 4
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name][0], 16) == 0, name
    assert status["NoNewPrivs"] == ["1"]
    written = found["written"]
    assert written.pop("/tmp") == "written"
    assert written.pop("/var/lib/kvfleet") == "written"
    assert set(written.values()) <= {"EROFS"}, "a root that can be written to says EACCES, or lets us"
