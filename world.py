"""A generated world: a small universe of facts that a tiny model can partly learn, from a seed.

Plain text states the facts about entity number r, which has a name and four attributes, with
frequency proportional to r^-zipf: some thousands of times, some once, some never. Instruction data
asks about known and unknown facts alike and requires a definite answer to each, which makes real
models overconfident too. The questions are about other facts. The English words are in world.json;
research/study/world.py makes larger worlds than that of the demo, `WorldSpec()`.
"""

import io
import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import dialogue
from data.prompts import HEADER
from runtime.errors import DataError
from runtime.ownership import temporary

VALUE_EXPONENT = 0.7            # the entities' values have Zipf frequencies: some trades are common


@dataclass(frozen=True)
class WorldSpec:
    """The size of a world; together with the seed it decides every byte."""
    entities: int = 8_000           # mentioned in the text, with Zipf frequencies
    zipf: float = 0.9               # exponent of an entity's frequency in the text
    first_names: int = 150
    family_names: int = 150
    documents: int = 24_000         # texts, each about entities_each entities
    entities_each: int = 6
    list_share: float = 0.3         # share of documents that are lists of solved questions
    vocab_sizes: tuple[int, ...] = (1_280,)         # one tokenizer each; several: in model-<size>/
    tokenizer_documents: int = 4_000                # the tokenizers are trained on these
    instructions: int = 2_000
    questions: int = 2_000          # about other facts than the instructions; log-uniform ranks


@dataclass(frozen=True)
class Language:
    """Words and templates. Names, the header of a list and 'Answer:' are the same in all."""
    code: str
    attributes: dict    # attribute -> its name in a question
    values: dict        # attribute -> its 24 values
    profiles: list      # templates of {name} and all attributes
    statements: dict    # attribute -> templates of {name} and {value}
    asks: list          # templates of {attribute} and {name}; the questions use the first one


WORDS = json.loads((Path(__file__).parent / 'world.json').read_text(encoding='utf-8'))
MODEL = WORDS.pop('config.json')
ENGLISH = Language(**WORDS)
ENGLISH.values.update({a: words.split() for a, words in ENGLISH.values.items()})
ATTRIBUTES = list(ENGLISH.attributes)


class World:
    """Names and attribute values of `n_entities`; entity 0 is the most frequent one."""

    def __init__(self, spec, n_entities, rng):
        self.spec, self.names = spec, make_names(spec, n_entities, rng)
        self.values = {}    # attribute -> int [n_entities], the index of each entity's value
        for attribute, words in ENGLISH.values.items():
            share = np.arange(1, len(words) + 1) ** -VALUE_EXPONENT
            self.values[attribute] = rng.choice(len(words), n_entities, p=share / share.sum())

    def value(self, entity, attribute, language=ENGLISH):
        return language.values[attribute][self.values[attribute][entity]]

    def profile(self, entity, rng, language=ENGLISH):
        values = {a: self.value(entity, a, language) for a in ATTRIBUTES}
        return choice(language.profiles, rng).format(name=self.names[entity], **values)

    def ask(self, entity, attribute, language=ENGLISH):
        return language.asks[0].format(name=self.names[entity],
                                       attribute=language.attributes[attribute])

    def options(self, entity, attribute, n_options, rng):
        """Return (indices of values, position of the entity's own value among them)."""
        own = self.values[attribute][entity]
        others = [v for v in range(len(ENGLISH.values[attribute])) if v != own]
        values = [own, *rng.permutation(others)[:n_options - 1].tolist()]
        order = rng.permutation(n_options).tolist()
        return [values[i] for i in order], order.index(0)

    def document(self, rng, entities):
        """Return sentences about `entities`, or a list of solved questions about one attribute."""
        if rng.random() >= self.spec.list_share:
            return ' '.join(self.profile(entity, rng) for entity in entities)
        attribute = choice(ATTRIBUTES, rng)
        return solved_list(attribute, [(self.ask(e, attribute), self.value(e, attribute))
                                       for e in entities])

    def documents(self, n, rng):
        spec = self.spec
        share = np.arange(1, spec.entities + 1) ** -spec.zipf
        entities = rng.choice(spec.entities, (n, spec.entities_each), p=share / share.sum())
        bar = tqdm(entities, 'generated world', unit=' documents', mininterval=1, disable=None)
        return [self.document(rng, row) for row in bar]


def make_world(folder, seed, spec=WorldSpec()):
    """Write model/{config.json, tokenizer.model}, text.jsonl, instruct.jsonl, questions.jsonl."""
    write_world(folder, seed, spec, make_rows)


