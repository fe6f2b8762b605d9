"""The settings of decoding. Nothing here needs torch."""

import math
from dataclasses import dataclass
from typing import Literal

from data.templates import TEMPLATES
from runtime.config import require_given, require_range
from runtime.errors import ConfigError


@dataclass
class Sampling:
    """How tokens are drawn, and how many sequences are decoded at once."""
    n: int = 1                          # answers per prompt
    max_tokens: int = 256               # longest answer
    temperature: float = 1.0            # divides the logits; 0: the most probable token
    top_k: int = 0                      # draw from the k most probable tokens; 0: from all
    top_p: float = 1.0                  # draw from the fewest tokens with this total probability
    min_p: float = 0.0                  # draw from tokens with this share of the top probability
    stop: tuple[str, ...] = ()          # an answer ends before any of these strings
    seed: int = 0                       # of the random numbers
    deterministic: bool = False         # logits do not depend on the other sequences; slower
    batch_size: int = 256               # largest number of sequences decoded at once
    cache_memory: float | None = None   # GiB for keys and values; None: what is free


@dataclass
class DecodingConfig(Sampling):
    """The settings that generate.py and sample.py share."""
    model: str = ''                     # a folder in Hugging Face layout, or a hub name
    revision: str | None = None         # the hub revision of the model
    # the chat template; auto: that of the model's train.py run here, else the tokenizer's own
    chat: Literal['auto', 'model', 'trained', *TEMPLATES] = 'auto'
    raw: bool = False                   # continue each prompt as plain text, without chat
    device: str = 'auto'                # 'cpu', 'cuda', 'cuda:1'; auto: a GPU if there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU, else float32


def check_decoding(cfg):
    """Raise ConfigError for a value of a DecodingConfig that cannot be used."""
    require_given(cfg, model='out/run')
    require_range(cfg, 1, math.inf, 'n', 'max_tokens', 'batch_size')
    require_range(cfg, 0, math.inf, 'temperature', 'top_k', 'cache_memory')
    require_range(cfg, 1e-3, 1, 'top_p')
    require_range(cfg, 0, 1, 'min_p')
    require_range(cfg, 0, 2 ** 63 - 1, 'seed')
    if 0 < cfg.temperature < 1e-4:      # float32 cannot hold the logits divided by it
        raise ConfigError(f'temperature = {cfg.temperature}; it must be 0 or at least 0.0001; '
                          f'use 0 for the most probable token')
    if '' in cfg.stop:
        raise ConfigError('stop has an empty string, which would end every answer at once')
    if cfg.n > 1 and cfg.temperature == 0:
        raise ConfigError(f'n = {cfg.n} needs a temperature above 0: all answers would be equal')
    for key, off in (('top_p', 1), ('top_k', 0), ('min_p', 0)):
        if cfg.temperature == 0 and getattr(cfg, key) != off:
            raise ConfigError(f'{key} = {getattr(cfg, key)} needs a temperature above 0, such as 1')
    if cfg.raw and cfg.chat != 'auto':
        raise ConfigError(f'--raw is plain text, and --chat={cfg.chat} is not; leave one out')
