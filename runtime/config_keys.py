"""The keys of config.json: what each family has, assumes where one is missing, and allows.

Tables for runtime/config_json.py. A new family is a row of DEFAULTS and, if it has
keys of its own, of FIELDS or OWN_FIELDS.
"""

from runtime.json_rules import each

REWARD = 'CausalLM', 'SequenceClassification'     # how transformers names a reward model
SEQ2SEQ = 't5', 'mt5'       # an encoder and a decoder, for evaluation alone: families/t5.py
# {type of a multimodal model: type of its text model, if config.json does not name it}
NESTED = {'gemma3': 'gemma3_text', 'mistral3': 'mistral'}

# The keys of a family besides ALWAYS, and what transformers assumes where they are missing; `...`
# stands for a required key. transformers ignores a key that is in neither.
BASE = dict.fromkeys(('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads'),
                     ...) | {'max_position_embeddings': 2048}
ROTARY = BASE | {'intermediate_size': ..., 'num_key_value_heads': 0, 'head_dim': 0,
                 'hidden_act': 'silu', 'rope_theta': 1e4, 'partial_rotary_factor': 1.0}
BIAS = {'attention_bias': False}
WINDOW = {'sliding_window': 4096, 'layer_types': None}
LLAMA = ROTARY | {'rms_norm_eps': 1e-6}
BIASED_LLAMA = LLAMA | BIAS | {'mlp_bias': False}
MISTRAL = LLAMA | WINDOW | {'num_key_value_heads': 8, 'max_position_embeddings': 131072}
QWEN = LLAMA | WINDOW | {'num_key_value_heads': 32, 'max_position_embeddings': 32768,
                         'use_sliding_window': False, 'max_window_layers': 28}
GEMMA = LLAMA | BIAS | {'tie_word_embeddings': True, 'head_dim': 256,
                        'max_position_embeddings': 8192, 'hidden_act': 'gelu_pytorch_tanh',
                        'hidden_activation': 'gelu_pytorch_tanh'}
WINDOWED_GEMMA = GEMMA | WINDOW | {'num_key_value_heads': 4, 'query_pre_attn_scalar': 256,
                                   'final_logit_softcapping': 30.0}
OLMO = LLAMA | BIAS | {'rms_norm_eps': 1e-5}
COHERE = ROTARY | BIAS | {'tie_word_embeddings': True, 'max_position_embeddings': 8192,
                          'logit_scale': 0.0625, 'layer_norm_eps': 1e-5}
DEFAULTS = {
    'llama': BIASED_LLAMA,
    'mistral': MISTRAL,
    'ministral': MISTRAL,
    'ministral3': LLAMA | {
        'num_key_value_heads': 8, 'head_dim': 128, 'rms_norm_eps': 1e-5,
        'max_position_embeddings': 262144, 'sliding_window': None},
    'qwen2': QWEN,
    'qwen3': QWEN | BIAS | {'head_dim': 128},
    'gemma': GEMMA | {'num_key_value_heads': 16},
    'gemma2': WINDOWED_GEMMA | {'attn_logit_softcapping': 50.0},
    'gemma3_text': WINDOWED_GEMMA | {
        'vocab_size': 262208, 'hidden_size': 2304, 'intermediate_size': 9216,
        'num_hidden_layers': 26, 'num_attention_heads': 8, 'max_position_embeddings': 131072,
        'final_logit_softcapping': None, 'rope_theta': 1e6, 'rope_local_base_freq': 1e4,
        'sliding_window_pattern': 6},
    'cohere': COHERE | {'rope_theta': 5e5, 'use_qk_norm': False},
    'cohere2': COHERE | WINDOW | {'sliding_window_pattern': 4},
    'olmo2': OLMO,
    'olmo3': OLMO | WINDOW | {'rope_theta': 5e5},
    'smollm3': BIASED_LLAMA | {
        'num_key_value_heads': 4, 'max_position_embeddings': 32768, 'rope_theta': 2e6,
        'tie_word_embeddings': True, 'use_sliding_window': False, 'sliding_window': None,
        'layer_types': None, 'no_rope_layers': None, 'no_rope_layer_interval': 4},
    'phi3': LLAMA | {
        'rms_norm_eps': 1e-5, 'max_position_embeddings': 4096, 'sliding_window': None,
        'original_max_position_embeddings': 4096, 'resid_pdrop': 0.0, 'embd_pdrop': 0.0},
    'granite': BIASED_LLAMA | {
        'embedding_multiplier': 1.0, 'residual_multiplier': 1.0, 'attention_multiplier': 1.0,
        'logits_scaling': 1.0},
    'opt': BASE | {
        'ffn_dim': 3072, 'word_embed_proj_dim': None, 'do_layer_norm_before': True,
        'enable_bias': True, 'tie_word_embeddings': True, 'init_std': 0.02,
        'activation_function': 'relu', 'layer_norm_elementwise_affine': True,
        '_remove_final_layer_norm': False, 'dropout': 0.1, 'layerdrop': 0.0},
    'gpt_neox': BASE | {
        'intermediate_size': ..., 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5,
        'rotary_emb_base': 1e4, 'rotary_pct': 0.25, 'attention_bias': True,
        'use_parallel_residual': True, 'hidden_dropout': 0.0, 'classifier_dropout': 0.1,
        'is_decoder': False},
}
# the class of transformers, where it is not the model_type with a capital letter
CLASSES = {'gemma3_text': 'Gemma3', 'smollm3': 'SmolLM3', 'opt': 'OPT', 'gpt_neox': 'GPTNeoX'}
ARCHITECTURES = {kind: f'{CLASSES.get(kind, kind.capitalize())}ForCausalLM' for kind in DEFAULTS}
# where transformers wants a hidden_size of num_attention_heads equal parts, whatever head_dim is
WHOLE_HEADS = {'llama', 'gemma2', 'gemma3_text', 'gpt_neox', 'opt'}
# every n-th layer has no window, if config.json does not say which
PATTERN = {'gemma2': 2, 'olmo3': 4}

