"""The blocks of a small model as CUDA graphs: the launches of a whole pass are one call.

A forward and backward pass of the blocks of Gemma 3 270M launches 1,300 kernels, which takes the
CPU longer than computing them takes the GPU. A CUDA graph is a recording of these launches, with
the addresses of all memory, made once for each shape of the inputs. What Python computes in a block
is fixed with it: a number that changes during training must be a tensor. Larger models and long
passes are not recorded: see runtime/build.py.
"""

import torch
from torch import Tensor

from model import Decoder

MOST_WEIGHTS = 5e8      # of the blocks of a model that is recorded
MOST_SHAPES = 2         # of packed rows: with `ends` and without


class RecordedDecoder(Decoder):
    """A Decoder whose blocks are replayed where that is possible."""
    graphs = None

    def run_blocks(self, x, positions, ends, masks=None, at=None):
        if self.graphs and masks is None and at is None:
            return self.graphs(self, x, positions, ends)
        return super().run_blocks(x, positions, ends, masks, at)


def record_blocks(decoder):
    """Let the training passes of a small decoder on one GPU be recorded, in place."""
    if sum(p.numel() for p in decoder.layers.parameters()) <= MOST_WEIGHTS:
        decoder.__class__, decoder.graphs = RecordedDecoder, Graphs(decoder)


def recorded_memory() -> int:
    """Return the bytes of recordings that are not allocated between two passes, but not free."""
    if torch.cuda.get_allocator_backend() != 'native':      # cudaMallocAsync tells nothing of them
        return 0
    return sum(part['total_size'] - part['allocated_size']
               for part in torch.cuda.memory_snapshot() if any(part['segment_pool_id']))


class Graphs:
    """Computes Decoder.run_blocks(decoder, x, positions, ends), by a recording if possible.

    A recording has one place for its activations and one for its gradients. So it is replayed only
    when the backward pass of the last replay is over and its gradients were used.
    """

    def __init__(self, decoder):
        self.recorded = {}
        self.weights = [p for module in (decoder.layers, decoder.norm, decoder.project_out)
                        for p in module.parameters() if p.requires_grad]
        self.waiting = False    # for the backward pass of a replay

    def __reduce__(self):
        """Be None in a copy of the decoder, or in a file: a recording has these weights."""
        return type(None), ()

    def __call__(self, decoder, x: Tensor, positions: Tensor, ends: Tensor | None) -> Tensor:
        inputs = [tensor for tensor in (x, positions, ends) if tensor is not None]
        shape = x.shape, len(inputs)
        busy = self.waiting or any(p.grad is not None for p in self.weights)
        full = shape not in self.recorded and len(self.recorded) == MOST_SHAPES
        if busy or full or not (decoder.training and x.requires_grad):
            return Decoder.run_blocks(decoder, x, positions, ends)
        if shape not in self.recorded:
            self.recorded[shape] = self.record(decoder, inputs)
        y = self.recorded[shape](*inputs, *self.weights)
        self.waiting = True
        y.register_hook(self.end)
        return y

    def record(self, decoder, inputs: list[Tensor]):
        """Return a function of `inputs` and the weights that replays.

        It keeps its memory, and the weights, until the garbage collector finds it.
        """
        def run(x, positions, *others):
            return Decoder.run_blocks(decoder, x, positions,
                                      others[0] if len(inputs) == 3 else None)
        examples = (x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)
        with torch.random.fork_rng([inputs[0].device]):     # dropout
            try:
                replay = torch.cuda.make_graphed_callables(run, (*examples, *self.weights))
            except RuntimeError as error:
                error.add_note('The blocks could not be recorded as CUDA graphs; to train without, '
                               'set MOST_WEIGHTS = 0 in speed/graphs.py')
                raise
        torch.cuda.reset_peak_memory_stats()    # `peak_memory` adds what the recording needs
        # gradients are accumulated on the stream of the recording, which autograd synchronizes
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        return replay

    def end(self, gradient: Tensor):
        self.waiting = False
