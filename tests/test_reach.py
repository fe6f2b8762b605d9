"""study/reach.py"""

import math

import numpy as np
import pytest
import torch

from model import CausalLM, ModelConfig
from study.reach import reachable_entropy


def test_reachable_entropy():
    config = ModelConfig(model_type='llama', vocab_size=8, hidden_size=8,
                                intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, head_dim=4, tie_word_embeddings=False)
    model = CausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.eye(8))
    found = reachable_entropy(model, 8, n_tokens=8)
    # the surest state puts all of its length sqrt(8) into one direction, or a little against the
    # others: logits a for one and b for the others, a^2 + 7 b^2 = 4 * 8
    a = np.linspace(0, 32 ** 0.5, 100_001)
    gap = (a + np.sqrt(np.maximum(32 - a ** 2, 0) / 7)).max()
    p = 1 / (1 + 7 * math.exp(-gap))
    entropy = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert found['lowest_bits'] == pytest.approx(entropy, abs=1e-3)
    assert found['lowest_nll_bits'] == pytest.approx(-math.log2(p), abs=1e-3)
    assert found['highest_bits'] == pytest.approx(3, abs=1e-3) and found['log2_vocab'] == 3
    model.config.final_logit_softcapping = 1.0
    capped = reachable_entropy(model, 8, n_tokens=8)['lowest_bits']
    p = 1 / (1 + 7 * math.exp(-2))      # not less than logits of 1 and -1
    floor = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert floor < capped and capped > found['lowest_bits']