# The allowed values of each key, as in json_rules.py; of other keys of DEFAULTS only the default
SIZE, COUNT, TOKEN, CAP, SHARE = (1, 2**20), (1, 2**31), (0, 2**31), (1e-3, 1e6), (0.0, 1.0)
FACTOR, EPS, POSITIVE, LAYERS = (1.0, 1e6), (1e-12, 1.0), (1e-6, 1e6), (1, 10_000)
ALWAYS = each({
    'initializer_range attention_dropout': [SHARE],
    'bos_token_id eos_token_id': [TOKEN, [TOKEN], None],
    'pad_token_id': [(-1, 2**31), [TOKEN], None],    # -1: none, in early conversions of LLaMA
    'dtype torch_dtype': ['float32', 'bfloat16', 'float16', 'float64', None],
    'tie_word_embeddings use_cache': [bool],
    'use_bidirectional_attention': [False, None],
    'is_causal': [True],
    'pretraining_tp': [COUNT, None],
    'architectures': [[str], None],
    'transformers_version': [str, None],
    'rope_parameters rope_scaling nanocal': [dict, None],
    'per_layer_config': [None]})
FIELDS = ALWAYS | each({
    'vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim '
    'ffn_dim': [SIZE],
    'word_embed_proj_dim': [SIZE, None],
    'num_hidden_layers sliding_window_pattern no_rope_layer_interval': [LAYERS],
    'max_window_layers': [(0, 10_000)],
    'max_position_embeddings query_pre_attn_scalar original_max_position_embeddings': [COUNT],
    'no_rope_layers': [[(0, 1)], None],
    'embedding_multiplier residual_multiplier attention_multiplier logits_scaling '
    'logit_scale': [POSITIVE],
    'sliding_window': [COUNT, None],
    'layer_types': [['sliding_attention', 'full_attention'], None],
    'rms_norm_eps layer_norm_eps': [EPS],
    'rope_theta rope_local_base_freq rotary_emb_base': [(1.0, 1e30)],
    'partial_rotary_factor': [(1.0, 1.0), None],
    'attn_logit_softcapping final_logit_softcapping': [CAP, None],
    'rotary_pct init_std hidden_dropout classifier_dropout dropout layerdrop resid_pdrop '
    'embd_pdrop': [SHARE],
    'attention_bias mlp_bias use_parallel_residual is_decoder use_sliding_window use_qk_norm '
    'do_layer_norm_before enable_bias': [bool]})
# the keys whose integers are written as floats, as transformers 5 wants them
FLOATS = {key for key, rule in FIELDS.items()
          if any(type(option) is tuple and type(option[0]) is float for option in rule)}
