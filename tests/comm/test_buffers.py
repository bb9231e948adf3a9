"""Buffers are kept, grow, and are poisoned only for tests."""

from __future__ import annotations

import torch

from megatron_overlap.comm import Workspace


def test_a_buffer_is_handed_out_again() -> None:
    workspace = Workspace()
    like = torch.zeros(1, dtype=torch.bfloat16)
    first = workspace.take("gather", (4, 8), like)
    again = workspace.take("gather", (2, 8), like)
    assert first.data_ptr() == again.data_ptr()
    assert again.shape == (2, 8)
    assert again.dtype is torch.bfloat16
    assert workspace.num_bytes == 4 * 8 * 2


def test_it_grows_and_lets_the_old_one_go() -> None:
    workspace = Workspace()
    workspace.take("gather", (4,), torch.zeros(1))
    workspace.take("gather", (10,), torch.zeros(1))
    assert workspace.num_bytes == 40
    workspace.clear()
    assert workspace.num_bytes == 0


def test_names_and_dtypes_have_their_own() -> None:
    workspace = Workspace()
    one = workspace.take("partial", (4,), torch.zeros(1))
    for other in (
        workspace.take("landing", (4,), torch.zeros(1)),
        workspace.take("partial", (4,), torch.zeros(1, dtype=torch.float64)),
    ):
        assert one.data_ptr() != other.data_ptr()


def test_bytes_by_name() -> None:
    workspace = Workspace()
    workspace.take("landing", (4,), torch.zeros(1))
    workspace.take("landing", (4,), torch.zeros(1, dtype=torch.float64))
    workspace.take("partial", (3,), torch.zeros(1))
    assert workspace.sizes() == {"landing": 16 + 32, "partial": 12}
    assert workspace.num_bytes == 60


def test_poison() -> None:
    workspace = Workspace(poison=True)
    assert workspace.take("a", (3,), torch.zeros(1)).isnan().all()
    assert (workspace.take("a", (3,), torch.zeros(1, dtype=torch.int32)) == torch.iinfo(torch.int32).max).all()
