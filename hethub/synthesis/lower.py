"""One rank's part of a program: it runs the step's operators on the rank's pieces and moves what others need."""

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hethub.spec.errors import BadInput
from hethub.synthesis.graph import Graph
from hethub.synthesis.pieces import Exchange, bounds, piece, run_piece
from hethub.synthesis.program import Move, Program
from hethub.synthesis.rules import WHOLE, Cut, Rules, State


def fingerprint(graph: Graph) -> str:
    """A text that differs where a program made for one graph would not fit another."""
    told = [f"{o.name} {o.key} {o.inputs} {o.outputs} {graph.shapes_out(o)}" for o in graph.operators]
    names = [f"{name} {tensor}" for name, tensor in graph.parameters.items()]
    return hashlib.sha256("\n".join([*told, *names]).encode()).hexdigest()[:16]


def _check_same(program: Program, exchange: Exchange) -> None:
    """Raises BadInput on every rank where ranks planned unlike programs, whose collectives would wait for ever."""
    ends = torch.tensor([program.digest, -program.digest])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=exchange.group)
    if int(ends[0]) != -int(ends[1]):
        raise BadInput("the ranks have unlike programs; plan on one rank and send its program to the others.")


class Step:
    """`step(*inputs)` is the global loss; the gradients of this rank's shards are then in their `.grad`.

    Every rank calls it with the same whole inputs. As with `loss.backward()`, gradients are added to what is there.
    """

    def __init__(self, module: torch.nn.Module, graph: Graph, program: Program, group: dist.ProcessGroup) -> None:
        if program.fingerprint != fingerprint(graph):
            raise BadInput("the program was made for another module or other example inputs; plan again with these.")
        if group.size() != program.size:
            raise BadInput(f"the program is for {program.size} ranks; the group has {group.size()}.")
        self._graph, self._program, self._rules = graph, program, Rules(graph)
        self._exchange = Exchange(group)
        _check_same(program, self._exchange)
        self._moves: dict[tuple[int, State], Move] = {(move.tensor, move.target): move for move in program.moves}
        self._chosen = [self._rules.of[number][rule] for number, rule in enumerate(program.rules)]
        self._lasts = {tensor: numbers[-1] for tensor, numbers in graph.consumers.items()}
        self.peak_bytes: int | None = None  # of the first step's living storages, two moments per weight among them
        self._take(module)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's shards, for an optimizer; a shard may be empty."""
        return iter(self._shards.values())

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._shards.items())

    def _take(self, module: torch.nn.Module) -> None:
        owned = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        self._buffers = {
            tensor: (owned[name] if name in owned else self._graph.constants[name]).detach().clone()
            for name, tensor in self._graph.buffers.items()
        }
        self._shards = {}
        for name in self._graph.parameters:
            self._shards[name] = torch.nn.Parameter(self._own(name, owned[name].detach()))
        firsts = {id(owned[name]): name for name in self._graph.parameters}
        held = module.state_dict(keep_vars=True)
        # Of every entry of the module's state: the parameter that it is, or its value where the step has no part in it.
        self._entries = {key: firsts.get(id(value), value.detach().clone()) for key, value in held.items()}

    def _own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        if isinstance(state, Cut):
            return piece(whole, state, self._shares(tensor, state), self._exchange.rank)
        return whole.clone()

    def _shares(self, tensor: int, state: State) -> tuple[int, ...]:
        return self._program.shares[self._rules.axis(tensor, state)] if isinstance(state, Cut) else ()

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        held, counts = self._start(inputs), self.peak_bytes is None
        gradients: dict[str, torch.Tensor] = {}
        for number, operator in enumerate(self._graph.operators):
            rule = self._chosen[number]
            tensors = [self._bring(held, t, s) for t, s in zip(operator.inputs, rule.inputs, strict=True)]
            axis = self._rules.axis_of(number, rule)
            shares = (1,) * self._exchange.size if axis is None else self._program.shares[axis]
            made = [self._graph.tensors[tensor] for tensor in operator.made]
            results = run_piece(
                operator, rule, tensors, [t.shape for t in made], [t.dtype for t in made],
                shares[self._exchange.rank], 1 if axis is None else sum(shares),
            )  # fmt: skip
            held.update(zip(zip(operator.made, rule.outputs, strict=True), results, strict=True))
            del tensors, results
            for tensor in operator.made:
                for name in self._graph.parameter_of_gradient.get(tensor, ()):
                    gradients[name] = self._bring(held, tensor, self._program.kept[name])
            if counts:
                self._count(held)
            self._release(held, number)
        self._add(gradients)
        return self._bring(held, self._graph.loss, WHOLE).clone()

    def _start(self, inputs: tuple[torch.Tensor, ...]) -> dict[tuple[int, State], torch.Tensor]:
        wanted = [self._graph.tensors[tensor] for tensor in self._graph.inputs]
        given = [(tuple(value.shape), value.dtype) for value in inputs]
        if given != [(tensor.shape, tensor.dtype) for tensor in wanted]:
            raise BadInput(
                f"the step was made for inputs {[(t.shape, str(t.dtype)) for t in wanted]}; it got"
                f" {[(shape, str(dtype)) for shape, dtype in given]}. Plan again for these, or pad the batch."
            )
        held: dict[tuple[int, State], torch.Tensor] = {
            (tensor, WHOLE): value for tensor, value in self._buffers.items()
        }
        held.update({(tensor, WHOLE): value for tensor, value in zip(self._graph.inputs, inputs, strict=True)})
        for name, tensor in self._graph.parameters.items():
            held[tensor, self._program.kept[name]] = self._shards[name].detach()
        return held

    def _bring(self, held: dict[tuple[int, State], torch.Tensor], tensor: int, state: State) -> torch.Tensor:
        if (tensor, state) not in held:
            move = self._moves[tensor, state]
            before, after = self._shares(tensor, move.source), self._shares(tensor, state)
            shape = self._graph.tensors[tensor].shape
            held[tensor, state] = self._exchange.move(
                move, self._bring(held, tensor, move.source), shape, before, after
            )
        return held[tensor, state]

    def _release(self, held: dict[tuple[int, State], torch.Tensor], number: int) -> None:
        operator = self._graph.operators[number]
        for tensor in dict.fromkeys((*operator.inputs, *operator.made)):
            if self._lasts.get(tensor, -1) <= number and tensor != self._graph.loss:
                for key in [key for key in held if key[0] == tensor]:
                    del held[key]

    def _count(self, held: dict[tuple[int, State], torch.Tensor]) -> None:
        alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held.values()}
        moments = sum(2 * shard.numel() * shard.element_size() for shard in self.parameters())
        self.peak_bytes = max(self.peak_bytes or 0, sum(alive.values()) + moments)

    def _add(self, gradients: dict[str, torch.Tensor]) -> None:
        seen: set[int] = set()
        for name, shard in self._shards.items():
            if name not in gradients:
                continue
            own = gradients[name]
            if own.data_ptr() in seen or not own.is_contiguous():
                own = own.clone(memory_format=torch.contiguous_format)
            seen.add(own.data_ptr())
            shard.grad = own if shard.grad is None else shard.grad + own

    def is_whole(self, name: str) -> bool:
        """Whether every rank keeps all of the parameter."""
        return not isinstance(self._program.kept[name], Cut)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self._graph.tensors[self._graph.parameters[name]].shape

    def chunks(self, name: str, own: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Views of `own`, which is laid out as this rank's shard of the parameter, with where in the whole each is."""
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        shape = self._graph.tensors[tensor].shape
        if not isinstance(state, Cut):
            yield (0,) * len(shape), own
            return
        start, stop = bounds(shape, state, self._shares(tensor, state))[self._exchange.rank]
        for block in range(state.blocks if stop > start else 0):
            offset = block * (shape[state.dim] // state.blocks) + start
            view = own.narrow(state.dim, block * (stop - start), stop - start)
            yield tuple(offset if d == state.dim else 0 for d in range(len(shape))), view

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole module's state, as one device would have it; all ranks call it together."""
        whole = {name: self._whole(name, shard.detach()) for name, shard in self._shards.items()}
        return {key: whole[entry] if isinstance(entry, str) else entry for key, entry in self._entries.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients by parameter; all ranks call it together."""
        return {n: self._whole(n, shard.grad) for n, shard in self._shards.items() if shard.grad is not None}

    def _whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        tensor, state = self._graph.parameters[name], self._program.kept[name]
        if not isinstance(state, Cut):
            return shard.clone()
        move = Move(tensor, state, WHOLE, "all-gather")
        return self._exchange.move(move, shard, self._graph.tensors[tensor].shape, self._shares(tensor, state), ())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes this rank's shards out of the whole module's state."""
        missing = [key for key, entry in self._entries.items() if isinstance(entry, str) and key not in state]
        if missing:
            raise BadInput(f"the state lacks '{missing[0]}'; give a state_dict of the whole module.")
        for key, entry in self._entries.items():
            if isinstance(entry, str):
                self._shards[entry].copy_(self._own(entry, state[key]))


__all__ = ["Step", "fingerprint"]
