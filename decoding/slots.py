"""The sequences that are decoded at once: slots of the cache, their state, CUDA graphs."""

import contextlib
import os

import numpy as np
import torch

from data.tree_rows import pack_prompts
from decoding.cache import Cache, DecodeMask, PrefillMask, keys_to_keep
from decoding.draw import draw, random_numbers
from runtime.device import HostCopy, to_device
from runtime.errors import DataError
from speed import kernels
from speed.graphs import recorded_memory
from speed.kernels import SPLIT
from speed.masks import maker, masks_by

FIXED_SIZE = 64     # of each step with `deterministic`, so that every product has one shape
# tokens of the prompts in one forward pass, or those of one longer prompt; a CPU computes the
# whole mask
PREFILL = {'cuda': 8192, 'cpu': 1024}


def cache_sizes(config, length):
    """Return the tokens that the cache of each layer holds for a sequence of `length` tokens."""
    sizes = {window: keys_to_keep(window, length) for window in {*config.windows}}
    return [sizes[window] for window in config.windows]


def room(model, prompts, sampling):
    """Return (sequences decoded at once, tokens of the longest); DataError if one does not fit."""
    config, context = model.config, model.config.max_position_embeddings
    for i, ids in enumerate(prompts):
        if not 0 < len(ids) < context:
            raise DataError(f'prompt {i + 1} has {len(ids)} tokens; it may have 1 to {context - 1}')
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length = min(len(prompts[longest]) + sampling.max_tokens, context)
    each = (2 * config.num_key_value_heads * config.head_dim * model.head.element_size()
            * sum(cache_sizes(config, length)))
    memory = (free_memory(model.head.device) if sampling.cache_memory is None else
              sampling.cache_memory * 2 ** 30)
    fit = int(min(memory / each, 2 ** 31)) - 1      # the last slot is for padding
    if fit < 1:
        raise DataError(f'prompt {longest + 1} has {len(prompts[longest])} tokens: with max_tokens '
                        f'= {sampling.max_tokens} it needs {2 * each / 2 ** 30:.3g} GiB of cache, '
                        f'and there are {memory / 2 ** 30:.3g}; shorten it, lower max_tokens, or '
                        f'end other programs that use the device')
    most = sampling.batch_size
    if sampling.deterministic:     # a CPU's products may depend on the row of a matrix as well
        most = min(most, FIXED_SIZE) if model.head.is_cuda else 1
    return min(most, fit, len(prompts) * sampling.n), length


def free_memory(device):
    """Return the bytes for a cache: of a GPU all but 1.5 GiB that is free, else a quarter."""
    if device.type == 'cuda':
        unused = (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
                  - recorded_memory())
        return max(0, torch.cuda.mem_get_info(device)[0] + unused - 1.5 * 2 ** 30)
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 4