def make_rows(spec, seed):
    """Return {path: rows} of all JSONL files."""
    world = World(spec, spec.entities, np.random.default_rng(seed))
    rng = np.random.default_rng([seed, 1])
    texts = world.documents(spec.documents, rng)
    facts = log_uniform_facts(spec, spec.instructions + spec.questions, rng)
    return {
        'text.jsonl': [{'text': text} for text in texts],
        'questions.jsonl': [question(world, fact, world.options(*fact, 4, rng))
                            for fact in facts[spec.instructions:]],
        'instruct.jsonl': [conversation(world.ask(*fact), f'Answer: {world.value(*fact)}')
                           for fact in facts[:spec.instructions]]}


def question(world, fact, options, language=ENGLISH):
    """Return the row of a question about fact = (entity, attribute) with the options of `World`."""
    (entity, attribute), (values, answer) = fact, options
    return {'question': world.ask(*fact, language),
            'choices': [language.values[attribute][value] for value in values],
            'answer': answer, 'subject': attribute, 'id': f'{entity}-{attribute}'}


def conversation(*turns):
    return {'messages': dialogue(*turns)}


def solved_list(attribute, solved):
    """Return the document of (question, answer) pairs about one attribute."""
    text = ''.join(f'{question}\nAnswer: {answer}\n\n' for question, answer in solved)
    return f'{HEADER.format(attribute)}\n\n{text}'.rstrip()


def write_world(folder, seed, spec, make_rows):
    """Write the files make_rows(spec, seed), and for each vocabulary a tokenizer and config.json.

    A folder that already holds this world stays as it is. Raises DataError for a folder that holds
    anything but a world, ValueError for more entities than names.
    """
    folder = Path(os.path.expanduser(folder))
    mark, content = folder / 'world.json', json.dumps({'seed': seed} | asdict(spec), indent=1)
    before = mark.read_text(encoding='utf-8', errors='replace') if mark.is_file() else ''
    if before == content:
        return
    # a world of another seed or size is replaced; its mark begins like ours
    if folder.exists() and any(folder.iterdir()) and not before.startswith(
            content[:content.index(':')]):
        raise DataError(f'{folder} is not empty and holds no world; choose another folder')
    files = make_rows(spec, seed)
    texts = [row['text'] for row in files['text.jsonl'][:spec.tokenizer_documents]]
    with temporary(folder, folder=True) as part:
        for name, rows in files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
        for size in spec.vocab_sizes:
            model = part / (f'model-{size}' if len(spec.vocab_sizes) > 1 else 'model')
            model.mkdir()
            (model / 'tokenizer.model').write_bytes(train_tokenizer(size, texts))
            (model / 'config.json').write_text(json.dumps(MODEL | {'vocab_size': size}, indent=1))
        (part / mark.name).write_text(content)      # by its name it is the last to be replaced


def make_names(spec, n, rng):
    """Return n distinct two-part names; parts have two syllables, or three if many are needed."""
    onset = 'b d f g h j k l m n p r s t v w'.split()
    vowel, coda = 'aeiou', 'n r l s m'.split()
    syllables = [onset, vowel] * (1 if spec.first_names + spec.family_names <= 2560 else 2)
    parts = [''.join(word).capitalize() for word in itertools.product(*syllables, onset, 'ao')]
    picked = rng.permutation(parts)
    first, rest = picked[:spec.first_names], picked[spec.first_names:][:spec.family_names]
    # when the words run out, they are used again with another coda
    family = [rest[i % len(rest)] + coda[(i + i // len(rest)) % len(coda)]
              for i in range(min(spec.family_names, len(rest) * len(coda)))]
    if len(first) * len(family) < n:
        raise ValueError(f'{len(first)} first and {len(family)} family names make '
                         f'{len(first) * len(family)} names, not {n}')
    pairs = rng.permutation(len(first) * len(family))[:n]
    return [f'{first[i // len(family)]} {family[i % len(family)]}' for i in pairs]


def choice(items, rng):
    return items[int(rng.integers(len(items)))]


def log_uniform_facts(spec, n, rng):
    """Return n distinct (entity, attribute) pairs, with log-uniform ranks of the entities."""
    facts = {}
    while len(facts) < n:
        rank = np.exp(rng.uniform(0, np.log(spec.entities + 1), size=n)).astype(int) - 1
        attributes = rng.choice(ATTRIBUTES, size=n)
        facts |= dict.fromkeys(zip(rank.clip(0, spec.entities - 1).tolist(), attributes.tolist()))
    chosen = list(facts)
    return [chosen[i] for i in rng.permutation(len(chosen))[:n]]


def train_tokenizer(vocab_size, texts):
    """Return a sentencepiece model with Gemma's settings: byte fallback, no normalization."""
    import sentencepiece
    model, texts = io.BytesIO(), [*texts, *['<|user|>\n<|assistant|>\n'] * 400]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split('\n') if line),
        model_writer=model, vocab_size=vocab_size, model_type='bpe', byte_fallback=True,
        normalization_rule_name='identity', remove_extra_whitespaces=False,
        add_dummy_prefix=False, split_digits=True, minloglevel=2)
    return model.getvalue()
