"""Claim 3: vocabularies of 2^9 to 2^18 by hidden sizes of 64 to 1024, Gemma 2 of two layers.

With and without the soft-cap; all rows of the vocabulary pieces of the tokenizer, or 4,096 of them.
Names are hundreds of thousands of words of their own, so that there are 2^18 real pieces.
"""

out_dir = 'out/study/vocabulary'
seeds = (0, 1, 2, 3, 4)
demo_world = '{out_dir}/world'
cache_dir = '{out_dir}/cache'
world = {
    'entities': 1_000_000, 'unseen': 10_000, 'zipf': 0.7,
    'first_names': 10, 'family_names': 400_000,
    'documents': 120_000, 'entities_each': 6, 'list_share': 0.3, 'exam_share': 0.15,
    'paraphrases': True, 'vocab_sizes': (512, 4_096, 32_768, 262_144),
    'tokenizer_documents': 120_000,
    'instructions': 4_000, 'questions': 2_000, 'unseen_questions': 400, 'validation': 400,
    'forms': ('text4', 'letters4'), 'probes': 2_000,
}

pack_len = 1024
max_length = 512
checkpoint_epochs = False
save_every = None
log_every = 100

eval_tasks = ('{out_dir}/world/text4', '{out_dir}/world/letters4', 'clm:{out_dir}/world/clm.jsonl',
              'facts:{out_dir}/world/facts.jsonl')
eval_before = False
eval_scoring = 'text'
eval_norm = 'sum'           # an option is one token or, with 512 pieces, several
eval_shots = 0
eval_temperature = 'fit'
eval_n_bootstrap = 0
pictures = False
eval_reach = True

# the learning rates are 0.5 / hidden_size of the base models and 0.2 / hidden_size of tuning
vary = {
    'D': {64: {'mlp': 192, 'heads': 1, 'base_lr': 8e-3, 'tuned_lr': 3.2e-3},
          256: {'mlp': 704, 'heads': 4, 'base_lr': 2e-3, 'tuned_lr': 8e-4},
          1024: {'mlp': 2816, 'heads': 16, 'base_lr': 5e-4, 'tuned_lr': 2e-4}},
    'V': (512, 4_096, 32_768, 262_144),
    'cap': (30.0, None),
    'smoothing': (0.0, 0.1),
}
runs = {
    'base': {
        'model': '{out_dir}/world/model-{V}', 'from_scratch': True, 'lr': '{base_lr}',
        'shape': {'model_type': 'gemma2', 'hidden_size': '{D}', 'intermediate_size': '{mlp}',
                  'num_hidden_layers': 2, 'num_attention_heads': '{heads}',
                  'num_key_value_heads': '{heads}', 'head_dim': 64, 'query_pre_attn_scalar': 64,
                  'sliding_window': 1024, 'attn_logit_softcapping': 50.0,
                  'final_logit_softcapping': '{cap}'},
        'data': '{out_dir}/world/text.jsonl', 'data_kind': 'text', 'epochs': 2.0,
        'batch_size': 96, 'micro_rows': 11, 'schedule': 'cosine', 'final_lr': 0.05,
        'weight_decay': 0.1, 'betas': (0.9, 0.95),
    },
    'base-unused': {
        'model': '{out_dir}/world/model-4096', 'from_scratch': True, 'lr': '{base_lr}',
        'shape': {'model_type': 'gemma2', 'hidden_size': '{D}', 'intermediate_size': '{mlp}',
                  'num_hidden_layers': 2, 'num_attention_heads': '{heads}',
                  'num_key_value_heads': '{heads}', 'head_dim': 64, 'query_pre_attn_scalar': 64,
                  'sliding_window': 1024, 'attn_logit_softcapping': 50.0,
                  'final_logit_softcapping': 30.0, 'vocab_size': 262_144},
        'data': '{out_dir}/world/text.jsonl', 'data_kind': 'text', 'epochs': 2.0,
        'batch_size': 96, 'micro_rows': 11, 'schedule': 'cosine', 'final_lr': 0.05,
        'weight_decay': 0.1, 'betas': (0.9, 0.95),
    },
    'tuned': {
        'model': '{out_dir}/base-D{D}-V{V}-cap{cap}', 'lr': '{tuned_lr}',
        'smoothing': '{smoothing}', 'data': '{out_dir}/world/instruct.jsonl', 'epochs': 3.0,
        'batch_size': 64, 'micro_rows': 4,
    },
    'tuned-unused': {
        'model': '{out_dir}/base-unused-D{D}', 'lr': '{tuned_lr}', 'smoothing': '{smoothing}',
        'data': '{out_dir}/world/instruct.jsonl', 'epochs': 3.0,
        'batch_size': 64, 'micro_rows': 4,
    },
}