# other rules of one family
OWN_FIELDS = {
    **dict.fromkeys(('llama', 'mistral', 'ministral', 'ministral3'), {'head_dim': [SIZE, None]}),
    # Gemma's first config files say 'gelu' and mean the tanh approximation, too
    'gemma': {'hidden_act': ['gelu_pytorch_tanh', 'gelu'],
              'hidden_activation': ['gelu_pytorch_tanh', None]},
    'gemma2': {'sliding_window': [COUNT]},
    'gemma3_text': {'attn_logit_softcapping': [CAP, None]},     # not used by transformers
    'phi3': {'partial_rotary_factor': [SHARE]},
    # in transformers, head_dim would change the rotary angles but not the size of the heads
    'gpt_neox': {'head_dim': [None], 'tie_word_embeddings': [False]},
}
# {key: the field of ModelConfig that it sets}, if that has another name
CONFIG_FIELDS = {'rms_norm_eps': 'norm_eps', 'layer_norm_eps': 'norm_eps',
                 'ffn_dim': 'intermediate_size', 'word_embed_proj_dim': 'embed_size',
                 'init_std': 'initializer_range', 'embedding_multiplier': 'embed_scale',
                 'residual_multiplier': 'residual_scale', 'attention_multiplier': 'scale'}
# {key: the fields of Family that it sets}, and {key: (value, the field that it changes, to what)}
BIASES = {'attention_bias': ('qkv_bias', 'o_bias'), 'mlp_bias': ('mlp_bias',),
          'enable_bias': ('qkv_bias', 'o_bias', 'mlp_bias')}
CHANGES = {'use_parallel_residual': (False, 'norm_order', 'before'),
           'do_layer_norm_before': (False, 'norm_order', 'after the sum'),
           'use_qk_norm': (True, 'qk_norm', 'each')}
# the block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)], 'long_context': [bool]}

# Rotary positions: transformers 5 has a block `rope_parameters`, transformers 4 a block
# `rope_scaling` beside rope_theta. docs/models.md explains the schemes.
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')
LAYER_TYPES = ('full_attention', 'sliding_attention')
# {key of a block: its name outside the block, where it may be instead}
OUTSIDE = {'rope_theta': 'rope_theta', 'partial_rotary_factor': 'partial_rotary_factor'}
OWN_OUTSIDE = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
# families with a block per layer type, and the name of the base of windowed layers outside it
BY_LAYER_TYPE = {'gemma3_text': 'rope_local_base_freq', 'olmo3': ''}
LENGTH = 'original_max_position_embeddings'
SCALED = {'factor': [FACTOR]}
YARN = each({'attention_factor': [POSITIVE, None], LENGTH: [COUNT], 'truncate': [bool],
             # 0 is as if the key were missing
             'beta_fast beta_slow mscale mscale_all_dim': [(0.0, 1e6), None]})
SCHEMES = {     # {rope_type: (the keys that it needs, those that it may have)}
    'default': ({}, {}),
    'linear': (SCALED, {}),
    'dynamic': (SCALED, {}),
    'llama3': (SCALED | each({'low_freq_factor high_freq_factor': [POSITIVE], LENGTH: [COUNT]}),
               {}),
    'yarn': (SCALED, YARN),
    'longrope': (each({'short_factor long_factor': [[POSITIVE]]}),
                 SCALED | {LENGTH: [COUNT], 'attention_factor': [POSITIVE, None]}),
}
# keys that transformers ignores where the scheme has no use for them; any other one is an error
IGNORED = {'finetuned', 'attn_factor'}.union(*(part for pair in SCHEMES.values() for part in pair))
OWN_SCHEMES = {
    'phi3': {'default': SCHEMES['default'], 'longrope': SCHEMES['longrope'],
             'su': SCHEMES['longrope']},
    'ministral3': {'yarn': (SCALED | {'llama_4_scaling_beta': [(0.0, 1e3)]},
                            YARN | {'max_position_embeddings': [COUNT]})},
    # in a block per layer type, transformers does not read `truncate`
    **dict.fromkeys(BY_LAYER_TYPE, SCHEMES | {'yarn': (SCALED, YARN | {'truncate': [True]})}),
}
# the block of a family, if it has none
OWN_BLOCKS = {'ministral3': {
    'rope_type': 'yarn', 'rope_theta': 1e6, 'factor': 16.0, LENGTH: 16384, 'beta_fast': 32.0,
    'beta_slow': 1.0, 'mscale_all_dim': 1.0, 'mscale': 1.0, 'llama_4_scaling_beta': 0.1}}


def rules_of(kind: str) -> dict:
    """Return {key: its allowed values} of the keys that mean something in a family."""
    own = {key: FIELDS.get(key, [default]) for key, default in DEFAULTS[kind].items()}
    return ALWAYS | own | OWN_FIELDS.get(kind, {})
