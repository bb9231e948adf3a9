"""The ways to run one data parallel training step that bench/data_parallel.py compares, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops import Gathering, GradientReduce

Run = Callable[[], object]
_LEARNING_RATE = 1e-3


class DataCase:
    """A stack of square linear layers, a bucket each: backward, sharded Adam, next forward; and every way to run it.

    Gradients are summed in fp32, parameters travel in `dtype`, the optimizer's own copy of a shard is fp32: what
    Megatron does with its distributed optimizer.

    Args:
        layers: number of layers and of buckets.
        hidden: rows and columns of each weight; divisible by the number of ranks.
        tokens: rows of the activations on each rank.
    """

    def __init__(self, layers: int, hidden: int, tokens: int, dtype: torch.dtype, transport: Transport) -> None:
        self.transport = transport
        self.size, self.rank = transport.size, transport.rank
        self.dtype, self.shape = dtype, (hidden, hidden)
        generator = torch.Generator().manual_seed(5)
        scale = hidden**-0.5
        self.start = [torch.randn(hidden * hidden, generator=generator) * scale for _ in range(layers)]
        generator.manual_seed(6 + self.rank)
        self.x = [torch.randn(tokens, hidden, generator=generator).to(dtype) for _ in range(layers)]
        self.dy = torch.randn(tokens, hidden, generator=generator).to(dtype)
        shard = hidden * hidden // self.size
        self.own = slice(self.rank * shard, (self.rank + 1) * shard)
        self.grads = [torch.zeros(hidden * hidden) for _ in range(layers)]
        self.weights = [torch.empty(hidden * hidden, dtype=dtype) for _ in range(layers)]
        self.masters = [torch.empty(shard) for _ in range(layers)]
        # What travels in the variants that compute something else meanwhile.
        self.idle_grads = [torch.zeros(hidden * hidden) for _ in range(layers)]
        self.idle_weights = [torch.zeros(hidden * hidden, dtype=dtype) for _ in range(layers)]
        self.reduce = GradientReduce(transport)
        self.reset()

    def reset(self) -> None:
        """The parameters and the optimizers of the beginning."""
        for start, weight, master in zip(self.start, self.weights, self.masters, strict=True):
            weight.copy_(start)
            master.copy_(weight[self.own])
        self.adams = [torch.optim.AdamW([master], lr=_LEARNING_RATE) for master in self.masters]

    def variants(self) -> dict[str, Run]:
        """Name to callable: one step each."""
        layers = range(len(self.weights))

        def compute() -> None:
            self._backward(lambda layer: None)
            for layer in layers:
                self._step(layer)
            self._forward(lambda layer: None)

        def collectives(grads: list[torch.Tensor], weights: list[torch.Tensor]) -> list[Any]:
            works = [self._scatter(grads[layer], async_op=True) for layer in layers]
            return works + [self._gather(weights[layer], async_op=True) for layer in layers]

        def messages(grads: list[torch.Tensor], weights: list[torch.Tensor]) -> list[Any]:
            p2p_works: list[Any] = [self.reduce.begin(grads[layer]) for layer in layers]
            return p2p_works + [Gathering(self.transport, weights[layer]) for layer in layers]

        def serial() -> None:
            self._backward(lambda layer: None)
            for layer in layers:
                self._scatter(self.grads[layer], async_op=False)
            for layer in layers:
                self._step(layer)
            for layer in layers:
                self._gather(self.weights[layer], async_op=False)
            self._forward(lambda layer: None)

        def serial_p2p() -> None:
            self._backward(lambda layer: None)
            _wait([self.reduce.begin(self.grads[layer]) for layer in layers])
            for layer in layers:
                self._step(layer)
            _wait([Gathering(self.transport, self.weights[layer]) for layer in layers])
            self._forward(lambda layer: None)

        def roof(begin: Callable[[list[torch.Tensor], list[torch.Tensor]], list[Any]]) -> None:
            begun = begin(self.idle_grads, self.idle_weights)
            compute()
            _wait(begun)

        return {
            "compute": compute,
            "comm_collective": lambda: _wait(collectives(self.idle_grads, self.idle_weights)),
            "comm_p2p": lambda: _wait(messages(self.idle_grads, self.idle_weights)),
            "serial": serial,
            "serial_p2p": serial_p2p,
            "sliced": self._sliced,
            "overlap": self.overlap,
            "roof_collective": lambda: roof(collectives),
            "roof_p2p": lambda: roof(messages),
        }

    def overlap(self) -> None:
        """Ours: each bucket's gradients leave when they are there, its parameters when they are stepped."""
        begun: list[Any] = [None] * len(self.weights)

        def send(layer: int) -> None:
            begun[layer] = self.reduce.begin(self.grads[layer])

        self._backward(send)
        _wait(begun[::-1])
        for layer in range(len(self.weights)):
            self._step(layer)
            begun[layer] = Gathering(self.transport, self.weights[layer])
        self._forward(lambda layer: begun[layer].wait())

    def _sliced(self) -> None:
        """Megatron's own overlap: a collective a bucket; the next gather begins when the one before has landed."""
        works: list[Any] = [None] * len(self.weights)

        def send(layer: int) -> None:
            works[layer] = self._scatter(self.grads[layer], async_op=True)

        self._backward(send)
        _wait(works[::-1])
        for layer in range(len(self.weights)):
            self._step(layer)
        works[0] = self._gather(self.weights[0], async_op=True)

        def receive(layer: int) -> None:
            works[layer].wait()
            if layer + 1 < len(works):
                works[layer + 1] = self._gather(self.weights[layer + 1], async_op=True)

        self._forward(receive)

    def exact(self, steps: int) -> list[torch.Tensor]:
        """The parameters after some steps of the plain program: all gradients summed, everything stepped everywhere."""
        weights = [start.to(self.dtype) for start in self.start]
        masters = [weight.float() for weight in weights]
        adams = [torch.optim.AdamW([master], lr=_LEARNING_RATE) for master in masters]
        for _ in range(steps):
            for layer, weight in enumerate(weights):
                grad = torch.mm(self.dy.t(), self.x[layer]).float().flatten()
                dist.all_reduce(grad)
                masters[layer].grad = grad
                adams[layer].step()
                weight.copy_(masters[layer])
        return weights

    def _backward(self, ready: Callable[[int], None]) -> None:
        for layer in reversed(range(len(self.weights))):
            torch.mm(self.dy, self.weights[layer].view(self.shape))
            grad = torch.mm(self.dy.t(), self.x[layer])
            self.grads[layer].view(self.shape).copy_(grad)
            ready(layer)

    def _step(self, layer: int) -> None:
        self.masters[layer].grad = self.grads[layer][self.own]
        self.adams[layer].step()
        self.weights[layer][self.own].copy_(self.masters[layer])

    def _forward(self, arrived: Callable[[int], None]) -> None:
        for layer, weight in enumerate(self.weights):
            arrived(layer)
            torch.mm(self.x[layer], weight.view(self.shape).t())

    def _scatter(self, grad: torch.Tensor, *, async_op: bool) -> Any:
        return dist.reduce_scatter_tensor(grad[self.own], grad, async_op=async_op)

    def _gather(self, weight: torch.Tensor, *, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(weight, weight[self.own], async_op=async_op)


def _wait(begun: list[Any]) -> None:
    for work in begun:
        work.wait()
