"""The keys of config.json: what each family has, assumes where one is missing, and allows.

Tables only; runtime/config_json.py reads them. A new family is a row of ARCHITECTURES and DEFAULTS
and, if it has keys of its own, of FIELDS or OWN_FIELDS.
"""

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
                 'gemma': 'GemmaForCausalLM', 'gemma2': 'Gemma2ForCausalLM',
                 'gemma3_text': 'Gemma3ForCausalLM', 'cohere': 'CohereForCausalLM',
                 'cohere2': 'Cohere2ForCausalLM', 'olmo2': 'Olmo2ForCausalLM',
                 'olmo3': 'Olmo3ForCausalLM', 'smollm3': 'SmolLM3ForCausalLM',
                 'phi3': 'Phi3ForCausalLM', 'ministral': 'MinistralForCausalLM',
                 'ministral3': 'Ministral3ForCausalLM', 'granite': 'GraniteForCausalLM',
                 'opt': 'OPTForCausalLM', 'gpt_neox': 'GPTNeoXForCausalLM'}
REWARD = 'CausalLM', 'SequenceClassification'     # how transformers names a reward model
# models of text and images, of which the text model is read, and the type of that if none is given
NESTED = {'gemma3': 'gemma3_text', 'mistral3': 'mistral'}
# The keys of a family beyond those of COMMON, and what transformers assumes where they are missing.
# A key that is in neither means nothing to transformers.
COMMON = {'vocab_size': None, 'hidden_size': None, 'num_hidden_layers': None,
          'num_attention_heads': None, 'max_position_embeddings': 2048,
          'initializer_range': 0.02, 'tie_word_embeddings': False, 'bos_token_id': None,
          'eos_token_id': None, 'pad_token_id': None}
REQUIRED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
            'num_attention_heads')
ROTARY = {'intermediate_size': None, 'num_key_value_heads': 0, 'head_dim': 0, 'hidden_act': 'silu',
          'rope_theta': 1e4, 'partial_rotary_factor': 1.0, 'attention_dropout': 0.0}
LLAMA = ROTARY | {'rms_norm_eps': 1e-6}
BIAS = {'attention_bias': False}
WINDOW = {'sliding_window': 4096, 'layer_types': None}
QWEN = LLAMA | {'num_key_value_heads': 32, 'max_position_embeddings': 32768,
                'use_sliding_window': False, 'max_window_layers': 28} | WINDOW
GEMMA = LLAMA | BIAS | {'tie_word_embeddings': True, 'head_dim': 256,
                        'max_position_embeddings': 8192, 'hidden_act': 'gelu_pytorch_tanh',
                        'hidden_activation': 'gelu_pytorch_tanh'}
GEMMA2 = GEMMA | WINDOW | {'num_key_value_heads': 4, 'query_pre_attn_scalar': 256,
                           'final_logit_softcapping': 30.0, 'attn_logit_softcapping': 50.0}
