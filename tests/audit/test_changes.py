"""What changed between two audits, as the lines of a diff."""

import copy

from tests.report.sample_run import audit_document

from meshwright.audit.checks import changes


def test_the_same_audit_changed_nothing() -> None:
    assert changes(audit_document(), audit_document()) == [
        "nothing changed: the same collectives, FLOPs, memory and time"
    ]


def test_a_collective_more_and_a_slower_step() -> None:
    before = audit_document()
    after = copy.deepcopy(before)
    first = after["emitted"][0]
    extra = first | {"tensor": "router", "op": "all_to_all", "bytes": 4096, "count": 3}
    after["emitted"] += [extra]
    after["flops"] = before["flops"] | {"compiled": 2 * before["flops"]["compiled"]}
    found = changes(before, after)
    over = "·".join(first["axes"])
    assert f"+ router {first['direction']} all_to_all over {over}: 3 x 4.1 kB" in found
    assert any(line.startswith("+ FLOPs: ") and line.endswith("(+100.0%)") for line in found)
    assert not any(line.startswith("- router") for line in found)
    assert changes(after, before)[0].startswith("- router")
