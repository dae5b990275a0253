"""Verification of drafts, in chains and trees."""

from __future__ import annotations

from sampler_rig import KNOWN, Rig, Row, make_logits


def test_a_chain_is_accepted_as_far_as_the_run_without_drafts_goes() -> None:
    logits = make_logits(5)
    rig = Rig().add(0, seed=8, temperature=1.2)
    own = [rig.draw(logits[[i]].clone(), [Row(0, 3 + i)])[0][0] for i in range(5)]
    for right in range(5):
        drafts = own[:right] + [(own[i] + 1) % KNOWN for i in range(right, 4)]
        sampled = rig.sample(logits.clone(), [Row(0, 3, drafts)])
        assert sampled.accepted.row(0).tolist() == own[: right + 1]
        assert sampled.path is None


def test_a_tree_is_walked_along_what_is_drawn() -> None:
    #        last known
    #       /    |     \
    #      0     1      4
    #            |\      \
    #            2 3      5
    parents = [-1, -1, 1, 1, -1, 4]
    logits = make_logits(7, seed=2)
    rig = Rig().add(0, seed=1, temperature=0.9)

    def token(row: int, depth: int) -> int:
        return rig.draw(logits[[row]].clone(), [Row(0, 6 + depth)])[0][0]

    first = token(0, 0)
    after_one = token(1 + 1, 1)
    others = [t for t in range(10, 20) if t not in (first, after_one)]
    drafts = [others[0], first, others[1], after_one, others[2], others[3]]
    sampled = rig.sample(logits.clone(), [Row(0, 6, drafts, parents)])
    assert sampled.accepted.row(0).tolist() == [first, after_one, token(1 + 3, 2)]
    assert sampled.path is not None
    assert sampled.path.row(0).tolist() == [1, 3]
    nothing = rig.sample(logits.clone(), [Row(0, 6, [others[0]] * 6, parents)])
    assert nothing.accepted.row(0).tolist() == [first]
    assert nothing.path is not None
    assert len(nothing.path.row(0)) == 0


def test_drafts_of_some_rows_leave_the_others_alone() -> None:
    logits = make_logits(6)
    rig = Rig().add(0, seed=1).add(1, seed=2).add(2, temperature=0)
    alone = [rig.draw(logits[[i]].clone(), [Row(slot, 4)])[0] for i, slot in ((0, 0), (3, 1), (4, 2))]
    second = rig.draw(logits[[1]].clone(), [Row(0, 5)])[0]
    rows = [Row(0, 4, [alone[0][0], 5]), Row(1, 4), Row(2, 4, [(alone[2][0] + 1) % KNOWN])]
    sampled = rig.sample(logits.clone(), rows)
    got = [sampled.accepted.row(i).tolist() for i in range(3)]
    assert got[0][:2] == alone[0] + second
    assert got[1:] == alone[1:]