GEMMA3 = {key: value for key, value in GEMMA2.items() if key != 'attn_logit_softcapping'} | {
    'vocab_size': 262208, 'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26,
    'num_attention_heads': 8, 'max_position_embeddings': 131072, 'final_logit_softcapping': None,
    'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'sliding_window_pattern': 6}
MISTRAL = LLAMA | WINDOW | {'num_key_value_heads': 8, 'max_position_embeddings': 131072}
OLMO = LLAMA | BIAS | {'rms_norm_eps': 1e-5}
COHERE = ROTARY | BIAS | {'tie_word_embeddings': True, 'max_position_embeddings': 8192,
                          'logit_scale': 0.0625, 'layer_norm_eps': 1e-5}
DEFAULTS = {
    'llama': LLAMA | BIAS | {'mlp_bias': False},
    'mistral': MISTRAL,
    'qwen2': QWEN,
    'qwen3': QWEN | BIAS | {'head_dim': 128},
    'gemma': GEMMA | {'num_key_value_heads': 16},
    'gemma2': GEMMA2,
    'gemma3_text': GEMMA3,
    'cohere': COHERE | {'rope_theta': 5e5, 'use_qk_norm': False},
    'cohere2': COHERE | WINDOW | {'sliding_window_pattern': 4},
    'olmo2': OLMO,
    'olmo3': OLMO | WINDOW | {'rope_theta': 5e5},
    'smollm3': LLAMA | BIAS | {
        'mlp_bias': False, 'num_key_value_heads': 4, 'max_position_embeddings': 32768,
        'rope_theta': 2e6, 'tie_word_embeddings': True, 'use_sliding_window': False,
        'sliding_window': None, 'layer_types': None, 'no_rope_layers': None,
        'no_rope_layer_interval': 4},
    'phi3': LLAMA | {'rms_norm_eps': 1e-5, 'max_position_embeddings': 4096, 'sliding_window': None,
                     'original_max_position_embeddings': 4096, 'resid_pdrop': 0.0,
                     'embd_pdrop': 0.0},
    'ministral': MISTRAL,
    'ministral3': LLAMA | {'num_key_value_heads': 8, 'head_dim': 128, 'rms_norm_eps': 1e-5,
                           'max_position_embeddings': 262144, 'sliding_window': None},
    'granite': LLAMA | BIAS | {'mlp_bias': False, 'embedding_multiplier': 1.0,
                               'residual_multiplier': 1.0, 'attention_multiplier': 1.0,
                               'logits_scaling': 1.0},
    'opt': {'ffn_dim': 3072, 'word_embed_proj_dim': None, 'do_layer_norm_before': True,
            'enable_bias': True, 'tie_word_embeddings': True, 'init_std': 0.02,
            'activation_function': 'relu', 'layer_norm_elementwise_affine': True,
            '_remove_final_layer_norm': False, 'dropout': 0.1, 'attention_dropout': 0.0,
            'layerdrop': 0.0},
    'gpt_neox': {'intermediate_size': None, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5,
                 'rotary_emb_base': 1e4, 'rotary_pct': 0.25, 'attention_bias': True,
                 'use_parallel_residual': True, 'attention_dropout': 0.0, 'hidden_dropout': 0.0,
                 'classifier_dropout': 0.1, 'is_decoder': False},
}
# every n-th layer has no window, if config.json does not say which
PATTERN = {'gemma2': 2, 'olmo3': 4}

# the allowed values of each key, as alternatives: (lowest, highest) of integers or, if these are
# floats, of any numbers; a type; [alternatives for the items of a list]; or a value
SIZE, COUNT, TOKEN, CAP, SHARE = (1, 2**20), (1, 2**31), (0, 2**31), (1e-3, 1e6), (0.0, 1.0)
FACTOR, EPS, POSITIVE = (1.0, 1e6), (1e-12, 1.0), (1e-6, 1e6)
FIELDS = {key: rule for keys, rule in {
    'vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads '
    'ffn_dim': [SIZE],
    'head_dim word_embed_proj_dim': [SIZE, None],
    'num_hidden_layers': [(1, 10_000)],
    'max_position_embeddings query_pre_attn_scalar original_max_position_embeddings': [COUNT],
    'max_window_layers': [(0, 10_000)],
    'sliding_window_pattern no_rope_layer_interval': [(1, 10_000)],
    'no_rope_layers': [[(0, 1)], None],
    'embedding_multiplier residual_multiplier attention_multiplier logits_scaling '
    'logit_scale': [POSITIVE],
    'sliding_window': [COUNT, None],
    'layer_types': [['sliding_attention', 'full_attention'], None],
    'rms_norm_eps layer_norm_eps': [EPS],
    'rope_theta rope_local_base_freq rotary_emb_base': [(1.0, 1e30)],
    'partial_rotary_factor': [(1.0, 1.0), None],
    'rotary_pct': [SHARE],
    'attn_logit_softcapping final_logit_softcapping': [CAP, None],
    'initializer_range init_std attention_dropout hidden_dropout classifier_dropout dropout '
    'layerdrop resid_pdrop embd_pdrop': [SHARE],
    'bos_token_id eos_token_id': [TOKEN, [TOKEN], None],
    'pad_token_id': [(-1, 2**31), [TOKEN], None],    # -1: none, in early conversions of LLaMA
    'dtype torch_dtype': ['float32', 'bfloat16', 'float16', 'float64', None],
    'tie_word_embeddings use_cache attention_bias mlp_bias use_parallel_residual is_decoder '
    'use_sliding_window use_qk_norm do_layer_norm_before enable_bias': [bool],
    'activation_function': ['relu'],
    'layer_norm_elementwise_affine': [True],
    '_remove_final_layer_norm': [False],
    'hidden_act': ['silu'],
    'hidden_activation': ['gelu_pytorch_tanh'],
    'use_bidirectional_attention': [False, None],
    'is_causal': [True],
    'pretraining_tp': [COUNT, None],
    'architectures': [[str], None],
    'transformers_version': [str, None],
    'rope_parameters rope_scaling nanocal': [dict, None],
    'per_layer_config quantization_config': [None],
}.items() for key in keys.split()}
ALWAYS = {'dtype', 'torch_dtype', 'use_cache', 'use_bidirectional_attention', 'is_causal',
          'pretraining_tp', 'architectures', 'transformers_version', 'rope_parameters',
          'rope_scaling', 'nanocal', 'per_layer_config', 'quantization_config'}
# other rules of one family
OWN_FIELDS = {
    'qwen2': {'head_dim': [SIZE]},
    'qwen3': {'head_dim': [SIZE]},
    # Gemma's first config files say 'gelu' and mean the tanh approximation, too
    'gemma': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh', 'gelu'],
              'hidden_activation': ['gelu_pytorch_tanh', None]},
    'gemma2': {'head_dim': [SIZE], 'sliding_window': [COUNT], 'hidden_act': ['gelu_pytorch_tanh']},
    'gemma3_text': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh'],
                    'attn_logit_softcapping': [CAP, None]},     # not used by transformers
    **dict.fromkeys(('cohere', 'cohere2', 'olmo2', 'olmo3', 'smollm3', 'granite'),
                    {'head_dim': [SIZE]}),
    'phi3': {'head_dim': [SIZE], 'partial_rotary_factor': [SHARE]},
    # in transformers, head_dim would change the rotary angles but not the size of the heads
    'gpt_neox': {'head_dim': [None], 'hidden_act': ['gelu'], 'tie_word_embeddings': [False]},
}
# numbers that transformers wants as floats
FLOATS = {'rms_norm_eps', 'layer_norm_eps', 'initializer_range', 'init_std', 'logit_scale',
          'attn_logit_softcapping', 'final_logit_softcapping', 'rope_theta', 'rotary_emb_base'}
