"""The load `generation` of a fault case: a GPT generates on one of Megatron's engines, under the plugin."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.comm import TransportError

NEW_TOKENS = 4
"""Generated from each prompt: the first forward pass is the prefill, at least three passes of decode follow."""
VOCABULARY, MAX_TOKENS = 64, 32
PROMPTS = ("5 6 7 8 9", "10 11 12 13 14 15 16 17 18 19 20 21", "22 23 24", "25 26 27 28 29 30 31")


def preload() -> None:
    """Imports Megatron, adapted to the CPU, before the ranks are forked."""
    from megatron_overlap.adapters import cpu

    cpu.install()
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    import scripts.generate_gpt  # noqa: F401


class Generation:
    """Greedy generation from ragged prompts. The right tokens are those of the stock path, before any fault.

    Args:
        group: all ranks of the job, which are one tensor-parallel group.
        engine: `static`, or `dynamic` with sequence parallelism.
        deadline_s: of a wait for a message, and of a collective.
        folder: gets the file of a rank that failed.
    """

    def __init__(self, group: dist.ProcessGroup, engine: str, deadline_s: float, folder: Path) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from scripts.bench.gpt import build_gpt
        from scripts.generate_gpt import Generator, Numbers

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
        model_parallel_cuda_manual_seed(7)
        model = build_gpt(
            ranks=group.size(),
            sp=engine == "dynamic",
            dtype=torch.float32,
            vocabulary=VOCABULARY,
            max_tokens=MAX_TOKENS,
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            init_method_std=0.3,
        )
        model.register_forward_pre_hook(self._pass_begins)
        self._generator = Generator(
            model, Numbers(VOCABULARY), engine=engine, max_requests=len(PROMPTS), max_tokens=MAX_TOKENS
        )
        self._pass, self._fault_in, self._fault = 0, -1, lambda: None
        self._right = self._tokens()
        overlap: dict[str, Any] = {"tensor": {"method": "p2p"}, "timeout_s": deadline_s, "strict": True}
        self._session = enable(OverlapConfig.model_validate(overlap))
        self._session.folder = folder
        if self._tokens() != self._right:
            raise AssertionError("the tokens are wrong before the fault")
        dist.barrier(group)
        for each in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s), each)

    def inject(self, number: int, fault: Callable[[], None]) -> None:
        """Calls `fault` when forward pass `number` of the next step begins; pass 0 is the prefill."""
        self._fault_in, self._fault = number, fault

    def step(self, number: int) -> bool:
        """Generates; whether all tokens are right.

        Raises:
            TransportError: a wait for a message failed.
            RuntimeError: a collective of torch failed.
        """
        from megatron_overlap.adapters.diagnostics.consistency import ConsistencyCheck

        self._session.next_step(number)
        try:
            return self._tokens() == self._right
        except TransportError:
            raise
        except RuntimeError as error:  # as `python -m megatron_overlap` does
            written = self._session.adapter(ConsistencyCheck).post_mortem(error)
            raise RuntimeError(f"{str(error).splitlines()[0]}; {written}") from error

    def close(self) -> None:
        """Ends the plugin."""
        self._session.disable()

    def _tokens(self) -> list[list[int]]:
        self._pass = 0
        return self._generator.generate(PROMPTS, NEW_TOKENS).tokens

    def _pass_begins(self, *_: Any) -> None:
        if self._pass == self._fault_in:
            self._fault_in = -1
            self._fault()
        self._pass += 1
