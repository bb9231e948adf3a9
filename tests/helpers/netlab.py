"""Whether this machine can make a netlab."""

from __future__ import annotations

from megatron_overlap.tools.launch.netlab import Netlab, NetlabError


def available() -> tuple[bool, str]:
    """Try to make a lab. Returns whether that works, and the kind of privileges or the reason why not."""
    try:
        with Netlab(hosts=1) as lab:
            return True, "in a user namespace" if lab.in_user_namespace else "as root"
    except NetlabError as error:
        return False, str(error)
