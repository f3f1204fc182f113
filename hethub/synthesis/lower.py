"""One rank's part of a program: it runs the step's operators on the rank's pieces and moves what others need."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hethub.kernels.squares import sum_of_squares
from hethub.spec.errors import BadInput
from hethub.synthesis.costs import Move
from hethub.synthesis.graph import Graph, as_traced, fingerprint, tensors_of
from hethub.synthesis.layout import Layout
from hethub.synthesis.pieces import Exchange, OwnCall, Summing, bounds, piece
from hethub.synthesis.program import Program, runs_beside
from hethub.synthesis.rules import WHOLE, Cut, State

Held = defaultdict[int, dict[State, torch.Tensor]]  # by tensor, what a rank has of it in each state


class Part(NamedTuple):
    """What this rank does of one operator of a step."""

    call: OwnCall
    inputs: tuple[tuple[int, State], ...]
    outputs: tuple[tuple[int, State], ...]
    gradients: list[tuple[int, str]]  # that it makes, and of which parameters
    released: list[int]  # the tensors that no operator behind it reads


def _keep(held: Held, outputs: Iterable[tuple[int, State]], values: Iterable[torch.Tensor]) -> None:
    """Keep the outputs. This is a function so that none of its names keeps a value alive afterwards."""
    for (tensor, state), value in zip(outputs, values, strict=True):
        held[tensor][state] = value


def digest(values: Iterable[tuple[object, torch.Tensor]]) -> int:
    """Return a number that differs if the names, shapes or bits of tensors differ."""
    told = hashlib.blake2b(digest_size=7)
    for name, value in values:
        told.update(f"{name} {tuple(value.shape)}".encode())
        told.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(told.digest())


def digest_of_start(module: torch.nn.Module, graph: Graph) -> int:
    """Return the digest of everything that a step takes from its module: weights, buffers and constants."""
    return digest([*module.named_parameters(), *module.named_buffers(), *sorted(graph.constants.items())])


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class Step:
    """One rank's training step. `step(*inputs)` returns the global loss; the gradients of this rank's shards are then in
    their `.grad`.

    Every rank calls it with the same whole inputs, of any number of samples. As with `loss.backward()`, gradients are
    added to what is there.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        graph: Graph,
        program: Program,
        group: dist.ProcessGroup,
        start: int | None = None,
    ) -> None:
        """`start` is the module's `digest_of_start`, if it is known already."""
        if program.fingerprint != fingerprint(graph):
            raise BadInput("the program was made for another module or other example inputs; plan again with these.")
        if group.size() != program.size:
            raise BadInput(f"the program is for {program.size} ranks; the group has {group.size()}.")
        self._graph, self._program = graph, program
        self._exchange = Exchange(group)
        self._exchange.require_same(
            program.digest, "the ranks have unlike programs; plan on one rank and send its program to the others."
        )
        self._exchange.require_same(
            digest_of_start(module, graph) if start is None else start,
            "the ranks start from unlike weights or buffers; make the module from one seed on all of them, or load one state.",
        )  # fmt: skip
        self._planned = Layout.planned(graph, program)
        self._layouts = {graph.samples: (self._planned, self._parts(self._planned))}  # by the number of samples
        self.peak_bytes: int | None = None  # of the first step's living storages, two moments per weight among them
        self._take(module)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's shards, for an optimizer; a shard may be empty."""
        return iter(self._shards.values())

    def buffers(self) -> Iterator[torch.Tensor]:
        """What this rank holds beside its parameters: buffers, frozen parameters and constants, each whole."""
        return iter(self._buffers.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._shards.items())

    def _take(self, module: torch.nn.Module) -> None:
        owned = tensors_of(module)
        self._buffers = {
            tensor: (owned[name] if name in owned else self._graph.constants[name]).detach().clone()
            for name, tensor in self._graph.buffers.items()
        }
        self._shards = {}
        for name in self._graph.parameters:
            self._shards[name] = torch.nn.Parameter(self._own(name, owned[name].detach()))
        firsts = {id(owned[name]): name for name in (*self._graph.parameters, *self._graph.buffers) if name in owned}
        # Of every entry of the module's state: what it is of the step's own, or its value where the step has no part in it.
        held = module.state_dict(keep_vars=True).items()
        self._entries = {key: firsts[id(value)] if id(value) in firsts else _copied(value) for key, value in held}

    def _shape(self, entry: Any) -> torch.Size | None:
        """Return the shape of an entry of the module's state, or None if it is no tensor."""
        if isinstance(entry, str):
            return torch.Size(self.shape(entry)) if entry in self._shards else self._buffer(entry).shape
        return getattr(entry, "shape", None)

    def _buffer(self, name: str) -> torch.Tensor:
        return self._buffers[self._graph.buffers[name]]

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        if isinstance(state, Cut):
            return piece(whole, state, self._planned.of(tensor, state), self._exchange.rank)
        return whole.clone()

    def statistics(self) -> dict[str, torch.Tensor]:
        """The running statistics, which a step changes beside parameters. They are the same on every rank."""
        return {name: self._buffer(name) for name in self._graph.updates}

    def fixed(self) -> dict[str, torch.Tensor]:
        """The rest of the module's state that a step reads: frozen parameters and buffers, whole on every rank."""
        trained = {*self._shards, *self._graph.updates}
        return {e: self._buffer(e) for e in self._entries.values() if isinstance(e, str) and e not in trained}

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        results, gradients = self._run_as_traced(inputs)
        for name, tensor in self._graph.updates.items():
            self._buffer(name).copy_(results[tensor])
        self._add(gradients)
        return results[self._graph.loss].clone()

    @torch.no_grad()
    def loss(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the global loss without changing gradients or running statistics."""
        return self._run_as_traced(inputs)[0][self._graph.loss].clone()

    def _run_as_traced(
        self, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        """Run a step. Return what every rank has whole after it, by tensor, and the gradients of this rank's shards, by name."""
        with as_traced(self._graph, next(self.parameters()).device):
            return self._run(inputs)

    def _run(self, inputs: tuple[torch.Tensor, ...]) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
        counts = self.peak_bytes is None
        if counts:
            self._exchange.require_same(
                digest(enumerate(inputs)),
                "the ranks were called with unlike batches; every rank takes the whole batch, the same on all (no DistributedSampler,"
                " one seed), and the program gives it its samples.",
            )  # fmt: skip
        laid, parts = self._layout(inputs)
        held = self._start(inputs, laid.graph)
        gradients: dict[str, Summing] = {}
        for part in parts:
            tensors = [held[t][s] if s in held[t] else self._bring(held, laid, t, s) for t, s in part.inputs]
            results = part.call(tensors)
            _keep(held, part.outputs, results)
            del tensors, results
            for tensor, name in part.gradients:
                gradients[name] = self._sum(held, laid, tensor, name, list(gradients.values()))
            if counts:
                summed = (value for own in gradients.values() for value in own.tensors)
                self._count([*chain.from_iterable(own.values() for own in held.values()), *summed])
            for tensor in part.released:
                held.pop(tensor, None)
        whole = {tensor: self._bring(held, laid, tensor, WHOLE) for tensor in self._graph.results}
        return whole, {name: own.result() for name, own in gradients.items()}

    def _layout(self, inputs: tuple[torch.Tensor, ...]) -> tuple[Layout, list[Part]]:
        samples = self._graph.samples_in(inputs)
        if samples not in self._layouts:
            laid = self._planned.at(samples, self._program)
            self._layouts[samples] = laid, self._parts(laid)
        return self._layouts[samples]

    def _parts(self, laid: Layout) -> list[Part]:
        graph, rank, parts = laid.graph, self._exchange.rank, []
        for number, (operator, rule, shares) in enumerate(zip(graph.operators, laid.chosen, laid.shared, strict=True)):
            made = [graph.tensors[tensor] for tensor in operator.made]
            shapes, dtypes = [tensor.shape for tensor in made], [tensor.dtype for tensor in made]
            share, atoms = (shares[rank], sum(shares) or 1) if shares else (1, 1)
            parts.append(
                Part(
                    OwnCall(operator, rule, shapes, dtypes, share, atoms),
                    tuple(zip(operator.inputs, rule.inputs, strict=True)),
                    tuple(zip(operator.made, rule.outputs, strict=True)),
                    [(t, name) for t in operator.made for name in graph.parameter_of_gradient.get(t, ())],
                    self._read_last(number),
                )
            )
        return parts

    def _start(self, inputs: tuple[torch.Tensor, ...], graph: Graph) -> Held:
        wanted = [graph.tensors[tensor] for tensor in graph.inputs]
        given = [(tuple(value.shape), value.dtype) for value in inputs]
        if given != [(tensor.shape, tensor.dtype) for tensor in wanted]:
            raise BadInput(
                f"the step was made for inputs {[(t.shape, str(t.dtype)) for t in wanted]}; it got"
                f" {[(shape, str(dtype)) for shape, dtype in given]}. Plan again for these."
            )
        held: Held = defaultdict(dict)
        for tensor, value in (*self._buffers.items(), *zip(graph.inputs, inputs, strict=True)):
            held[tensor][WHOLE] = value
        for name, tensor in graph.parameters.items():
            held[tensor][self._program.kept[name]] = self._shards[name].detach()
        return held

    def _bring(self, held: Held, laid: Layout, tensor: int, state: State) -> torch.Tensor:
        if state not in held[tensor]:
            move = laid.moves[tensor, state]
            source = self._bring(held, laid, tensor, move.source)
            shape, before, after = (
                laid.graph.tensors[tensor].shape,
                laid.of(tensor, move.source),
                laid.of(tensor, state),
            )
            held[tensor][state] = self._exchange.move(move, source, shape, before, after)
        return held[tensor][state]

    def _sum(self, held: Held, laid: Layout, tensor: int, name: str, before: list[Summing]) -> Summing:
        """Begin to bring a gradient into the state in which its parameter is kept. It overlaps with compute where no operator
        waits for it. A scattered sum holds the whole gradient until it has ended, so there is only one at a time."""
        state = self._program.kept[name]
        move = laid.moves.get((tensor, state))
        if state in held[tensor] or move is None or not runs_beside(self._graph, move):
            return Summing([self._bring(held, laid, tensor, state)])
        if isinstance(state, Cut):
            for earlier in before:
                if earlier.is_scattered:
                    earlier.result()
        return self._exchange.start(held[tensor][move.source], state, laid.of(tensor, state))

    def _read_last(self, number: int) -> list[int]:
        """Return the tensors that no later operator reads."""
        operator, consumers = self._graph.operators[number], self._graph.consumers
        lasts = {tensor: consumers.get(tensor, [-1])[-1] for tensor in (*operator.inputs, *operator.made)}
        return [tensor for tensor, last in lasts.items() if last <= number and tensor not in self._graph.results]

    def _count(self, held: list[torch.Tensor]) -> None:
        alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        moments = sum(2 * shard.numel() * shard.element_size() for shard in self.parameters())
        self.peak_bytes = max(self.peak_bytes or 0, sum(alive.values()) + moments)

    def _add(self, gradients: dict[str, torch.Tensor]) -> None:
        # By storage, the addresses that are gradients by now: some gradients are parts of others.
        taken = defaultdict[int, list[range]](list)
        for name, shard in self._shards.items():
            if name not in gradients:
                continue
            own = gradients[name]
            place = range(own.data_ptr(), own.data_ptr() + own.nbytes)
            others = taken[own.untyped_storage().data_ptr()]
            if not own.is_contiguous() or any(place.start < o.stop and o.start < place.stop for o in others):
                own = own.clone(memory_format=torch.contiguous_format)
            else:
                others.append(place)
            shard.grad = own if shard.grad is None else shard.grad + own

    def is_whole(self, name: str) -> bool:
        """Whether every rank keeps all of the parameter."""
        return not isinstance(self._program.kept[name], Cut)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self._graph.tensors[self._graph.parameters[name]].shape

    def square_sum(self) -> float:
        """Return the sum of squares of the gradients that this rank counts: its pieces, and on the first rank also those that
        every rank has whole."""
        counted = [
            shard.grad.flatten()
            for name, shard in self._shards.items()
            if shard.grad is not None and (self._exchange.rank == 0 or not self.is_whole(name))
        ]
        return float(sum_of_squares(counted)) if counted else 0.0

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip as torch.nn.utils.clip_grad_norm_ does on one device, by the norm of all gradients, and return that norm. All
        ranks must call it together."""
        total = torch.tensor([self.square_sum()], dtype=torch.float64)
        dist.all_reduce(total, group=self._exchange.group)
        norm = float(total) ** 0.5
        scale = max_norm / (norm + 1e-6)
        for shard in self._shards.values():
            if shard.grad is not None:
                shard.grad.mul_(1.0 if scale > 1.0 else scale)  # not a number: none of the gradients is one any more
        return norm

    def chunks(self, name: str, own: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield views of `own`, which is laid out as this rank's shard of the parameter, each with its place in the whole."""
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        shape = self._graph.tensors[tensor].shape
        if not isinstance(state, Cut):
            yield (0,) * len(shape), own
            return
        start, stop = bounds(shape, state, self._planned.of(tensor, state))[self._exchange.rank]
        for block in range(state.blocks if stop > start else 0):
            offset = block * (shape[state.dim] // state.blocks) + start
            view = own.narrow(state.dim, block * (stop - start), stop - start)
            yield tuple(offset if d == state.dim else 0 for d in range(len(shape))), view

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole module's state, as one device would have it. All ranks must call it together."""
        whole = {name: self._whole(name, shard.detach()) for name, shard in self._shards.items()}
        whole |= {name: value.clone() for name, value in {**self.statistics(), **self.fixed()}.items()}
        return {key: whole[entry] if isinstance(entry, str) else entry for key, entry in self._entries.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the whole gradients by parameter. All ranks must call it together."""
        return {n: self._whole(n, shard.grad) for n, shard in self._shards.items() if shard.grad is not None}

    def _whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        if not isinstance(state, Cut):
            return shard.clone()
        move = Move(tensor, state, WHOLE, "all-gather")
        return self._exchange.move(move, shard, self._graph.tensors[tensor].shape, self._planned.of(tensor, state), ())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load this rank's shards, and the buffers, from the whole module's state."""
        missing = [key for key in self._entries if key not in state]
        if missing:
            raise BadInput(f"the state lacks '{missing[0]}'; give a state_dict of the whole module.")
        if unknown := [key for key in state if key not in self._entries]:
            raise BadInput(
                f"the state has '{unknown[0]}', which the module has not; give a state_dict of the same module."
            )
        for key, entry in self._entries.items():
            wanted, given = self._shape(entry), getattr(state[key], "shape", None)
            if wanted != given:
                raise BadInput(f"'{key}' has shape {given} in the state, and {wanted} in the module.")
        for key, entry in self._entries.items():
            if not isinstance(entry, str):
                self._entries[key] = _copied(state[key])
            elif entry in self._shards:
                self._shards[entry].copy_(self._own(entry, state[key]))
            else:
                self._buffer(entry).copy_(state[key])


__all__ = ["Step", "digest", "digest_of_start"]
