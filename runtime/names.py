"""The names that weights have on disk, where they are not those of model.py."""

import re

from families import t5
from model import ModelConfig

# what files hold besides the weights of a model of text: rotary frequencies, causal masks and their
# fill value; T5's copies of the embedding, and a table that it does not use; weights for images
BUFFERS = re.compile(r'.*rotary_emb\.inv_freq|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias|'
                     r'(en|de)coder\.embed_tokens\.weight|'
                     r'decoder.*\.EncDecAttention\.relative_attention_bias\.weight|'
                     r'(model\.)?(vision_tower|multi_modal_projector)\..*')
# (part of our name, part of the name on disk) of a parameter, applied one after the other
LLAMA_NAMES = (('pre_feedforward_layernorm', 'post_attention_layernorm'),)
NAMES = {
    'gemma2': (), 'gemma3_text': (), 'olmo2': (), 'olmo3': (),
    'gpt_neox': (*LLAMA_NAMES, ('model.norm', 'gpt_neox.final_layer_norm'), ('model.', 'gpt_neox.'),
                 ('embed_tokens', 'embed_in'), ('lm_head', 'embed_out'),
                 ('self_attn.qkv_proj', 'attention.query_key_value'),
                 ('self_attn.o_proj', 'attention.dense'), ('mlp.up_proj', 'mlp.dense_h_to_4h'),
                 ('mlp.down_proj', 'mlp.dense_4h_to_h')),
    'opt': (('model.norm', 'model.final_layer_norm'), ('model.', 'model.decoder.'),
            ('input_layernorm', 'self_attn_layer_norm'), ('o_proj', 'out_proj'),
            ('pre_feedforward_layernorm', 'final_layer_norm'),
            ('post_attention_layernorm', 'self_attn_layer_norm'),
            ('post_feedforward_layernorm', 'final_layer_norm'),
            ('mlp.up_proj', 'fc1'), ('mlp.down_proj', 'fc2')),
    **dict.fromkeys(t5.ARCHITECTURES, (('model.embed_tokens', 'shared'),)),
}
# (prefix of names in models of text and images or in OPT's files, what replaces it)
PREFIXES = ((r'^language_model\.(?=model\.|lm_head)', ''), (r'^model\.language_model\.', 'model.'))
OPT_PREFIXES = ((r'^decoder\.', 'model.decoder.'),)


def their_key(key: str, config: ModelConfig) -> str:
    """Return the name on disk of a parameter, or of a part of one, such as an adapted layer."""
    for ours, theirs in NAMES.get(config.model_type, LLAMA_NAMES):
        key = key.replace(ours, theirs)
    return key


def text_key(stored: str, config) -> str:
    """Return the name of a tensor in a file as it is in a file of the text model alone."""
    for pattern, replacement in OPT_PREFIXES if config.model_type == 'opt' else PREFIXES:
        stored = re.sub(pattern, replacement, stored)
    return stored
