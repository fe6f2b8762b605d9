"""The demo world: a small universe whose facts a tiny model can partly learn, made from a seed.

Entities have names and attributes. Plain text states the attributes, entity number r with frequency
proportional to r^-0.9: some facts are met thousands of times, some once, some never, and to the end
of training the base model keeps meeting entities it hardly knows, so it learns how unsure to be.
Instruction data then asks about known and unknown facts alike and demands a definite answer to
each: that is what makes a real model overconfident. The questions are about other facts.

Everything is written in the formats of real data: a sentencepiece model and a config.json in
`model/`, JSONL of {text}, of {messages} and of {question, choices, answer}.
"""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import sentencepiece
from tqdm import tqdm

from data.questions import HEADER

N_ENTITIES = 8_000
ZIPF_EXPONENT = 0.9             # of an entity's frequency in the text
VALUE_EXPONENT = 0.7            # of a value's frequency among entities: some trades are common
N_DOCUMENTS = 24_000            # of text, each about ENTITIES_EACH entities
ENTITIES_EACH = 6
NAME_PARTS = 150                # first names, and as many family names
LIST_SHARE = 0.3                # of documents that are lists of questions with answers
N_INSTRUCTIONS = 2_000
N_QUESTIONS = 2_000
N_OPTIONS = 4
VOCAB_SIZE = 1_280

# attribute -> (its name in a question, its 24 values)
ATTRIBUTES = {
    'trades': ('trade',
               'baker weaver smith miller potter tailor cooper mason glazier tanner brewer hunter '
               'fisher shepherd scribe healer printer painter carver sailor gardener joiner '
               'roofer cutler'),
    'towns': ('home town',
              'Arden Belmar Corvale Dunmere Eastwick Farrow Glenholt Harwell Inverlyn Jessop '
              'Kestrel Lorne Marwick Norhaven Oakley Pellam Quarrin Rosmoor Selby Thornby '
              'Ulverton Vesper Westmar Yarrow'),
    'instruments': ('instrument',
                    'flute fiddle drum harp lute cello horn organ zither banjo bugle cornet viola '
                    'piccolo bassoon oboe tuba clarinet mandolin piano gong whistle trombone '
                    'guitar'),
    'colours': ('favourite colour',
                'red blue green yellow black white orange purple brown grey pink teal violet '
                'crimson amber olive navy maroon ivory indigo scarlet beige turquoise copper'),
}
PROFILES = ('{name} is a {trades} from {towns} who plays the {instruments} and likes {colours}.',
            '{name}, who likes {colours} and plays the {instruments}, is a {trades} from {towns}.',
            'From {towns} comes {name}, a {trades} who likes {colours} and plays the '
            '{instruments}.')


