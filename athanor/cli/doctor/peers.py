"""A check of `athanor doctor`: what lies between each two graphics cards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from athanor.cli.doctor.main import Checkout, Finding
from athanor.hardware import pci
from athanor.troubles.world import here


def cards(checkout: Checkout) -> Iterator[Finding]:
    """What lies between each two cards; with several processes their gradients go there."""
    pairs = pci.pairs(here({}, checkout.root).root)
    checkout.measured["pairs"] = [dataclasses.asdict(pair) for pair in pairs]
    for pair in pairs:
        command = "nothing to do"
        if pair.acs == "on":
            ports = ";".join(pair.ports)
            command = f"ACS off in the firmware's setup, or pci=disable_acs_redir={ports} on the kernel's command line"
        elif pair.acs == pci.UNKNOWN:
            command = "sudo lspci -vvv | grep -i acsctl tells: ReqRedir+ is on"
        yield Finding("cards", f"{pair.one} {pair.other}", str(pair), command, note=True)