# {key: the field of ModelConfig that it sets}, if that has another name
CONFIG_FIELDS = {'rms_norm_eps': 'norm_eps', 'layer_norm_eps': 'norm_eps',
                 'ffn_dim': 'intermediate_size', 'word_embed_proj_dim': 'embed_size',
                 'init_std': 'initializer_range', 'embedding_multiplier': 'embed_scale',
                 'residual_multiplier': 'residual_scale', 'attention_multiplier': 'scale'}
# {key: the fields of Family that it sets}, and {key: (value, the field that it changes, to what)}
BIASES = {'attention_bias': ('qkv_bias', 'o_bias'), 'mlp_bias': ('mlp_bias',),
          'enable_bias': ('qkv_bias', 'o_bias', 'mlp_bias')}
CHANGES = {'use_parallel_residual': (False, 'place', 'before'),
           'do_layer_norm_before': (False, 'place', 'after the sum'),
           'use_qk_norm': (True, 'qk_norm', 'each')}

# rotary positions: a block of transformers 5 or 4, and two keys outside it, with their names there
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')
OUTSIDE = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
LENGTH = 'original_max_position_embeddings'
MAYBE = dict.fromkeys(('attention_factor', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim'),
                      [POSITIVE, None])
LONGROPE = ({'short_factor': [[POSITIVE]], 'long_factor': [[POSITIVE]]},
            {LENGTH: [COUNT], 'factor': [FACTOR], 'attention_factor': [POSITIVE, None]})
SCHEMES = {     # {rope_type: (the keys that it needs, those that it may have)}
    'default': ({}, {}),
    'linear': ({'factor': [FACTOR]}, {}),
    'dynamic': ({'factor': [FACTOR]}, {}),
    'llama3': ({'factor': [FACTOR], 'low_freq_factor': [POSITIVE], 'high_freq_factor': [POSITIVE],
                LENGTH: [COUNT]}, {}),
    'yarn': ({'factor': [FACTOR]}, MAYBE | {LENGTH: [COUNT], 'truncate': [bool]}),
    'longrope': LONGROPE, 'su': LONGROPE,
}
# the schemes that a family may have: all but 'su', if it is not listed
ROPE_TYPES = [scheme for scheme in SCHEMES if scheme != 'su']
OWN_ROPE_TYPES = {'phi3': ['default', 'longrope', 'su'], 'ministral3': ['yarn']}
MINISTRAL3_ROPE = {'rope_type': 'yarn', 'rope_theta': 1e6, 'factor': 16.0, LENGTH: 16384,
                   'beta_fast': 32.0, 'beta_slow': 1.0, 'mscale_all_dim': 1.0, 'mscale': 1.0,
                   'llama_4_scaling_beta': 0.1}
# families with a block per layer type, and the name of the base of windowed layers outside it
BY_LAYER_TYPE = {'gemma3_text': 'rope_local_base_freq', 'olmo3': ''}
# adapter_config.json, as `save_adapter` writes it
ADAPTER_FIELDS = {'peft_type': ['LORA'], 'task_type': ['CAUSAL_LM'],
                  'base_model_name_or_path': [str], 'r': [SIZE], 'lora_alpha': [(0.0, 1e9)],
                  'lora_dropout': [SHARE], 'target_modules': [[str]], 'bias': ['none'],
                  'fan_in_fan_out': [False], 'inference_mode': [True]}
# the block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)], 'long_context': [bool]}


def rules_of(kind: str) -> dict:
    """Return {key: its allowed values} of the keys that mean something in a family."""
    keys = ALWAYS | COMMON.keys() | DEFAULTS[kind].keys()
    return {key: FIELDS[key] for key in FIELDS if key in keys} | OWN_FIELDS.get(kind, {})