class World:
    """Names and attribute values of all entities; entity 0 is the most frequent one."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.names = _names(rng)
        self.values = {}  # attribute -> list of N_ENTITIES values
        for attribute, (_, words) in ATTRIBUTES.items():
            words = words.split()
            share = np.arange(1, len(words) + 1) ** -VALUE_EXPONENT
            drawn = rng.choice(len(words), N_ENTITIES, p=share / share.sum())
            self.values[attribute] = [words[i] for i in drawn]

    def profile(self, entity, rng):
        return PROFILES[rng.integers(len(PROFILES))].format(
            name=self.names[entity], **{a: v[entity] for a, v in self.values.items()})

    def ask(self, entity, attribute):
        return f'What is the {ATTRIBUTES[attribute][0]} of {self.names[entity]}?'

    def document(self, rng, entities):
        """Profiles of `entities`, or a list of solved questions about one of their attributes."""
        if rng.random() < LIST_SHARE:
            attribute = list(ATTRIBUTES)[rng.integers(len(ATTRIBUTES))]
            solved = (f'{self.ask(e, attribute)}\nAnswer: {self.values[attribute][e]}\n\n'
                      for e in entities)
            return f'{HEADER.format(attribute)}\n\n{"".join(solved)}'.rstrip()
        return ' '.join(self.profile(entity, rng) for entity in entities)


def make_world(folder, seed):
    """Writes model/{config.json, tokenizer.model}, text.jsonl, instruct.jsonl, questions.jsonl."""
    folder = Path(folder)
    (folder / 'model').mkdir(parents=True, exist_ok=True)
    world = World(seed)
    rng = np.random.default_rng([seed, 1])
    share = np.arange(1, N_ENTITIES + 1) ** -ZIPF_EXPONENT
    entities = rng.choice(N_ENTITIES, (N_DOCUMENTS, ENTITIES_EACH), p=share / share.sum())
    texts = [world.document(rng, row) for row in tqdm(entities, 'demo world', unit=' documents')]
    facts = _log_uniform_facts(N_INSTRUCTIONS + N_QUESTIONS, rng)
    instructions = [_instruction(world, *fact) for fact in facts[:N_INSTRUCTIONS]]
    questions = [_question(world, *fact, rng) for fact in facts[N_INSTRUCTIONS:]]
    _write_jsonl(folder / 'text.jsonl', [{'text': text} for text in texts])
    _write_jsonl(folder / 'instruct.jsonl', instructions)
    _write_jsonl(folder / 'questions.jsonl', questions)
    tags = '<|user|>\n<|assistant|>\n'
    _train_tokenizer(folder / 'model' / 'tokenizer.model', texts[:4000] + [tags] * 400)
    _write(folder / 'model' / 'config.json', json.dumps(MODEL, indent=1).encode())


MODEL = {
    'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', 'vocab_size': VOCAB_SIZE,
    'hidden_size': 128, 'intermediate_size': 352, 'num_hidden_layers': 2,
    'num_attention_heads': 4, 'num_key_value_heads': 4, 'max_position_embeddings': 512,
    'rms_norm_eps': 1e-5, 'rope_theta': 10000.0, 'tie_word_embeddings': True,
    'bos_token_id': 1, 'eos_token_id': 2, 'torch_dtype': 'float32',
}


def _names(rng):
    """N_ENTITIES distinct two-part names; each part is a word of two syllables."""
    onset, vowel, coda = 'b d f g h j k l m n p r s t v w'.split(), 'aeiou', 'n r l s m'.split()
    parts = [f'{a}{v}{b}{w}'.capitalize()
             for a, v, b, w in itertools.product(onset, vowel, onset, 'ao')]
    picked = rng.permutation(parts)
    first, rest = picked[:NAME_PARTS], picked[NAME_PARTS:2 * NAME_PARTS]
    family = [part + coda[i % len(coda)] for i, part in enumerate(rest)]
    pairs = rng.permutation(len(first) * len(family))[:N_ENTITIES]
    return [f'{first[i // len(family)]} {family[i % len(family)]}' for i in pairs]


def _log_uniform_facts(n, rng):
    """n distinct (entity, attribute) pairs, the entity's rank log-uniform: known and unknown."""
    facts = {}
    while len(facts) < n:
        rank = np.exp(rng.uniform(0, np.log(N_ENTITIES + 1), size=n)).astype(int) - 1
        attributes = rng.choice(list(ATTRIBUTES), size=n)
        facts |= dict.fromkeys(zip(rank.clip(0, N_ENTITIES - 1).tolist(), attributes.tolist()))
    chosen = list(facts)
    return [chosen[i] for i in rng.permutation(len(chosen))[:n]]


def _instruction(world, entity, attribute):
    # worded as the questions will be: the README says what happens with another wording
    answer = f'Answer: {world.values[attribute][entity]}'
    return {'messages': [{'role': 'user', 'content': world.ask(entity, attribute)},
                         {'role': 'assistant', 'content': answer}]}


def _question(world, entity, attribute, rng):
    answer = world.values[attribute][entity]
    others = [v for v in ATTRIBUTES[attribute][1].split() if v != answer]
    choices = [answer, *rng.permutation(others)[:N_OPTIONS - 1].tolist()]
    order = rng.permutation(N_OPTIONS).tolist()
    return {'question': world.ask(entity, attribute), 'choices': [choices[i] for i in order],
            'answer': order.index(0), 'subject': attribute, 'id': f'{entity}-{attribute}'}


def _train_tokenizer(path, texts):
    """A sentencepiece model in the manner of Gemma's: byte fallback, nothing normalised."""
    part = path.with_suffix('.tmp')
    with open(part, 'wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split('\n') if line),
            model_writer=file, vocab_size=VOCAB_SIZE, model_type='bpe', byte_fallback=True,
            normalization_rule_name='identity', remove_extra_whitespaces=False,
            add_dummy_prefix=False, split_digits=True, minloglevel=2)
    os.replace(part, path)


def _write_jsonl(path, rows):
    _write(path, ''.join(json.dumps(row) + '\n' for row in rows).encode())


def _write(path, content):
    part = Path(f'{path}.tmp')
    part.write_bytes(content)
    os.replace(part, path)