def take(waiting, slots, prompts, sampling, device):
    """Return the answers to begin now, moved from `waiting` to the first free slots; [] to wait.

    Those to a prompt begin together if there are so many slots. While others run, an eighth of the
    slots must be free: a prefill costs as much as several steps.
    """
    n, n_slots = sampling.n, len(slots)
    free, wanted = [i for i, answer in enumerate(slots) if not answer], 1
    if len(free) < n_slots:
        wanted = max(n if n <= n_slots else 1, n_slots // 8)
    if not waiting or len(free) < min(wanted, len(waiting)):
        return []
    begun, shared = [], prompts[waiting[0].prompt]
    n_tokens = 0
    n_prompts = 0
    for slot in free[:len(waiting)]:
        answer = waiting[0]
        if not begun or answer.prompt != begun[-1].prompt:
            # the tokens of a row, which holds the common beginning of its prompts once
            n_tokens += len(prompts[answer.prompt])
            shared = os.path.commonprefix([shared, prompts[answer.prompt]])
            if begun and (sampling.deterministic
                          or n_tokens - n_prompts * len(shared) > PREFILL[device.type]
                          or n - answer.number > len(free) - len(begun)):
                break
            n_prompts += 1
        answer.slot, slots[slot] = slot, answer
        begun.append(waiting.popleft())
    return begun


class Batch:
    """Cache, state (last token, its position, tokens drawn) and CUDA graphs of `n_slots` slots. One
    slot more is for the padding of a graph: it has length 1, or a softmax would be NaN.
    """

    def __init__(self, model, sampling, n_slots, length, n_vocab):
        config, self.device = model.config, model.head.device
        self.model = model
        self.sampling = sampling
        self.n_slots = n_slots
        self.n_vocab = n_vocab
        self.sizes = cache_sizes(config, length)
        self.caches = [
            Cache(n_slots + 1, config.num_key_value_heads, size, config.head_dim,
                  model.head.detach(), window) for size, window in zip(self.sizes, config.windows)]
        self.attention = model.decoder.attention
        self.state = torch.zeros(3, n_slots + 1, dtype=torch.int64, device=self.device)
        self.uniforms = torch.zeros(n_slots + 1, min(sampling.max_tokens, length),
                                    dtype=torch.float64, device=self.device)
        self.slots = torch.full((max(FIXED_SIZE, self.padded(n_slots)),), n_slots,
                                device=self.device)
        self.graphs, self.pool = {}, None

    def padded(self, n):
        """Return the number of sequences in a step of n, on a GPU with the padding for one of a few
        graphs: of 1, 2, 4, 8, 16, 32, 48, 64, 96, ... sequences.
        """
        if self.device.type != 'cuda':
            return n
        if self.sampling.deterministic:
            return FIXED_SIZE
        multiple = 16 if n <= 64 else 32
        return 1 << (n - 1).bit_length() if n <= 16 else -(-n // multiple) * multiple

    @torch.no_grad()
    def prefill(self, begun, prompts):
        """Compute the prompts of new answers; return a HostCopy of the values of `draw`."""
        row, at = pack_prompts(prompts, dict.fromkeys(answer.prompt for answer in begun))
        T, numbers = len(row.tokens), [*at]
        if self.sampling.deterministic:
            T = max(128, 1 << (T - 1).bit_length())
        tokens, positions, ends = to_device(row.padded(T)[0], self.device)
        # of each key its index in the row, the answer's slot, its position and the number of keys
        # after it, since a layer with a window keeps the last
        keys = []
        for answer in begun:
            p = np.arange(len(at[answer.prompt]))
            keys.append(np.broadcast_arrays(at[answer.prompt], answer.slot, p, p[::-1]))
        source, slot, position, later = np.concatenate(keys, 1)
        stored = {size: to_device(np.stack((source, slot, position % size))[:, later < size],
                                  self.device) for size in {*self.sizes}}
        config, kind = self.model.config, self.attention
        if kind == 'auto':      # FlexAttention would be compiled for each length
            kind = 'tree' if kernels.kernels_apply(self.model.head) else 'explicit'
        masks = masks_by(maker(kind, self.model.head, config.head_dim), config, positions[None],
                         ends[None])
        masks = [PrefillMask(mask, cache, *stored[cache.size])
                 for mask, cache in zip(masks, self.caches)]
        last = to_device([at[i][-1] for i in numbers], self.device)
        hidden = self.forward(tokens[None], positions[None], ends[None], masks, last)[0]
        return HostCopy(self.begin(begun, self.model.logits(hidden), numbers, prompts))

    def begin(self, begun, logits, numbers, prompts):
        """Draw the first token of new answers, from the logits of prompts `numbers`; set states."""
        entries = [(answer.slot, len(prompts[answer.prompt]), 1, numbers.index(answer.prompt))
                   for answer in begun]
        slots, lengths, ones, rows = to_device(torch.tensor(entries).T.contiguous(), self.device)
        seed, length = self.sampling.seed, self.uniforms.shape[1]
        uniforms = np.stack([random_numbers(seed, prompts[answer.prompt], answer.n_drawn, length)
                             for answer in begun])
        self.uniforms[slots] = to_device(uniforms, self.device)
        values = draw(logits[rows], self.uniforms[slots, 0], self.sampling, self.n_vocab)
        self.state[:, slots] = torch.stack((values[:, 0].long(), lengths, ones))
        return values

    @torch.no_grad()
    def step(self, active):
        """Compute the next token of each of these answers; return a HostCopy as `prefill`."""
        n = self.padded(len(active))
        slots = [answer.slot for answer in active] + [self.n_slots] * (n - len(active))
        longest = max(answer.n_prompt + answer.n_launched for answer in active)
        for answer in active:
            answer.n_launched += 1
        self.slots[:n] = to_device(slots, self.device)
        if self.device.type != 'cuda':
            return HostCopy(self.compute(n, longest))
        splits = 1 << (-(-longest // SPLIT) - 1).bit_length()
        if (n, splits) not in self.graphs:
            self.graphs[n, splits] = self.capture(n, splits * SPLIT)
        graph, values = self.graphs[n, splits]
        graph.replay()
        return HostCopy(values)

    def compute(self, n, longest):
        """Compute the next token in the slots `self.slots[:n]`; return the values of `draw`."""
        slots = self.slots[:n]
        tokens, positions, drawn = self.state[:, slots]
        masks = [DecodeMask(cache, slots, positions, longest, self.attention == 'auto')
                 for cache in self.caches]
        hidden = self.forward(tokens[:, None], positions[:, None], None, masks)[:, 0]
        values = draw(self.model.logits(hidden), self.uniforms[slots, drawn], self.sampling,
                      self.n_vocab)
        self.state[:, slots] = torch.stack((values[:, 0].long(), positions + 1, drawn + 1))
        self.state[:, -1] = 0
        return values

    def forward(self, *inputs):
        """Return the hidden states; blocks that were compiled for training run uncompiled."""
        with (torch.compiler.set_stance('force_eager') if self.model.decoder.compiled else
              contextlib.nullcontext()):
            return self.model(*inputs)

    def capture(self, n, longest):
        """Return a CUDA graph of `compute`, and its values; a step of padding loads the kernels."""
        slots = self.slots[:n].clone()
        self.slots[:n] = self.n_slots
        self.compute(n, longest)
        self.slots[:n] = slots
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            values = self.compute(n, longest)
        self.pool = self.pool or graph.pool()
        return graph, values


def step_cost(model, n, n_cached):
    """Return (bytes read, FLOPs) of a step of n sequences with n_cached cached tokens in all."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    if not config.tie_word_embeddings:      # hardly any of the embedding is read
        weights -= config.vocab_size * config.hidden_size
    cached = (2 * n_cached * config.num_hidden_layers * config.num_key_value_heads
              * config.head_dim)
    return (weights + cached) * model.head.element_size(), 2 * weights * n
