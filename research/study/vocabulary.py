"""Claim 3: vocabularies of 2^9 to 2^18 by hidden sizes of 64 to 1024; Gemma 2 of two layers.

Every model is trained with and without the softcap. 'unused' ones have 2^18 rows of which only
4,096 are pieces of the tokenizer. Names are hundreds of thousands of words of their own, so that
there are 2^18 real pieces. The least and the most entropy that the output layer of each model
allows go to its reach.json.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common
from research.study.reach import probe
from research.study.world import StudySpec, make_world
from train import TrainConfig

VOCABULARIES = (512, 4_096, 32_768, 262_144)
FORMS = ('text4', 'letters4')
WORLD = StudySpec(
    entities=1_000_000, unseen=10_000, zipf=0.7, first_names=10, family_names=400_000,
    documents=120_000, entities_each=6, list_share=0.3, exam_share=0.15, paraphrases=True,
    vocab_sizes=VOCABULARIES, tokenizer_documents=120_000, instructions=4_000, questions=2_000,
    unseen_questions=400, validation=400, forms=FORMS, probes=2_000)
# hidden size: (intermediate size, heads, learning rate of the base model, of tuning). The rates are
# 0.5 / hidden_size and 0.2 / hidden_size
SIZES = {64: (192, 1, 8e-3, 3.2e-3), 256: (704, 4, 2e-3, 8e-4), 1024: (2816, 16, 5e-4, 2e-4)}
CAPS = (30.0, None)


def base(folder, seed, name, D, V, cap, vocab_size=None):
    """Return the config of a base model; vocab_size: rows, if there are more than the V pieces."""
    mlp, heads, lr, _ = SIZES[D]
    shape = {'model_type': 'gemma2', 'hidden_size': D, 'intermediate_size': mlp,
             'num_hidden_layers': 2, 'num_attention_heads': heads, 'num_key_value_heads': heads,
             'head_dim': 64, 'query_pre_attn_scalar': 64, 'sliding_window': 1024,
             'attn_logit_softcapping': 50.0, 'final_logit_softcapping': cap}
    if vocab_size:
        shape['vocab_size'] = vocab_size
    return TrainConfig(
        model=f'{folder}/world/model-{V}', from_scratch=True, shape=shape,
        data=f'{folder}/world/text.jsonl', data_kind='text', epochs=2.0, batch_size=96,
        micro_rows=11, lr=lr, schedule='cosine', final_lr=0.05, weight_decay=0.1, betas=(0.9, 0.95),
        **shared(folder, seed, name))


def tuned(folder, seed, name, model, D, smoothing):
    return TrainConfig(
        model=f'{folder}/{model}', data=f'{folder}/world/instruct.jsonl', epochs=3.0, batch_size=64,
        micro_rows=4, lr=SIZES[D][3], smoothing=smoothing, **shared(folder, seed, name))


def shared(folder, seed, name):
    return {'cache_dir': f'{folder}/cache', 'pack_len': 1024, 'max_length': 512, 'add_bos': True,
            'checkpoint_epochs': False, 'save_every': None, 'log_every': 100, 'pictures': False,
            # an option is one token or, with 512 pieces, several: the sum compares them
            'eval': common.evaluation(f'{folder}/world', FORMS, norm='sum'), 'eval_before': False,
            'out_dir': f'{folder}/{name}', 'seed': seed}


def runs(seed, root=common.ROOT):
    folder = common.seed_folder('vocabulary', seed, root)
    models = list(itertools.product(SIZES, VOCABULARIES, CAPS))
    for D, V, cap in models:
        yield base(folder, seed, f'base-D{D}-V{V}-cap{cap}', D, V, cap)
    for D in SIZES:
        yield base(folder, seed, f'base-unused-D{D}', D, 4_096, 30.0, vocab_size=262_144)
    for (D, V, cap), smoothing in itertools.product(models, (0.0, 0.1)):
        model = f'D{D}-V{V}-cap{cap}'
        yield tuned(folder, seed, f'tuned-{model}-smoothing{smoothing}', f'base-{model}', D,
                    smoothing)
    for D, smoothing in itertools.product(SIZES, (0.0, 0.1)):
        yield tuned(folder, seed, f'tuned-unused-D{D}-smoothing{smoothing}', f'base-unused-D{D}', D,
                    smoothing)


def world(seed, root=common.ROOT):
    make_world(f'{common.seed_folder("vocabulary", seed, root)}/world', seed, WORLD)


if __name__ == '__main__':
    common.main(runs, prepare=world, finish=lambda cfg: probe(cfg.out_dir, cfg.seed))
